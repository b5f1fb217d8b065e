"""Figures of a search: by choice, over trials, importance, slices, parallel coordinates."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fullbatch.config.messages import plain
from fullbatch.report.drawing import (
    Look,
    Scale,
    color_class,
    drawn,
    figure,
    fitted,
    legend,
    line,
    path,
    point,
    room_for,
    scale_of,
    text,
    width_of,
    x_axis,
    y_axis,
)
from fullbatch.report.markup import Child, Html, joined, node
from fullbatch.report.wording import NOTHING, counted, is_number, number, setting_text

WIDTH = 460  # of a figure in a column, in the drawing's own units
SHADES = 5  # classes s0 to s4 of page.css, from the worst values to the best
WHOLE = ("done", "stopped")  # statuses whose value is that of a training to its end
_SLICE = (230, 152)
_STEPS = [factor * 10**power for power in range(6) for factor in (1, 2, 5)]  # between numbers of trials on an axis
_MOST_WORDS = 12  # values of a setting that is drawn as words
_FORESTS = {"fanova": "fANOVA", "mdi": "mean decrease in impurity"}
_LOOKS: Mapping[str, tuple[Look, str]] = {
    "pruned": ("hollow", "pruned: the value of a shorter training"),
    "diverged": ("cross", "diverged"),
}


@dataclass(frozen=True)
class Measure:
    name: str
    short: str
    up: bool
    share: bool

    def said(self, value: object) -> str:
        if not isinstance(value, int | float) or not is_number(value):
            return NOTHING
        return f"{100.0 * value:.2f}%" if self.share else number(value)

    def better(self, one: float, other: float) -> bool:
        return one > other if self.up else one < other


@dataclass(frozen=True)
class Trial:
    """``value`` is that of the first metric; ``tip`` all of it in words."""

    slot: int
    rank: int | None
    label: str
    status: str
    params: Mapping[str, Any]
    values: tuple[float | None, ...]
    evaluations: tuple[tuple[float, float], ...]
    tip: str

    @property
    def value(self) -> float | None:
        return self.values[0] if self.values else None

    @property
    def look(self) -> Look:
        return _LOOKS[self.status][0] if self.status in _LOOKS else "full"


def drawable(trials: Sequence[Trial]) -> list[Trial]:
    """Those with a place in a figure: with a value, or diverged, which lie on the edge of the worst."""
    return [one for one in trials if one.value is not None or one.status == "diverged"]


def _whole(trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
    return [(one, one.value) for one in trials if one.value is not None and one.status in WHOLE]


def _value_scale(trials: Sequence[Trial], measure: Measure, start: float, end: float) -> Scale:
    """Diverged ones do not stretch it: their worst value would leave the others no room."""
    known = [one.value for one in trials if one.value is not None and one.status != "diverged"]
    return scale_of(known, start, end, share=measure.share)


def _at(one: Trial, scale: Scale, measure: Measure) -> float:
    if one.status == "diverged" or one.value is None:
        return scale.at(scale.low if measure.up else scale.high)
    return scale.at(one.value)


def _looks(trials: Sequence[Trial]) -> list[tuple[Look, str]]:
    return [look for status, look in _LOOKS.items() if any(one.status == status for one in trials)]


def _kinds(trials: Sequence[Trial], name: str | None) -> list[str]:
    return sorted({str(one.params[name]) for one in trials if name in one.params}) if name else []


def _place(one: Trial, name: str | None, kinds: Sequence[str]) -> int:
    return kinds.index(str(one.params[name])) if name is not None and name in one.params else 0


# ---------------------------------------------------------------------------------------------------------------------
# by choice, over trials, importance


def by_choice(trials: Sequence[Trial], along: str, colored: str, measure: Measure) -> Html | None:
    """A row a value of ``along``, best mean first, its points coloured by ``colored``; a bar marks the mean."""
    shown = [one for one in drawable(trials) if along in one.params]
    rows = _kinds(shown, along)
    if len(rows) < 2:
        return None
    kinds = _kinds(shown, colored)
    means = {}
    for name in rows:
        known = [value for one, value in _whole(shown) if str(one.params[along]) == name]
        if known:
            means[name] = statistics.fmean(known)
    rows.sort(key=lambda name: (name not in means, -means.get(name, 0.0) if measure.up else means.get(name, 0.0)))
    high = max(24.0, 7.0 * len(kinds) + 8.0)
    left, bottom = room_for(rows), 8.0 + high * len(rows)
    scale = _value_scale(shown, measure, left, WIDTH - 14.0)
    pieces: list[Child] = [x_axis(scale, 8.0, bottom, fitted(measure.short, scale.end - scale.start))]
    for place, name in enumerate(rows):
        middle = 8.0 + high * (place + 0.5)
        pieces.append(text(left - 8, middle + 4, fitted(name, left), "end", "name", name))
        if place:
            pieces.append(line(left, middle - high / 2, WIDTH - 14.0, middle - high / 2, "between"))
        if name in means:
            x = scale.at(means[name])
            mark = line(x, middle - high / 2 + 3, x, middle + high / 2 - 3, "mean")
            pieces.append(node("g", node("title", f"{name}: mean {measure.said(means[name])}"), mark))
        for one in shown:
            if str(one.params[along]) == name:
                kind = _place(one, colored, kinds)
                y = middle + (kind - (len(kinds) - 1) / 2) * 7.0 if kinds else middle
                pieces.append(point(_at(one, scale, measure), y, kind, one.tip, one.look))
    words = "; ".join(f"{name} {measure.said(means.get(name))}" for name in rows)
    svg = drawn(WIDTH, bottom + 38, f"{measure.short} by {along}, means: {words}", *pieces)
    note = f"{'coloured by ' + colored + '; ' if len(kinds) > 1 else ''}a bar marks the mean of whole trials"
    return figure(f"By {along}", note, svg, legend(kinds, _looks(shown)))


def progression(trials: Sequence[Trial], measure: Measure, colored: str | None = None) -> Html | None:
    """The value of each trial, and the best so far."""
    shown = sorted(drawable(trials), key=lambda one: one.slot)
    if not shown:
        return None
    kinds = _kinds(shown, colored)
    top, bottom, right = 10.0, 190.0, WIDTH - 12.0
    upright = _value_scale(shown, measure, bottom, top)
    left = room_for([said for _, said in upright.ticks()])
    last = shown[-1].slot
    across = Scale(-0.5, last + 0.5 if last else 0.5, left, right)
    pieces: list[Child] = [y_axis(upright, left, right), line(left, bottom, right, bottom, "axis")]
    step = next(size for size in _STEPS if (last + 1) / size <= 8 or size == _STEPS[-1])
    pieces += [text(across.at(slot), bottom + 16, str(slot), "middle") for slot in range(0, last + 1, step)]
    pieces.append(text((left + right) / 2, bottom + 31, "trial", "middle"))
    best: float | None = None
    way: list[tuple[float, float]] = []
    for one, value in _whole(shown):
        if best is None or measure.better(value, best):
            way += [(across.at(one.slot), upright.at(best))] if best is not None else []
            best = value
            way.append((across.at(one.slot), upright.at(value)))
    if best is not None:
        way.append((right, upright.at(best)))
        pieces.append(path(way, "best-so-far", f"best so far: {measure.said(best)}"))
    for one in shown:
        place = _place(one, colored, kinds)
        pieces.append(point(across.at(one.slot), _at(one, upright, measure), place, one.tip, one.look))
    words = f"{measure.short} of {counted(len(shown), 'trial')}, best {measure.said(best)}"
    svg = drawn(WIDTH, bottom + 38, words, *pieces)
    return figure("Progression", "the line is the best so far", svg, legend(kinds, _looks(shown)))


def importance(found: Mapping[str, Any]) -> Html | None:
    shares = {key: _numbers(found.get(key)) for key in _FORESTS}
    names = list(shares["fanova"])
    if not names:
        return None
    left, high, right = room_for(names, 190.0), 34.0, WIDTH - 52.0
    pieces: list[Child] = []
    for place, name in enumerate(names):
        top = 4.0 + high * place
        pieces.append(text(left - 8, top + 17, fitted(name, left), "end", "name", name))
        for row, key in enumerate(("fanova", "mdi")):
            share = shares[key].get(name, 0.0)
            y, width = top + 2 + 13 * row, max(1.0, (right - left) * min(max(share, 0.0), 1.0))
            tip = node("title", f"{name}: {share:.1%} by {_FORESTS[key]}")
            box = {"x": f"{left:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": "11"}
            pieces.append(node("rect", tip, class_=f"share {color_class(row)}", **box))
            pieces.append(text(left + width + 5, y + 9.5, f"{share:.1%}"))
    words = "; ".join(f"{name} {shares['fanova'][name]:.0%}" for name in names)
    svg = drawn(WIDTH, 8 + high * len(names), f"importance by fANOVA: {words}", *pieces)
    out = [plain(name, 60) for name in found.get("left_out") or ()]
    note = f"share of the variation among what was tried, over {counted(int(found.get('trials') or 0), 'whole trial')}"
    pruned = int(found.get("pruned") or 0)
    note += f"; {pruned} pruned {'one is' if pruned == 1 else 'ones are'} left out" if pruned else ""
    note += f"; without {', '.join(out)}, which not all trials have" if out else ""
    return figure("Importance", note, svg, legend(list(_FORESTS.values())))


def _numbers(found: object) -> dict[str, float]:
    known = found if isinstance(found, Mapping) else {}
    return {str(name): float(share) for name, share in known.items() if is_number(share)}


# ---------------------------------------------------------------------------------------------------------------------
# settings


@dataclass(frozen=True)
class Setting:
    """A setting that took several values: along a scale, or as words in places of their own."""

    name: str
    scale: Scale | None
    words: tuple[str, ...]

    def at(self, value: Any, start: float, end: float) -> float:
        if self.scale is not None:
            return replace(self.scale, start=start, end=end).at(float(value))
        return self.at_word(setting_text(value), start, end)

    def aside(self, slot: int, width: float) -> float:
        """Trials of one word would lie on each other; they stand beside each other, each always in the same place."""
        return 0.0 if self.scale is not None else (slot * 0.618 % 1.0 - 0.5) * 0.45 * width / len(self.words)

    def at_word(self, word: str, start: float, end: float) -> float:
        return start + (self.words.index(word) + 0.5) / len(self.words) * (end - start)


def settings_of(trials: Sequence[Trial], log_scaled: Collection[str]) -> list[Setting]:
    """Those with more than one value among the trials."""
    names = dict.fromkeys(name for one in trials for name in one.params)
    found = []
    for name in names:
        values = [one.params[name] for one in trials if name in one.params]
        texts = {setting_text(value) for value in values}
        numbers = [float(value) for value in values if is_number(value)]
        if len(texts) < 2:
            continue
        few = len(texts) <= 3 and all(len(said) <= 6 for said in texts)  # choices, most likely
        if len(numbers) == len(values) and not few:
            log = name in log_scaled and min(numbers) > 0.0
            found.append(Setting(name, scale_of(numbers, 0.0, 1.0, log=log), ()))
        elif len(numbers) == len(values):
            found.append(Setting(name, None, tuple(setting_text(value) for value in sorted(set(values)))))
        elif len(texts) <= _MOST_WORDS:
            found.append(Setting(name, None, tuple(sorted(texts))))
    return found


def slices(trials: Sequence[Trial], log_scaled: Collection[str], measure: Measure) -> Html | None:
    """A small plot a setting, all on the same upright scale; the best trial is ringed."""
    shown = drawable(trials)
    found = settings_of(shown, log_scaled)
    if not found:
        return None
    width, height = _SLICE
    top, bottom, right = 8.0, height - 36.0, width - 8.0
    upright = _value_scale(shown, measure, bottom, top)
    left = room_for([said for _, said in upright.ticks(3)])
    best = min((one for one in shown if one.rank is not None), key=lambda one: one.rank or 0, default=None)
    made = []
    for setting in found:
        pieces: list[Child] = [y_axis(upright, left, right, 3), line(left, bottom, right, bottom, "axis")]
        pieces += _marks(setting, left, right, bottom)
        for one in sorted(shown, key=lambda one: one is best):
            if setting.name in one.params:
                x = setting.at(one.params[setting.name], left, right) + setting.aside(one.slot, right - left)
                y = _at(one, upright, measure)
                pieces.append(point(x, y, 0, one.tip, one.look, 3.0))
                if one is best:
                    pieces.append(node("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="6.5", class_="ring"))
        words = f"{measure.short} by {setting.name}"
        scale = " (log)" if setting.scale is not None and setting.scale.log else ""
        svg = drawn(width, height, words, *pieces)
        title = joined(plain(setting.name, 60), node("span", scale, class_="quiet"))
        caption = node("figcaption", title)
        made.append(node("figure", caption, node("div", svg, class_="drawn"), class_="slice"))
    note = f"{plain(measure.short, 80)} by each setting, whatever the others were; the ring is the best trial"
    return joined(node("h3", "Slices"), node("p", note, class_="note"), node("div", made, class_="slices"))


def _marks(setting: Setting, left: float, right: float, bottom: float) -> list[Html]:
    """What stands under a slice."""
    if setting.scale is not None:
        inside = replace(setting.scale, start=left, end=right)
        return [text(inside.at(value), bottom + 16, said, "middle") for value, said in inside.ticks(3)]
    room = (right - left) / len(setting.words)
    tight = any(width_of(word) > room - 4 for word in setting.words)
    found = []
    for place, word in enumerate(setting.words):
        lower = 12 * (place % 2) if tight else 0
        shown = fitted(word, room * (2 if tight else 1) + 6)
        found.append(text(left + (place + 0.5) * room, bottom + 16 + lower, shown, "middle", None, word))
    return found


def parallel(trials: Sequence[Trial], log_scaled: Collection[str], measure: Measure) -> Html | None:
    """A line a trial through its settings to its value, coloured by the value; best ones on top."""
    shown = [one for one in trials if one.value is not None and one.status in WHOLE]
    found = settings_of(shown, log_scaled)
    if len(found) < 3 or len(shown) < 2:  # two settings are seen better in the other figures
        return None
    apart, top, bottom = min(230.0, max(104.0, 900.0 / len(found))), 44.0, 280.0
    upright = _value_scale(shown, measure, 0.0, 1.0)
    axes = {60.0 + apart * place: one for place, one in enumerate([*found, Setting(measure.short, upright, ())])}
    last = 60.0 + apart * len(found)
    order = sorted(_whole(shown), key=lambda pair: pair[1] if measure.up else -pair[1])
    pieces: list[Child] = []
    for place, (one, value) in enumerate(order):
        way = [
            (x, axis.at(one.params[axis.name], bottom, top))
            for x, axis in axes.items()
            if x < last and axis.name in one.params
        ]
        shade = round(place / (len(order) - 1) * (SHADES - 1))
        top_one = " top" if place == len(order) - 1 else ""
        pieces.append(path([*way, (last, axes[last].at(value, bottom, top))], f"way s{shade}{top_one}", one.tip))
    long = any(width_of(axis.name) > apart - 8.0 for axis in axes.values())
    for place, (x, axis) in enumerate(axes.items()):
        name = fitted(axis.name, 2.0 * min(apart, 110.0) if long else apart)
        at, anchor = (last + 56.0, "end") if x == last else (4.0, "start") if long and not place else (x, "middle")
        pieces.append(text(at, 14 + 15 * (place % 2 if long else 1), name, anchor, "name", axis.name))
        pieces += _upright(axis, x, bottom, top, apart)
    words = f"parallel coordinates of {counted(len(shown), 'trial')} over {', '.join(one.name for one in found)}"
    svg = drawn(last + 60.0, bottom + 12, words, *pieces, natural=True)
    key = [
        node(
            "li",
            node("svg", line(0, 6, 12, 6, f"way s{n}"), viewBox="0 0 12 12", aria_hidden="true"),
            said,
            class_="key",
        )
        for n, said in ((SHADES - 1, "the best"), (0, "the worst"))
    ]
    note = "whole trials only, coloured by their place; the thick line is the best"
    scrolled = node("div", svg, class_="scroll wide", tabindex="0", role="group", aria_label="parallel coordinates")
    return figure("Parallel coordinates", note, scrolled, node("ul", key, class_="keys"), class_="chart broad")


def _upright(axis: Setting, x: float, bottom: float, top: float, apart: float) -> list[Html]:
    """An axis of the parallel coordinates, with its values to its right."""
    if axis.scale is not None:
        inside = replace(axis.scale, start=bottom, end=top)
        marks = [(inside.at(value), said) for value, said in inside.ticks(4)]
    else:
        marks = [(axis.at_word(word, bottom, top), fitted(word, apart)) for word in axis.words]
    return [line(x, top, x, bottom, "axis"), *(text(x + 5, y + 4, said, class_="over") for y, said in marks)]
