"""The papers' equations as loops over samples, in float64, with exponentials and logarithms as they are printed.

Nothing here is taken from the package.  Slow and only right for moderate temperatures; that is the point.
Gradients of estimators such as NeuCLIP eq. (4) are written as the printed sum, with autograd for the inner gradient
of one g_i only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Loss = Callable[[Tensor], Tensor]


def identity(gap: Tensor) -> Tensor:
    return gap


def squared_hinge(margin: float) -> Loss:
    return lambda gap: torch.clamp(gap + margin, min=0.0) ** 2


def similarity(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b)


def exponents(anchor: Tensor, other: Tensor, i: int, tau: Tensor, loss: Loss, raw: bool) -> list[Tensor]:
    """x_ij = loss(s_ij - s_ii) / tau for every j != i; with ``raw`` the similarity itself over tau."""
    positive = similarity(anchor[i], other[i])
    sims = [similarity(anchor[i], other[j]) for j in range(len(other)) if j != i]
    return [(s if raw else loss(s - positive)) / tau for s in sims]


def inner_mean(anchor: Tensor, other: Tensor, i: int, tau: Tensor, loss: Loss = identity, raw: bool = False) -> Tensor:
    """g_i: the mean of exp(x_ij) over j != i."""
    terms = [torch.exp(x) for x in exponents(anchor, other, i, tau, loss, raw)]
    return sum(terms[1:], terms[0]) / len(terms)


def weighted_mean(
    anchor: Tensor, other: Tensor, i: int, tau: Tensor, loss: Loss = identity, raw: bool = False
) -> Tensor:
    """The mean of exp(x_ij) x_ij over j != i, for iSogCLR's temperature gradient."""
    terms = [torch.exp(x) * x for x in exponents(anchor, other, i, tau, loss, raw)]
    return sum(terms[1:], terms[0]) / len(terms)


# -- losses with a closed form ----------------------------------------------------------------------------------------


def infonce(image: Tensor, text: Tensor, tau: Tensor) -> Tensor:
    """CLIP: cross entropy of each row and each column, averaged, halved."""
    total = torch.zeros((), dtype=image.dtype)
    count = len(image)
    for anchor, other in ((image, text), (text, image)):
        for i in range(count):
            exps = [torch.exp(similarity(anchor[i], other[j]) / tau) for j in range(count)]
            total = total - torch.log(exps[i] / sum(exps))
    return total / (2 * count)


def siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Zhai et al. 2023, algorithm 1: -log sigmoid(z (scale s + bias)), summed over pairs, over the batch size."""
    total = torch.zeros((), dtype=image.dtype)
    for i in range(len(image)):
        for j in range(len(text)):
            z = 1.0 if i == j else -1.0
            total = total - torch.log(torch.sigmoid(z * (scale * similarity(image[i], text[j]) + bias)))
    return total / len(image)


def nt_xent(first: Tensor, second: Tensor, tau: float) -> Tensor:
    """SimCLR: 2B anchors, each against the 2B - 1 other views."""
    views = [*first, *second]
    count = len(first)
    total = torch.zeros((), dtype=first.dtype)
    for i in range(2 * count):
        partner = (i + count) % (2 * count)
        exps = {k: torch.exp(similarity(views[i], views[k]) / tau) for k in range(2 * count) if k != i}
        total = total - torch.log(exps[partner] / sum(exps.values()))
    return total / (2 * count)


def cyclip_penalty(image: Tensor, text: Tensor, in_modal: float, cross_modal: float) -> Tensor:
    """Goel et al. 2022, the two consistency terms, each a sum over pairs divided by the batch size."""
    total = torch.zeros((), dtype=image.dtype)
    for i in range(len(image)):
        for j in range(len(image)):
            within = similarity(image[i], image[j]) - similarity(text[i], text[j])
            across = similarity(image[i], text[j]) - similarity(image[j], text[i])
            total = total + (in_modal * within**2 + cross_modal * across**2) / len(image)
    return total


def vicreg(image: Tensor, text: Tensor, invariance: float, variance: float, covariance: float) -> Tensor:
    """Bardes et al. 2022, eq. (1)-(6), coordinate by coordinate."""
    count, width = image.shape
    total = invariance * torch.nn.functional.mse_loss(image, text)
    for rows in (image, text):
        centred = rows - rows.mean(0)
        for a in range(width):
            deviation = torch.sqrt(centred[:, a].square().sum() / (count - 1) + 1e-4)
            total = total + variance * torch.clamp(1.0 - deviation, min=0.0) / width / 2
            for b in range(width):
                if a != b:
                    total = total + covariance * ((centred[:, a] * centred[:, b]).sum() / (count - 1)) ** 2 / width
    return total


def global_loss(image: Tensor, text: Tensor, tau: Tensor, rho: float, epsilon: float, loss: Loss = identity) -> Tensor:
    """NeuCLIP eq. (1) on the rows given."""
    total = 2 * tau * rho
    for anchor, other in ((image, text), (text, image)):
        for i in range(len(image)):
            total = total + tau * torch.log(epsilon + inner_mean(anchor, other, i, tau, loss)) / len(image)
    return total


# -- the moving average, NeuCLIP eq. (3), (4), (13) -------------------------------------------------------------------


@dataclass
class Gradients:
    image: Tensor
    text: Tensor
    tau: Tensor | None = None


@dataclass
class MovingAverages:
    """u per direction and id; absent until first seen."""

    image: dict[int, float] = field(default_factory=dict)
    text: dict[int, float] = field(default_factory=dict)

    def update(self, direction: str, key: int, new: float, gamma: float) -> float:
        table = getattr(self, direction)
        table[key] = (1.0 - gamma) * table[key] + gamma * new if key in table else new
        return table[key]


def cosine_gamma(gamma_min: float, epochs: float, epoch: int) -> float:
    if epoch >= epochs:
        return gamma_min
    return 0.5 * (1.0 + math.cos(math.pi * epoch / epochs)) * (1.0 - gamma_min) + gamma_min


def directions(image: Tensor, text: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    return [("image", image, text), ("text", text, image)]


def moving_average_step(
    image: Tensor,
    text: Tensor,
    ids: list[int],
    u: MovingAverages,
    tau: float,
    gamma: float,
    epsilon: float,
    rho: float | None = None,
    loss: Loss = identity,
    times_tau: bool = True,
    released: bool = False,
    unit_mean: bool = False,
    log_c: Tensor | None = None,
    correct_weights: bool = False,
) -> tuple[Gradients, float]:
    """The estimator of eq. (4), eq. (13) for tau where rho is given, and tau mean log u (+ 2 rho tau) as the value.

    ``times_tau=False`` is FastCLIP v0: the loss, and so both gradients, without the factor tau.  ``released`` is tau's
    gradient in FastCLIP's released code, (eq. (13) + T) / 2 with T the terms in which tau is inside g.  ``unit_mean``:
    each direction's u are multiplied by one number, with which its weights (epsilon + g) / u have mean 1.  ``log_c``, a
    row a sample, is for selected batches: c g stands for g but in the embeddings' gradient, and with
    ``correct_weights`` there.
    """
    count = len(ids)
    image, text = image.detach().requires_grad_(), text.detach().requires_grad_()
    live_tau = torch.tensor(tau, dtype=image.dtype, requires_grad=True)
    grad_image, grad_text, grad_tau = torch.zeros_like(image), torch.zeros_like(text), 0.0
    value, inside = 0.0, 0.0
    factor = tau if times_tau else 1.0
    for place, (name, anchor, other) in enumerate(directions(image, text)):
        c = [1.0 if log_c is None else math.exp(float(log_c[i, place])) for i in range(count)]
        means = [inner_mean(anchor, other, i, live_tau, loss) for i in range(count)]
        totals = [epsilon + c[i] * float(means[i].detach()) for i in range(count)]
        averages = [u.update(name, ids[i], totals[i], gamma) for i in range(count)]
        scale = sum(totals[i] / averages[i] for i in range(count)) / count if unit_mean else 1.0
        for i, g in enumerate(means):
            new_u = scale * averages[i]
            d_image, d_text, d_tau = torch.autograd.grad(g, (image, text, live_tau))
            share = c[i] if correct_weights else 1.0
            grad_image += factor / count / new_u * share * d_image
            grad_text += factor / count / new_u * share * d_text
            inside += factor / count / new_u * c[i] * float(d_tau)
            if times_tau:
                grad_tau += math.log(new_u) / count
            value += factor * (totals[i] / new_u - 1.0 + math.log(new_u)) / count
    if rho is not None:
        grad_tau += 2 * rho
        value += 2 * rho * tau
    grad_tau += inside
    if released:
        grad_tau = (grad_tau + inside) / 2
    return Gradients(grad_image, grad_text, torch.tensor(grad_tau, dtype=torch.float64)), value


def sogclr_views_step(
    first: Tensor, second: Tensor, ids: list[int], u: dict[int, float], tau: float, gamma: float
) -> tuple[Gradients, float]:
    """SogCLR on two views, as Yuan et al. 2022 and Cho et al. 2023 have it in code: raw similarities, both views'
    2(B - 1) negatives, one u an image.

    Each view divides by its own blend of the image's old u and its mean; the image keeps the mean of both blends.  An
    anchor's gradient is -grad s_ii + 1/(2(B-1)) sum_j exp(s_ij / tau) / u_i grad s_ij; the value beside it is
    -s_ii + tau (g_i / u_i - 1 + log u_i).
    """
    count, old = len(ids), dict(u)
    views = (first.detach().requires_grad_(), second.detach().requires_grad_())
    sums = [torch.zeros_like(view) for view in views]
    value = 0.0
    for i in range(count):
        blends = []
        for anchor, other in (views, views[::-1]):
            positive = similarity(anchor[i], other[i])
            sims = [similarity(anchor[i], rows[j]) for rows in (other, anchor) for j in range(count) if j != i]
            g = sum(math.exp(float(s.detach()) / tau) for s in sims) / len(sims)
            own = (1.0 - gamma) * old[ids[i]] + gamma * g if ids[i] in old else g
            blends.append(own)
            weights = [math.exp(float(s.detach()) / tau) / own / len(sims) for s in sims]
            surrogate = -positive + sum(weight * s for weight, s in zip(weights, sims, strict=True))
            for total, gradient in zip(sums, torch.autograd.grad(surrogate, views), strict=True):
                total += gradient / count
            value += (-float(positive.detach()) + tau * (g / own - 1.0 + math.log(own))) / count
        u[ids[i]] = sum(blends) / 2.0
    return Gradients(*sums), value


# -- per-sample temperatures, iSogCLR and FastCLIP v2 -----------------------------------------------------------------


@dataclass
class Temperatures:
    start: float
    tau: dict[tuple[str, int], float] = field(default_factory=dict)
    first: dict[tuple[str, int], float] = field(default_factory=dict)
    second: dict[tuple[str, int], float] = field(default_factory=dict)

    def of(self, direction: str, key: int) -> float:
        return self.tau.get((direction, key), self.start)


def momentum_move(state: Temperatures, key: tuple[str, int], gradient: float, beta: float) -> float:
    state.first[key] = (1.0 - beta) * state.first.get(key, 0.0) + beta * gradient
    return state.first[key]


def adam_move(state: Temperatures, key: tuple[str, int], gradient: float, epoch: int) -> float:
    beta1, beta2 = (0.9, 0.999) if epoch > 0 else (0.0, 0.0)
    state.first[key] = beta1 * state.first.get(key, 0.0) + (1 - beta1) * gradient
    state.second[key] = beta2 * state.second.get(key, 0.0) + (1 - beta2) * gradient**2
    corrected_first = state.first[key] / (1 - beta1 ** (epoch + 1))
    corrected_second = state.second[key] / (1 - beta2 ** (epoch + 1))
    return corrected_first / (math.sqrt(corrected_second) + 1e-8)


def per_sample_step(
    image: Tensor,
    text: Tensor,
    ids: list[int],
    u: MovingAverages,
    temperatures: Temperatures,
    gamma: float,
    epsilon: float,
    rho: dict[str, float],
    move: Callable[[Temperatures, tuple[str, int], float], float],
    lr: float,
    bounds: tuple[float, float],
    clip: float | None,
    loss: Loss = identity,
    raw: bool = False,
) -> tuple[Gradients, float]:
    """One step of iSogCLR: the encoders' gradient with the old tau_i and the new u_i, then tau_i moves."""
    count = len(ids)
    image, text = image.detach().requires_grad_(), text.detach().requires_grad_()
    grad_image, grad_text, value = torch.zeros_like(image), torch.zeros_like(text), 0.0
    for name, anchor, other in directions(image, text):
        for i, key in enumerate(ids):
            tau = temperatures.of(name, key)
            live = torch.tensor(tau, dtype=image.dtype)
            g = inner_mean(anchor, other, i, live, loss, raw)
            new_u = u.update(name, key, epsilon + float(g.detach()), gamma)
            d_image, d_text = torch.autograd.grad(g, (image, text))
            grad_image += tau / count / new_u * d_image
            grad_text += tau / count / new_u * d_text
            value += tau * ((epsilon + float(g.detach())) / new_u - 1.0 + math.log(new_u) + rho[name]) / count
            gradient = math.log(new_u) + rho[name]
            gradient -= float(weighted_mean(anchor, other, i, live, loss, raw).detach()) / new_u
            if clip is not None:
                gradient = min(max(gradient, -clip), clip)
            moved = tau - lr * move(temperatures, (name, key), gradient)
            temperatures.tau[name, key] = min(max(moved, bounds[0]), bounds[1])
    return Gradients(grad_image, grad_text), value


