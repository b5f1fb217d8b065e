"""From a run folder, or a checkpoint in it, to its model; and to files for other programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullbatch.config.axes import Constant
from fullbatch.config.run import RunConfig
from fullbatch.models.adapters import plain_state
from fullbatch.models.build import rebuild_model
from fullbatch.models.saved import Format, export
from fullbatch.models.two_towers import TwoTowers
from fullbatch.training import checkpoint
from fullbatch.training.run_folder import Folder


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds for those who use the model rather than train on."""

    model: TwoTowers
    config: RunConfig
    step: int
    temperature: float
    bias: float | None


def load_trained(path: Path, average: bool = True) -> Loaded:
    """From a run folder's last good checkpoint, or from the checkpoint at ``path``."""
    place: Path | None = path
    if not (path / checkpoint.MANIFEST).is_file():
        place = checkpoint.last_good(Folder(path).checkpoints)
    if place is None:
        raise ValueError(f"{path} is neither a run folder with a good checkpoint nor a checkpoint.")
    folder = Folder(place.parent.parent)
    config = folder.read_config()
    parts = checkpoint.read(place, ("model", "average", "objective", "position"))
    with checkpoint.understood(place):
        return as_loaded(config, folder.model, parts, average)


def as_loaded(config: RunConfig, design: Path, parts: Mapping[str, Any], average: bool = True) -> Loaded:
    """From the parts of a run's state, and where it wrote its model's design."""
    model = rebuild_model(config.model.without_lora(), design)
    averages = parts.get("average", {}) if average else {}
    model.load_state_dict(plain_state({**parts["model"], **averages}, config.model.lora_scale))
    temperature, bias = _temperature(config, model, parts), parts["objective"].get("bias")
    own = model.initial_bias if bias is None else float(bias)
    return Loaded(model.eval(), config, parts["position"]["step"], temperature, own)


def _temperature(config: RunConfig, model: TwoTowers, parts: Mapping[str, Any]) -> float:
    """Where it is learned, what it has become; a constant one is the user's, the weights' or the method's."""
    learned = parts["objective"].get("temperatures.both.log_temperature")
    if learned is not None:
        return math.exp(learned)
    rule = config.objective.build().temperature
    if isinstance(rule, Constant):
        given = rule.temperature if "temperature" in config.objective.settings else model.initial_temperature
        return rule.temperature if given is None else given
    logged = float(parts["position"]["temperature"])
    return logged if math.isfinite(logged) else 0.07


def export_run(run: Path, output: Path, format: Format, average: bool = True, overwrite: bool = False) -> Path:
    """Write a trained model for other programs; see ``fullbatch.models.saved``."""
    loaded = load_trained(run, average)
    return export(loaded.model, output, format, loaded.temperature, loaded.bias, overwrite)
