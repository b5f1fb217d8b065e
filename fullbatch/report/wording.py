"""How numbers, tasks and settings are written on the page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from typing_extensions import TypeIs

_NAMES = {"mean_r1": "mean R@1", "accuracy_top5": "top-5 accuracy", "samples_per_second": "pairs per second"}
NOTHING, TIMES, MINUS = "\u2013", "\u00d7", "\u2212"  # an en dash for what is not known, a real times and minus
_LOWER_IS_BETTER = frozenset(("rank", "error", "loss", "seconds", "gib", "bias"))


def is_number(value: object) -> TypeIs[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def metric_name(metric: str) -> str:
    """As people say it: image_to_text_r5 is "image → text R@5"."""
    spoken = re.sub(r"_r(\d+)$", r" R@\1", metric).replace("_to_", " → ")
    return _NAMES.get(metric) or spoken.replace("_", " ")


def metric_words(key: str) -> tuple[str, str]:
    """Of "retrieval:photos.csv mean_r1", as logs name it: the source, and what is measured there."""
    task, _, metric = key.rpartition(" ")
    kind, colon, source = task.partition(":")
    return (source, f"{kind.replace('_', '-')} · {metric_name(metric)}") if colon else (task, metric_name(metric))


def lower_is_better(metric: str) -> bool:
    """Of a metric, or of a "TASK METRIC": by the words of the metric's own name, whatever the task's path holds."""
    return not _LOWER_IS_BETTER.isdisjoint(metric.rpartition(" ")[2].split("_"))


def is_share(metric: str) -> bool:
    return not lower_is_better(metric)


def best_of(values: Iterable[object], metric: str) -> float | None:
    """None where there is nothing to choose from, as among equals."""
    known = {float(value) for value in values if is_number(value)}
    return (min if lower_is_better(metric) else max)(known) if len(known) > 1 else None


def value_text(value: object, metric: str = "") -> str:
    if not is_number(value):
        return NOTHING
    return percent(value) if is_share(metric) and -1.0 <= value <= 1.0 else number(value)


def percent(value: object) -> str:
    """Two figures for the small, one decimal for the others.

    >>> percent(0.0007), percent(0.0654)
    ('0.07%', '6.5%')
    """
    return f"{value:.{2 if abs(value) < 0.01 else 1}%}" if is_number(value) else NOTHING


def number(value: float) -> str:
    """Four figures at most, thousands apart."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def count_text(value: object) -> str:
    return f"{int(value):,}" if is_number(value) else NOTHING


def short_number(value: object) -> str:
    """Three figures."""
    return f"{value:,.3g}" if is_number(value) else NOTHING


def ratio(value: object, chance: object) -> float | None:
    """How many times chance; None where either is unknown, or chance is zero."""
    return value / chance if is_number(value) and is_number(chance) and chance > 0 else None


def times(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0f}{TIMES}" if share >= 100 else f"{share:.1f}{TIMES}"


def counted(count: int, thing: str) -> str:
    """
    >>> counted(1, "run"), counted(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def signed(difference: object, metric: str = "") -> str:
    """A difference; that of two shares in points."""
    if not is_number(difference):
        return NOTHING
    return f"{difference_text(difference, is_share(metric))}{' points' if is_share(metric) else ''}"


def difference_text(mean: float, share: bool, sd: object = None) -> str:
    """A mean difference and its standard deviation; shares in points."""
    scale, form = (100.0, ".2f") if share else (1.0, ".4g")
    text = f"{scale * mean:+{form}}".replace("-", MINUS)
    return f"{text} ± {scale * sd:{form}}" if is_number(sd) else text


def mean_text(mean: object, share: bool, sd: object = None) -> str:
    if not is_number(mean):
        return NOTHING
    scale, form, unit = (100.0, ".2f", "%") if share else (1.0, ".3g", "")
    spread = f" ± {scale * sd:{form}}" if is_number(sd) else ""
    return f"{scale * mean:{form}}{spread}{unit}"


def duration(seconds: object) -> str:
    """
    >>> duration(65), duration(7300)
    ('1 min 5 s', '2 h 1 min')
    """
    if not is_number(seconds):
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds) // 60
    return f"{minutes} min {round(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def setting_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {setting_text(item)}" for key, item in value.items()) or NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(setting_text(item) for item in value) or NOTHING
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
