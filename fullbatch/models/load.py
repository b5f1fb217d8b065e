"""What `--pretrained` points at on this disk: weights, and where an export wrote it, the design as well."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fullbatch.models.design import OPENAI_MEAN, OPENAI_STD, Design, OpenClipDesign, from_json
from fullbatch.models.huggingface import clip_design, from_clip_state
from fullbatch.models.open_clip_towers import read_config
from fullbatch.models.tokenizers import CLIP_VOCABULARY
from fullbatch.models.weights import first_line, read_weights

EXPORTED = "fullbatch.safetensors"  # in an exported folder
DESIGN = "design.json"  # in a run's folder: the architecture alone, for its checkpoints
METADATA = "fullbatch"  # the key in the header of an exported safetensors file
OPEN_CLIP_CONFIG = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_CLIP_MODEL_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
EXPORTS = (EXPORTED, OPEN_CLIP_CONFIG, *OPEN_CLIP_WEIGHTS, *_CLIP_MODEL_WEIGHTS)  # by which a folder is known for one
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Saved:
    """weights        the file to read; None where only the design was saved
    design         None where only the weights were saved
    tokenizer      the folder with the tokenizer's files, where they were saved too, or what the user had named
    temperature    as written beside the weights; open_clip's own files carry it inside, as logit_scale
    is_clip_model  the weights have the names of transformers' CLIPModel
    """

    weights: Path | None
    design: Design | None = None
    tokenizer: str | None = None
    temperature: float | None = None
    bias: float | None = None
    is_clip_model: bool = False

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
        images = json.loads((folder / OPEN_CLIP_CONFIG).read_text(encoding="utf-8")).get("preprocess_cfg", {})
        mean, std = tuple(images.get("mean", OPENAI_MEAN)), tuple(images.get("std", OPENAI_STD))
        return Saved(weights, OpenClipDesign(str(folder), config, mean, std), tokenizer)
    weights = next((folder / name for name in _CLIP_MODEL_WEIGHTS if (folder / name).is_file()), None)
    if weights is not None and _is_clip_model(folder / "config.json"):
        design = clip_design(folder)
        own = design.config["text_cfg"]["vocab_size"] == CLIP_VOCABULARY  # which open_clip brings along
        return Saved(weights, design, None if own else tokenizer, is_clip_model=True)
    raise ValueError(
        f"--pretrained {str(folder)!r} is a folder with neither {EXPORTED}, nor {OPEN_CLIP_CONFIG}, nor a CLIPModel's "
        "config.json beside its weights; give a folder that `fullbatch export` wrote, or a checkpoint file."
    )


def _is_clip_model(config: Path) -> bool:
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") == "clip"
