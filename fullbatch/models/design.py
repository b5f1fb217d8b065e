"""What a model is built from, apart from its weights: enough to write it down and to build it again."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

from fullbatch.config.tree import from_dict

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class OpenClipDesign:
    """An open_clip model."""

    name: str  # what the user called it
    config: dict[str, Any]  # its open_clip config: embed_dim, vision_cfg, text_cfg, ...
    mean: tuple[float, ...] = OPENAI_MEAN
    std: tuple[float, ...] = OPENAI_STD

    def resized(self, context_length: int | None, image_size: int | None) -> OpenClipDesign:
        """The same design for another length of captions or another size of images; None keeps what it has."""
        config = json.loads(json.dumps(self.config))
        if context_length is not None:
            config["text_cfg"]["context_length"] = context_length
        if image_size is not None:
            config["vision_cfg"]["image_size"] = image_size
        return dataclasses.replace(self, config=config)


@dataclass(frozen=True)
class PairDesign:
    """A timm image tower and a Hugging Face text tower, each projected to embed_dim."""

    image_tower: str
    text_tower: str
    text_config: dict[str, Any]  # the text tower's Hugging Face config as a dict
    embed_dim: int
    context_length: int
    image_size: int | None = None  # None: what the timm model wants
    # None: what the timm model wants
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    # what the text tower says of a caption: its first token or the mean; None: by its family
    pooling: Literal["first", "mean"] | None = None

    @property
    def name(self) -> str:
        return f"{self.image_tower} + {self.text_tower}"

    def resized(self, context_length: int | None, image_size: int | None) -> PairDesign:
        length, size = context_length or self.context_length, image_size or self.image_size
        return dataclasses.replace(self, context_length=length, image_size=size)


@dataclass(frozen=True)
class ViewsDesign:
    """One timm image encoder with a projection head, for two views of each image."""

    tower: str
    stem: Literal["timm", "small"]  # "small": a first convolution for images of about 32 pixels
    projection: tuple[int, ...]  # widths of the head's layers, the last that of the embedding
    image_size: int | None = None  # None: what the timm model wants, or 32 for the small stem
    # None: what the timm model wants
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def name(self) -> str:
        return f"{self.tower}, two views"

    def resized(self, context_length: int | None, image_size: int | None) -> ViewsDesign:
        if context_length is not None:
            raise ValueError(f"{self.tower} on two views reads no captions: leave --context-length out.")
        return dataclasses.replace(self, image_size=image_size or self.image_size)


Design = OpenClipDesign | PairDesign | ViewsDesign
_KINDS: dict[str, type[OpenClipDesign] | type[PairDesign] | type[ViewsDesign]] = {
    "open_clip": OpenClipDesign,
    "pair": PairDesign,
    "views": ViewsDesign,
}


def to_json(design: Design, **extra: object) -> str:
    kind = next(kind for kind, made in _KINDS.items() if isinstance(design, made))
    return json.dumps({"kind": kind, "design": dataclasses.asdict(design), **extra})


def from_json(text: str) -> tuple[Design, dict[str, Any]]:
    """The design and whatever else was written beside it."""
    saved = json.loads(text)
    design = from_dict(_KINDS[saved.pop("kind")], saved.pop("design"))  # checks types; JSON has no tuples
    return design, saved
