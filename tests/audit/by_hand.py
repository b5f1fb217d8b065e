"""Section 3 of the methods, written out sample by sample in float64: what an audit must agree with.

Nothing here calls the package but to look numbers up in a state_dict.
"""

from __future__ import annotations

import math

import torch

WEIGHT = 1e-3  # of the positive in AmorLIP's sum
READABLE = 1e-3


def term(pairwise: str, similarity: float, positive: float, margin: float = 0.1) -> float:
    match pairwise:
        case "identity":
            return similarity - positive
        case "hinge":
            return max(similarity - positive + margin, 0.0) ** 2
        case "robust_positives" | "raw":
            return similarity
    raise AssertionError(pairwise)


def mean_over(pairwise, anchors, others, i, rows, tau, both=False):
    """g_i: the mean over the rows but i."""
    positive = float(anchors[i] @ others[i])
    rows = [j for j in rows if j != i]
    sets = (others, anchors) if both else (others,)
    found = [math.exp(term(pairwise, float(anchors[i] @ table[j]), positive) / tau) for table in sets for j in rows]
    return sum(found) / len(found)


def batches_for(count: int, anchors: int, batch: int, generator: torch.Generator) -> list[list[int]]:
    """The batch drawn for each anchor: groups of anchors share one, and an epoch's left-over rows are dropped."""
    group = max(1, min(batch, math.ceil(anchors / 16)))
    drawn: list[list[int]] = []
    while len(drawn) * group < anchors:
        order = torch.randperm(count, generator=generator).tolist()
        drawn += [order[k * batch : (k + 1) * batch] for k in range(count // batch)]
    return [drawn[place // group] for place in range(anchors)]


def with_anchor(rows: list[int], i: int) -> list[int]:
    return rows if i in rows else [*rows[:-1], i]


def less(total: float, constant: float) -> float:
    return max(total - constant, READABLE * total)


def linear(state, name, x):
    return x @ state[f"{name}.weight"].double().T + state[f"{name}.bias"].double()


def layer_norm(state, name, x):
    centred = x - x.mean()
    return centred / torch.sqrt((centred**2).mean() + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]


def lambda_net(state, name, x):
    """linear-ReLU-LayerNorm twice, the input added, ReLU, linear."""
    y = layer_norm(state, f"{name}.blocks.2", torch.relu(linear(state, f"{name}.blocks.0", x)))
    y = layer_norm(state, f"{name}.blocks.5", torch.relu(linear(state, f"{name}.blocks.3", y)))
    return float(linear(state, f"{name}.head", torch.relu(y + x)))


def tau_of(state, direction, config, x, i):
    """Of one anchor: constant, learned (as its log), a table's row, or TempNet's answer."""
    if f"temperatures.{direction}.tau.values" in state:
        row = float(state[f"temperatures.{direction}.tau.values"][i])
        return config.temperature if math.isnan(row) else row
    if f"temperatures.{direction}.centers_CD" in state:
        net = f"temperatures.{direction}"
        v = torch.sigmoid(linear(state, f"{net}.projection", x))
        centers = state[f"{net}.centers_CD"].double()
        a = (centers / centers.norm(dim=1, keepdim=True)) @ v
        q = torch.softmax(a / math.exp(float(state[f"{net}.log_sharpness"])), dim=0)
        t = linear(state, f"{net}.head", (q - 1 / len(a)) * torch.sigmoid(a))
        low, high = config.temperature_min, config.temperature_max
        return low + (high - low) * float(torch.sigmoid(t))
    learned = state.get("temperatures.both.log_temperature")
    return config.temperature if learned is None else math.exp(float(learned))


def prototype_mean(state, direction, pairwise, x, positive, tau, active):
    """NeuCLIP eq. (10) without epsilon: the mean over the prototypes in use."""
    prototypes = state[f"normalizers.{direction}.prototypes_MD"][:active].double()
    return sum(math.exp(term(pairwise, float(x @ w) / float(w.norm()), positive) / tau) for w in prototypes) / active


def mlp_alpha(state, direction, pairwise, x, positive, tau):
    net = f"normalizers.{direction}.net.net"
    shift = positive / tau if pairwise == "identity" else 0.0
    return lambda_net(state, net, x) - shift
