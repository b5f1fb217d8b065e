"""Models on a disk: what `--pretrained` points at, and what `fullbatch export` and a run write."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import assert_never

from fullbatch.config.messages import local_name
from fullbatch.data.durable import told_if_full
from fullbatch.models.clip_model import clip_design, from_clip_state, write_clip_model
from fullbatch.models.design import OPENAI_MEAN, OPENAI_STD, Design, OpenClipDesign, ViewsDesign, from_json, to_json
from fullbatch.models.onnx_towers import FILES as ONNX_FILES
from fullbatch.models.onnx_towers import require_onnx, write_onnx
from fullbatch.models.open_clip_towers import read_config, registered_name
from fullbatch.models.tokenizers import CLIP_VOCABULARY
from fullbatch.models.two_towers import TwoTowers
from fullbatch.models.weights import PICKLED, first_line, read_weights

EXPORTED = "fullbatch.safetensors"  # in an exported folder
DESIGN = "design.json"  # in a run's folder: the architecture alone, for its checkpoints
METADATA = "fullbatch"  # the key in the header of an exported safetensors file
OPEN_CLIP_CONFIG = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_CLIP_MODEL_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# by which a folder is known for one
EXPORTS = (EXPORTED, OPEN_CLIP_CONFIG, *OPEN_CLIP_WEIGHTS, *_CLIP_MODEL_WEIGHTS, *ONNX_FILES)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Saved:
    weights: Path | None  # the file to read; None where only the design was saved
    design: Design | None = None  # None where only the weights were saved
    # the folder with the tokenizer's files, where they were saved too, or what the user had named
    tokenizer: str | None = None
    # as written beside the weights; open_clip's own files carry it inside, as logit_scale
    temperature: float | None = None
    bias: float | None = None
    is_clip_model: bool = False  # the weights have the names of transformers' CLIPModel

    def state(self) -> dict[str, Tensor]:
        """The weights under the names of the model that is built here."""
        assert self.weights is not None
        state = read_weights(self.weights)
        return from_clip_state(state) if self.is_clip_model else state


def check_design(folder: Path) -> None:
    """Whether a run's model can be built from what it wrote down."""
    path = folder / DESIGN
    try:
        _read_design(path.read_text(encoding="utf-8", errors="replace"), path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{first_line(error)}; --resume {folder.parent} writes it anew.") from None


def _read_design(text: str, path: Path) -> tuple[Design, dict[str, Any]]:
    try:
        return from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = first_line(error)
        raise ValueError(f"{path} is damaged: it describes no model ({type(error).__name__}: {reason}).") from None


def find_saved(path: Path) -> Saved | None:
    """None where nothing lies at path: it may be the name of a tag."""
    if path.is_file():
        return _saved_file(path)
    return _saved_folder(path) if path.is_dir() else None


def _saved_file(path: Path, tokenizer: str | None = None) -> Saved:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as opened:
                header = (opened.metadata() or {}).get(METADATA)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file ({error}).") from None
        if header is not None:
            design, extra = _read_design(header, path)
            return Saved(path, design, tokenizer or extra.get("tokenizer"), extra.get("temperature"), extra.get("bias"))
    return Saved(path)


def _saved_folder(folder: Path) -> Saved:
    tokenizer = str(folder) if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None
    if (folder / DESIGN).is_file():
        design, extra = _read_design((folder / DESIGN).read_text(encoding="utf-8", errors="replace"), folder / DESIGN)
        return Saved(None, design, tokenizer or extra.get("tokenizer"), extra.get("temperature"), extra.get("bias"))
    if (folder / EXPORTED).is_file():
        return _saved_file(folder / EXPORTED, tokenizer)
    weights = next((folder / name for name in OPEN_CLIP_WEIGHTS if (folder / name).is_file()), None)
    if weights is not None and (folder / OPEN_CLIP_CONFIG).is_file():
        config = read_config(folder / OPEN_CLIP_CONFIG)
        images = _json(folder / OPEN_CLIP_CONFIG).get("preprocess_cfg", {})
        mean, std = tuple(images.get("mean", OPENAI_MEAN)), tuple(images.get("std", OPENAI_STD))
        own = "hf_tokenizer_name" not in config["text_cfg"]  # the files beside it are for transformers
        return Saved(weights, OpenClipDesign(str(folder), config, mean, std), None if own else tokenizer)
    weights = next((folder / name for name in _CLIP_MODEL_WEIGHTS if (folder / name).is_file()), None)
    if (
        weights is not None
        and (folder / "config.json").is_file()
        and _json(folder / "config.json").get("model_type") == "clip"
    ):
        design = clip_design(folder)
        own = design.config["text_cfg"]["vocab_size"] == CLIP_VOCABULARY  # which open_clip brings along
        return Saved(weights, design, None if own else tokenizer, is_clip_model=True)
    if (folder / ONNX_FILES[0]).is_file():
        raise ValueError(
            f"--pretrained {str(folder)!r} is an export to ONNX, whose weights can only be run; give the run itself, "
            "or an export in another format."
        )
    raise ValueError(
        f"--pretrained {str(folder)!r} is a folder with neither {EXPORTED}, nor {OPEN_CLIP_CONFIG}, nor a CLIPModel's "
        "config.json beside its weights; give a folder that `fullbatch export` wrote, or a checkpoint file."
    )


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


# -- exports: open_clip checkpoints and folders, transformers' CLIPModel, safetensors ----------------------------------


Format = Literal["open_clip", "huggingface", "safetensors", "onnx"]


def export(
    model: TwoTowers, path: Path, format: Format, temperature: float, bias: float | None, overwrite: bool = False
) -> Path:
    """Write ``model`` to a folder, or where the format has one to a file, and return the path.

    open_clip    FILE.pt: a state dict for ``open_clip.create_model(NAME, pretrained=FILE)``; only for open_clip's own
                 configs.  FOLDER: config and weights for ``open_clip.create_model_and_transforms("local-dir:FOLDER")``
    huggingface  FOLDER: for ``transformers.CLIPModel.from_pretrained(FOLDER)``, with tokenizer and image processor,
                 and for open_clip as above: the weights are there twice, as on hubs, under the names of each
    safetensors  FILE.safetensors or FOLDER: any model; build_model(Model(pretrained=PATH)) makes it again
    onnx         FOLDER: image.onnx and text.onnx for onnxruntime; any model

    What is there already is refused; with ``overwrite`` a file, or an earlier export in the folder, gives way.
    ``bias`` is that of the objective; None where it has none: then the bias that came with the weights stays.
    """
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise ValueError(f"export needs a positive temperature, got {temperature}.")
    if format == "onnx":
        require_onnx("An export to ONNX")
    path, bias = Path(path), model.initial_bias if bias is None else bias
    _check_place(path, format, overwrite)
    whole = path.resolve()  # not "..", nor a link that would itself be replaced
    whole.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.TemporaryDirectory(prefix=f".{whole.name}.", dir=whole.parent)
    with _named(whole), told_if_full(whole), unfinished as place:
        new = Path(place) / (whole.stem + path.suffix)
        match format:
            case "open_clip":
                _export_open_clip(model, new, temperature, bias)
            case "huggingface":
                with _written_by_safetensors(new / _CLIP_MODEL_WEIGHTS[0]):
                    write_clip_model(model, new, temperature, bias)
                _export_open_clip(model, new, temperature, bias)
            case "safetensors":
                _export_safetensors(model, new, temperature, bias)
            case "onnx":
                write_onnx(model, new, temperature, bias)
            case _:
                assert_never(format)
        _put(new, whole)
    return path


def _check_place(path: Path, format: Format, overwrite: bool) -> None:
    own = {"open_clip": PICKLED, "safetensors": (".safetensors",)}.get(format, ())
    if path.suffix not in own and (path.suffix in (*PICKLED, ".safetensors", ".onnx") or path.is_file()):
        raise ValueError(f"{path} must be a folder for this format, or end in the suffix of a file that it has.")
    if not overwrite and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        what = "exists already" if path.is_file() else "is not empty"
        raise ValueError(f"{path} {what}; name another file or folder, or give --overwrite.")


def _put(new: Path, path: Path) -> None:
    """In place of an earlier export, which gives way only now that the new one is whole."""
    if new.is_file():
        new.replace(path)
        return
    for name in EXPORTS if path.is_dir() else ():  # else a reader might take the old one for the new
        (path / name).unlink(missing_ok=True)
    for file in [file for file in new.rglob("*") if file.is_file()]:
        place = path / file.relative_to(new)
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)


