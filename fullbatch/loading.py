"""From whatever names a model to its towers, and from there to files for other programs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from fullbatch.config.axes import Constant
from fullbatch.config.model import DEFAULT_MODEL, Model
from fullbatch.config.run import RunConfig
from fullbatch.data.durable import make_folder, sync
from fullbatch.models.adapters import plain_state
from fullbatch.models.build import build_model, rebuild_model, require_temperature
from fullbatch.models.open_clip_towers import design_named
from fullbatch.models.saved import EXPORTS, Format, export, find_saved
from fullbatch.models.two_towers import TwoTowers
from fullbatch.training import checkpoint
from fullbatch.training.run_folder import Folder

KINDS = "a run folder, one of its checkpoints, what `fullbatch export` wrote, or an open_clip model with --pretrained"


@dataclass(frozen=True)
class Opened:
    """Towers with the temperature, and where there is one the bias, that they were trained with."""

    model: TwoTowers
    temperature: float
    bias: float | None

    def export(self, output: Path, format: Format = "safetensors", overwrite: bool = False) -> Path:
        """Write it for other programs; see ``fullbatch.models.saved``."""
        return export(self.model, output, format, self.temperature, self.bias, overwrite)


@dataclass(frozen=True)
class Loaded(Opened):
    """What a checkpoint holds for those who use the model rather than train on."""

    config: RunConfig
    step: int


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
    return Loaded(model.eval(), temperature, own, config, parts["position"]["step"])


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


def is_run(path: Path) -> bool:
    """A run folder, or one of its checkpoints."""
    return (path / checkpoint.MANIFEST).is_file() or Folder(path).config.is_file()


def open_model(
    named: Model, image_size: int | None = None, temperature: float | None = None, average: bool = True
) -> Opened:
    """The model at the path ``named.model``, else by name and weights; ``temperature`` is for those that bring none.
    Of a run it is a ``Loaded``, with the averaged weights if there are any and ``average`` says so."""
    path, weights = Path(named.model), named.pretrained
    if named.is_pair:
        if weights is None:
            raise ValueError("--image-tower and --text-tower need --pretrained, a file with the weights of both.")
        return _built(named, image_size, temperature)
    if named.model == DEFAULT_MODEL and weights is None:
        raise ValueError(f"{named.model!r} is no trained model; name {KINDS}.")
    is_named = named.model == DEFAULT_MODEL or named.model.endswith(".json") or not path.exists()
    if weights is not None and not is_named:
        raise ValueError(f"{named.model} brings its weights; --pretrained belongs to an open_clip model's name.")
    if is_run(path):
        if named.tokenizer is not None:
            raise ValueError(f"{named.model} brings its tokenizer; leave --tokenizer out.")
        opened = load_trained(path, average)
        own = {"--image-size": opened.model.image_size, "--context-length": opened.model.context_length}
        for (flag, size), wanted in zip(own.items(), (image_size, named.context_length), strict=True):
            if wanted not in (None, size):  # another size is a matter of loading the weights anew
                raise ValueError(
                    f"{flag} {wanted}: {named.model} has {size}; leave it out, or fine-tune what `fullbatch export "
                    f"{named.model} FOLDER --format safetensors` writes."
                )
        return opened
    if not is_named:
        _check_exported(path)
        return _built(replace(named, model=DEFAULT_MODEL, pretrained=str(path)), image_size, temperature)
    if weights is None:
        _refuse_bare(named.model)
    return _built(named, image_size, temperature)


def _built(named: Model, image_size: int | None, temperature: float | None) -> Opened:
    """The towers alone: which of their weights tuning moves, and by what, is no part of them."""
    bare = replace(named.without_lora(), lock_image=False, lock_text=False, checkpoint_activations=False)
    model = build_model(replace(bare, unlocked_image_groups=0, unlocked_text_layers=0), image_size)
    own = temperature if model.initial_temperature is None else model.initial_temperature
    chosen = require_temperature(model, str(named.pretrained)) if own is None else own
    return Opened(model.eval(), chosen, model.initial_bias)


def _check_exported(path: Path) -> None:
    runs = sorted(run for run in path.iterdir() if Folder(run).config.is_file()) if path.is_dir() else []
    if runs:
        raise ValueError(f"{path} is a folder of {len(runs)} run(s); name one, such as {runs[-1]}.")
    if path.is_dir() and not any((path / name).is_file() for name in EXPORTS):
        raise ValueError(f"{path} is neither a run folder, nor a checkpoint, nor what `fullbatch export` wrote.")
    try:
        saved = find_saved(path)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--pretrained ")) from None
    if saved is None or saved.design is None:
        raise ValueError(
            f"{path} holds weights without their design; name the model they belong to, such as ViT-B-32, with "
            f"--pretrained {path}."
        )


def _refuse_bare(name: str) -> None:
    if "/" in name and not name.startswith("ViT-"):
        raise ValueError(f"There is no run folder, checkpoint or exported model at {name!r}.")
    try:
        design_named(name)
    except ValueError as error:
        raise ValueError(f"There is no such path, and {str(error).removeprefix('--model ')}") from None
    raise ValueError(f"{name!r} has no weights: add --pretrained with an open_clip tag or a checkpoint file.")


def write_model(opened: Opened, folder: Path) -> None:
    """As `fullbatch export --format safetensors` writes a folder: any command takes it as a model."""
    replace_folder(folder, opened.export)


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a new folder, then put it in the old one's place.  That takes two moves; ``settle`` finishes
    what was cut off between them."""
    settle(folder)
    new, old = _beside(folder)
    make_folder(folder.parent)
    write(new)
    for path in (*new.rglob("*"), new):
        sync(path)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def settle(folder: Path) -> None:
    """After a kill: the old one is moved away only when the new one is complete."""
    new, old = _beside(folder)
    if not folder.exists() and old.exists():
        (new if new.exists() else old).rename(folder)
    for path in (new, old, *folder.parent.glob(f".{escape(new.name)}.*")):  # the last: an export that was cut off
        shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
