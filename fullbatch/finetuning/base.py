"""The model to fine-tune, whatever the user named it by; and from then on a folder of the run's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fullbatch.config.model import DEFAULT_MODEL, Model
from fullbatch.loading import load_trained
from fullbatch.models.build import build_model, require_temperature
from fullbatch.models.open_clip_towers import design_named
from fullbatch.models.saved import export, find_saved
from fullbatch.models.two_towers import TwoTowers
from fullbatch.training import checkpoint
from fullbatch.training.checkpoint import sync
from fullbatch.training.run_folder import Folder

KINDS = "a run folder, one of its checkpoints, what `fullbatch export` wrote, or an open_clip model with --pretrained"


@dataclass(frozen=True)
class Opened:
    """Towers with the temperature, and where there is one the bias, that they were trained with."""

    model: TwoTowers
    temperature: float
    bias: float | None


def is_run(path: Path) -> bool:
    """A run folder, or one of its checkpoints."""
    return (path / checkpoint.MANIFEST).is_file() or Folder(path).config.is_file()


def open_model(named: Model, image_size: int | None = None, temperature: float | None = None) -> Opened:
    """The model at the path ``named.model``, else by name and weights; ``temperature`` is for those that bring none."""
    path, weights = Path(named.model), named.pretrained
    if named.is_pair:
        if weights is None:
            raise ValueError("--image-tower and --text-tower need --pretrained, a file with the weights of both.")
        return _built(named, image_size, temperature)
    if named.model == DEFAULT_MODEL and weights is None:
        raise ValueError(f"--model says what to fine-tune: {KINDS}.")
    is_named = named.model == DEFAULT_MODEL or named.model.endswith(".json") or not path.exists()
    if weights is not None and not is_named:
        raise ValueError(f"{named.model} brings its weights; --pretrained belongs to an open_clip model's name.")
    if is_run(path):
        if named.tokenizer is not None:
            raise ValueError(f"{named.model} brings its tokenizer; leave --tokenizer out.")
        loaded = load_trained(path)
        return _resized(Opened(loaded.model, loaded.temperature, loaded.bias), named, image_size)
    if not is_named:
        _check_exported(path)
        return _built(replace(named, model=DEFAULT_MODEL, pretrained=str(path)), image_size, temperature)
    if weights is None:
        _refuse_bare(named.model)
    return _built(named, image_size, temperature)


def _built(named: Model, image_size: int | None, temperature: float | None) -> Opened:
    model = build_model(_bare(named), image_size)
    own = model.initial_temperature
    given = own if own is not None else temperature
    chosen = given if given is not None else require_temperature(model, str(named.pretrained))
    return Opened(model.eval(), chosen, model.initial_bias)


def _bare(named: Model) -> Model:
    """The towers alone: which of their weights tuning moves, and by what, is no part of them."""
    return replace(
        named.without_lora(),
        lock_image=False,
        lock_text=False,
        unlocked_image_groups=0,
        unlocked_text_layers=0,
        checkpoint_activations=False,
    )


def _resized(opened: Opened, named: Model, image_size: int | None) -> Opened:
    """A run's model has its own size; another one is a matter of loading its weights anew, from an export."""
    sizes = (
        ("--image-size", image_size, opened.model.image_size),
        ("--context-length", named.context_length, opened.model.context_length),
    )
    for flag, wanted, own in sizes:
        if wanted is not None and wanted != own:
            raise ValueError(
                f"{flag} {wanted}: {named.model} has {own}; leave it out, or fine-tune what `fullbatch export "
                f"{named.model} FOLDER --format safetensors` writes."
            )
    return opened


def _check_exported(path: Path) -> None:
    runs = sorted(run for run in path.iterdir() if Folder(run).config.is_file()) if path.is_dir() else []
    if runs:
        raise ValueError(f"{path} is a folder of {len(runs)} run(s); name one, such as {runs[-1]}.")
    try:
        saved = find_saved(path)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--pretrained ")) from None
    if saved is None or saved.design is None:
        raise ValueError(
            f"{path} holds weights without their design; name the model they belong to: "
            f"--model ViT-B-32 --pretrained {path}."
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
    replace_folder(folder, lambda new: export(opened.model, new, "safetensors", opened.temperature, opened.bias))


def starting_from(named: Model, folder: Path) -> Model:
    """The same model with the weights, design and tokenizer that ``write_model`` left in ``folder``."""
    return replace(named.as_saved_in(folder), tokenizer=None)


# ---------------------------------------------------------------------------------------------------------------------
# folders that hold a model: whole and synced, or not there at all


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a new folder, then put it in the old one's place.  That takes two moves; ``settle`` finishes
    what was cut off between them."""
    settle(folder)
    new, old = _beside(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
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
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