def robust_positives_step(
    image: Tensor, text: Tensor, r: float, strength: float, gamma: float, epoch: int
) -> tuple[Gradients, float, float]:
    """-2 mean(p_i s_ii), p_i = exp(-2 s_ii / lambda) / r: r is the mean numerator of the batch in epoch 0, and a moving
    average of it afterwards."""
    count = len(image)
    numerators = [math.exp(-2.0 * float(similarity(image[i], text[i]).detach()) / strength) for i in range(count)]
    mean = sum(numerators) / count
    r = mean if epoch == 0 else (1.0 - gamma) * r + gamma * mean
    grad_image, grad_text, value = torch.zeros_like(image), torch.zeros_like(text), 0.0
    for i in range(count):
        p = numerators[i] / r
        grad_image[i] = -2.0 * p / count * text[i]
        grad_text[i] = -2.0 * p / count * image[i]
        value += -2.0 * p / count * float(similarity(image[i], text[i]).detach())
    return Gradients(grad_image, grad_text), value, r


# -- TempNet ----------------------------------------------------------------------------------------------------------


def tempnet(
    x: Tensor, weight: Tensor, bias: Tensor, centers: Tensor, log_sharpness: Tensor, head: Tensor, head_bias: Tensor,
    bounds: tuple[float, float],
) -> Tensor:  # fmt: skip
    """tau of one embedding, without dropout."""
    v = torch.sigmoid(weight @ x + bias)
    a = torch.stack([torch.dot(v, p / p.norm()) for p in centers])
    q = torch.softmax(a / torch.exp(log_sharpness), dim=0)
    t = torch.dot(head, (q - 1.0 / len(centers)) * torch.sigmoid(a)) + head_bias
    return bounds[0] + (bounds[1] - bounds[0]) * torch.sigmoid(t)


