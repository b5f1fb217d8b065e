"""Weights between the base and the tuned model, and what each is worth (WiSE-FT, Wortsman et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fullbatch.evaluation.result import Measured
from fullbatch.finetuning.record import changes_between, score_of, values_of
from fullbatch.loading import Opened
from fullbatch.models.design import Design, OpenClipDesign
from fullbatch.models.open_clip_towers import START_SCALE

FILE, INTERPOLATED = "interpolation.json", "interpolated"
ALPHAS = tuple(round(0.1 * tenth, 1) for tenth in range(11))
_SCALARS = ("backbone.logit_scale", "backbone.logit_bias")  # of the loss; they are mixed beside the weights


@dataclass(frozen=True)
class Point:
    alpha: float  # 0 is the base, 1 the tuned model
    values: dict[str, float]
    score: float | None
    regressed: tuple[str, ...]  # the tasks that fell by more than the tolerance


def best_of(points: Sequence[Point]) -> Point:
    """The highest score without a regressed task; of equal ones the nearest to the base, which always qualifies."""
    safe = [point for point in points if point.score is not None and not point.regressed]
    return max(safe, key=lambda point: (point.score, -point.alpha), default=points[0])


class Between:
    """Models on the line from ``base`` to ``tuned``: one set of towers, whose weights are replaced."""

    def __init__(self, base: Opened, tuned: Opened) -> None:
        self.base, self.tuned = base, tuned
        states = [opened.model.state_dict() for opened in (base, tuned)]
        self._ends = [  # a copy on the host, since the towers are written over
            {name: value.detach().to("cpu", copy=True) for name, value in state.items() if name not in _SCALARS}
            for state in states
        ]
        _require_alike(base.model.design, tuned.model.design, *self._ends)
        self.model = tuned.model

    def at(self, alpha: float) -> Opened:
        """``model`` with the weights (1 - alpha) base + alpha tuned; the ends are theirs to the bit."""
        start, end = self._ends
        own = self.model.state_dict()
        mixed = {name: mix(start[name], end[name], alpha) if name in start else own[name] for name in own}
        self.model.load_state_dict(mixed)
        logs = [math.log(opened.temperature) for opened in (self.base, self.tuned)]
        temperature = math.exp((1.0 - alpha) * logs[0] + alpha * logs[1])
        if alpha in (0.0, 1.0):
            temperature = (self.base, self.tuned)[int(alpha)].temperature
        biases = [opened.bias or 0.0 for opened in (self.base, self.tuned)]
        bias = (1.0 - alpha) * biases[0] + alpha * biases[1]
        has_bias = self.base.bias is not None or self.tuned.bias is not None
        return Opened(self.model, temperature, bias if has_bias else None)


def mix(base: Tensor, tuned: Tensor, alpha: float) -> Tensor:
    """In float32, or wider where the weights are; counts (BatchNorm's batches) are the tuned model's."""
    if not tuned.is_floating_point():
        return tuned if alpha else base
    wide = torch.promote_types(torch.float32, tuned.dtype)
    if alpha in (0.0, 1.0):
        return (tuned if alpha else base).to(wide)
    return (1.0 - alpha) * base.to(wide) + alpha * tuned.to(wide)


def _require_alike(base: Design, tuned: Design, *weights: Mapping[str, Tensor]) -> None:
    shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in weights]
    differing = [name for name in sorted({*shapes[0], *shapes[1]}) if shapes[0].get(name) != shapes[1].get(name)]
    if differing:
        first = differing[0]
        raise ValueError(
            f"The two models are of different architectures ({base.name} and {tuned.name}): they differ "
            f"in {len(differing)} weights, first {first}: {shapes[0].get(first)} and {shapes[1].get(first)}. "
            "Only a model and what was tuned from it have weights in between."
        )
    plain = [  # without the name it goes by, and where its logit scale and bias start
        replace(design, name="", config={key: value for key, value in design.config.items() if key not in START_SCALE})
        if isinstance(design, OpenClipDesign)
        else design
        for design in (base, tuned)
    ]
    if plain[0] != plain[1]:
        raise ValueError(
            f"The two models have the same weights but another design ({base.name} and {tuned.name}): "
            "their activations or normalisation differ, so that nothing in between means anything."
        )


def measure_curve(
    between: Between, alphas: Sequence[float], measure: Callable[[], Measured], metric: str, tolerance: float
) -> Iterator[Point]:
    """``measure`` looks at ``between.model``, whose weights change, and begins with the base."""
    points: list[Point] = []
    for alpha in alphas:
        between.at(alpha)
        values = values_of(measure(), metric)
        base = points[0].values if points else values
        changes = changes_between(base, values, {}, tolerance)
        fallen = tuple(dict.fromkeys(change.task for change in changes if change.regressed))
        points.append(Point(alpha, values, score_of(values, metric, base), fallen))
        yield points[-1]