def _export_open_clip(model: TwoTowers, path: Path, temperature: float, bias: float | None) -> None:
    if not isinstance(model.design, OpenClipDesign):
        views = isinstance(model.design, ViewsDesign)
        kind = "one timm encoder" if views else "a pair of timm and Hugging Face towers"
        raise ValueError(
            f"{model.design.name} is {kind}, which open_clip has no config for; export it with --format safetensors."
        )
    state = open_clip_state(model, temperature, bias)
    design = _with_bias(model.design, bias)
    if path.suffix in PICKLED:
        if registered_name(design) is None:
            raise ValueError(
                f"open_clip knows no config by which to load {path.name} ({model.design.name!r} is not one of its own, "
                "or its size or bias was changed); give a folder, which takes the config along."
            )
        try:
            torch.save(state, path)
        except RuntimeError as error:
            raise _NotWritten(path.name, first_line(error)) from None
        return
    path.mkdir(exist_ok=True)
    _save_safetensors(state, path / OPEN_CLIP_WEIGHTS[0], {})
    images: dict[str, Any] = {"size": model.image_size, "mean": list(design.mean), "std": list(design.std)}
    images |= {"mode": "RGB", "interpolation": "bicubic", "resize_mode": "shortest"}
    saved = {"model_cfg": _with_tokenizer(design, model, path).config, "preprocess_cfg": images}
    (path / OPEN_CLIP_CONFIG).write_text(json.dumps(saved, indent=4) + "\n", encoding="utf-8")