# -- NeuCLIP ----------------------------------------------------------------------------------------------------------


def npn_alpha(
    e: Tensor, partner: Tensor, prototypes: Tensor, tau: Tensor, epsilon: float, loss: Loss = identity
) -> Tensor:
    """NeuCLIP eq. (10) for one anchor."""
    positive = similarity(e, partner)
    total = torch.zeros((), dtype=e.dtype)
    for w in prototypes:
        cosine = similarity(e, w) / (e.norm() * w.norm())
        total = total + torch.exp(loss(cosine - positive) / tau)
    return torch.log(epsilon + total / len(prototypes))


def neuclip_loss(
    image: Tensor, text: Tensor, w_image: Tensor, w_text: Tensor, tau: Tensor, rho: float, epsilon: float,
    detach_alpha: bool = False, loss: Loss = identity, log_c: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """NeuCLIP eq. (12); w_image are the prototypes that image anchors look at (they summarise texts).  ``log_c``, a row
    a sample, is for selected batches: c g stands for g but in the embeddings' gradient."""
    total = 2 * tau * (rho - 1.0)
    for place, (anchor, other, prototypes) in enumerate(((image, text, w_image), (text, image, w_text))):
        for i in range(len(image)):
            alpha = npn_alpha(anchor[i], other[i], prototypes, tau, epsilon, loss)
            if detach_alpha:
                alpha = alpha.detach()
            g = inner_mean(anchor, other, i, tau, loss)
            if log_c is not None:
                by_tau = torch.exp(log_c[i, place]) * inner_mean(anchor.detach(), other.detach(), i, tau, loss)
                by_rows = inner_mean(anchor, other, i, tau.detach(), loss)
                g = by_tau + (by_rows - by_rows.detach())
            total = total + tau * (torch.exp(-alpha) * (epsilon + g) + alpha) / len(image)
    return total


def npn_separate_loss(
    anchor: Tensor, other: Tensor, prototypes: Tensor, tau: Tensor, epsilon: float, loss: Loss = identity,
    c: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """half the mean squared difference of the logs (the "separate" objective of Tables 14-16), one direction."""
    total = torch.zeros((), dtype=anchor.dtype)
    for i in range(len(anchor)):
        alpha = npn_alpha(anchor[i], other[i], prototypes, tau, epsilon, loss)
        target = torch.log(epsilon + (1.0 if c is None else c[i]) * inner_mean(anchor, other, i, tau, loss))
        total = total + 0.5 * (alpha - target.detach()) ** 2 / len(anchor)
    return total


def rolling_alpha(
    e: Tensor, partner: Tensor, prototypes: Tensor, own: int | None, tau: Tensor, epsilon: float, loss: Loss = identity
) -> Tensor:
    """NeuCLIP eq. (10) for one anchor, over all prototypes but the one that is its own positive (None: over all)."""
    kept = [w for place, w in enumerate(prototypes) if place != own]
    return npn_alpha(e, partner, torch.stack(kept), tau, epsilon, loss)


def xbm(image: Tensor, text: Tensor, queues: dict[str, list[Tensor]], tau: Tensor) -> Tensor:
    """InfoNCE whose denominator also has the queue of the other modality; mean of both directions."""
    total = torch.zeros((), dtype=image.dtype)
    for name, anchor, other in directions(image, text):
        for i in range(len(image)):
            positive = torch.exp(similarity(anchor[i], other[i]) / tau)
            denominator = sum(torch.exp(similarity(anchor[i], row) / tau) for row in [*other, *queues[name]])
            total = total - torch.log(positive / denominator) / (2 * len(image))
    return total


def scent_update(u: float | None, new: float, log_step: float) -> float:
    """SCENT, on nu = log u: nu + log(1 + e^a g) - log(1 + e^(a + nu)); a sample never seen starts at g."""
    if u is None:
        return new
    nu = math.log(u)
    return math.exp(nu + math.log1p(math.exp(log_step) * new) - math.log1p(math.exp(log_step + nu)))


# -- AmorLIP ----------------------------------------------------------------------------------------------------------


def amorlip_sum(anchor: Tensor, other: Tensor, i: int, tau: Tensor, positive_weight: float) -> Tensor:
    total = torch.zeros((), dtype=anchor.dtype)
    for j in range(len(other)):
        weight = positive_weight if j == i else 1.0
        total = total + weight * torch.exp(similarity(anchor[i], other[j]) / tau)
    return total


def amorlip_loss(
    image: Tensor, text: Tensor, tau: Tensor, log_lambda: dict[str, list[float]], rho: float, positive_weight: float
) -> Tensor:
    """tau.detach() (-2 mean s_ii / tau + sum over directions of mean_i sum_j exp(s_ij / tau) / lambda_i) + rho tau."""
    count = len(image)
    total = torch.zeros((), dtype=image.dtype)
    for i in range(count):
        total = total - 2.0 * similarity(image[i], text[i]) / tau / count
    for name, anchor, other in directions(image, text):
        for i in range(count):
            total = total + amorlip_sum(anchor, other, i, tau, positive_weight) / math.exp(log_lambda[name][i]) / count
    return total * tau.detach() + rho * tau