def _export_safetensors(model: TwoTowers, path: Path, temperature: float, bias: float | None) -> None:
    design = model.design
    if isinstance(design, OpenClipDesign):
        state, design = open_clip_state(model, temperature, bias), _with_bias(design, bias)
        bias = float(state["logit_bias"]) if "logit_bias" in state else None
    else:
        state = model.plain_weights()
    if path.suffix != ".safetensors":
        path.mkdir(exist_ok=True)
        if model.tokenize.hugging_face is not None:
            model.tokenize.hugging_face.save_pretrained(path)
        path = path / EXPORTED
    extra = {"temperature": temperature, "bias": bias, "tokenizer": model.tokenize.given}
    _save_safetensors(state, path, {METADATA: to_json(design, **extra)})


def write_design(model: TwoTowers, folder: Path) -> None:
    """What a run needs to build its model again, wherever its pretrained weights may be by then; with their temperature
    and bias, since a method with a constant temperature goes on with it."""
    folder.mkdir(parents=True, exist_ok=True)
    if model.tokenize.hugging_face is not None:
        model.tokenize.hugging_face.save_pretrained(folder)
    start = {"temperature": model.initial_temperature, "bias": model.initial_bias}
    (folder / DESIGN).write_text(to_json(model.design, tokenizer=model.tokenize.given, **start), encoding="utf-8")


def open_clip_state(model: TwoTowers, temperature: float, bias: float | None) -> dict[str, Tensor]:
    """The weights under open_clip's names, with the temperature and bias of the objective that trained them.  Without a
    bias (None) an architecture that has one keeps its own."""
    state = model.plain_weights()
    scale = state["logit_scale"]
    state["logit_scale"] = torch.full_like(scale, -math.log(temperature))
    if bias is not None:
        state["logit_bias"] = torch.full_like(scale, bias)
    return state


def _with_bias(design: OpenClipDesign, bias: float | None) -> OpenClipDesign:
    """A config whose model has a bias, where there is one to keep."""
    if bias is None or design.config.get("init_logit_bias") is not None:
        return design
    return dataclasses.replace(design, config={**design.config, "init_logit_bias": bias})


def _with_tokenizer(design: OpenClipDesign, model: TwoTowers, folder: Path) -> OpenClipDesign:
    """The tokenizer's files go along; with local-dir: open_clip looks for them in the folder itself."""
    tokenizer: Any = model.tokenize.hugging_face
    text = dict(design.config["text_cfg"])
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        text["hf_tokenizer_name"] = local_name(text.get("hf_tokenizer_name") or model.tokenize.name)
    else:
        text.pop("hf_tokenizer_name", None)
    return dataclasses.replace(design, config={**design.config, "text_cfg": text})


def _save_safetensors(state: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    with _written_by_safetensors(path):
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, path, {"format": "pt", **metadata})


class _NotWritten(Exception):
    """Neither library names the file, and torch not even the reason: most often a full disk.

    file     its name, in the folder where an export is made
    """

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(reason)
        self.file = file


@contextmanager
def _written_by_safetensors(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise _NotWritten(file.name, first_line(error)) from None


@contextmanager
def _named(whole: Path) -> Iterator[None]:
    """By the place where the user will look for it."""
    try:
        yield
    except _NotWritten as error:
        file = whole if error.file == whole.name else whole / error.file
        free = shutil.disk_usage(whole.parent).free
        raise OSError(f"{file} could not be written ({error}); {free / 1e6:,.1f} MB are free.") from None
