"""Which towers to train, where their weights come from, and which of them stay as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from fullbatch.config.checks import (
    BelowOne,
    Checked,
    Count,
    Positive,
    Rule,
    Text,
    Whole,
    at_least,
    is_text,
    is_whole,
    require,
)

_DESIGN = (
    "model", "image_tower", "text_tower", "view_tower", "view_stem", "projection", "embed_dim", "context_length",
    "text_pooling", "image_weights", "text_weights",
)  # fmt: skip
DEFAULT_MODEL = "tiny"
DEFAULT_PAIR_WIDTH = 256
DEFAULT_PROJECTION = (2048, 128)
_SWITCH = Rule("be True, False or a file", lambda value: isinstance(value, bool) or is_text(value))
_WIDTHS = Rule(
    "be at least one width, a whole number of at least 1",
    lambda value: isinstance(value, tuple) and bool(value) and all(is_whole(width, 1) for width in value),
)


@dataclass(frozen=True)
class Model(Checked):
    """An open_clip model, a timm image tower with a Hugging Face text tower, or one timm encoder for two views."""

    # an open_clip config name ("ViT-B-32"), a path to an open_clip JSON config, or "tiny"
    model: Annotated[str, Rule("name a model or a JSON config", is_text)] = DEFAULT_MODEL
    # an open_clip tag, a checkpoint (.pt, .safetensors), or what `fullbatch export` wrote, which brings its
    # architecture along when `model` is left at its default
    pretrained: Text | None = None
    image_tower: Text | None = None  # a timm model name; with text_tower, instead of model
    text_tower: Text | None = None  # a Hugging Face name, or a local folder with its config.json
    # a timm model name, instead of model: one encoder for two augmented views of each image and no captions (SimCLR);
    # the settings that begin with view_ say how views are made
    view_tower: Text | None = None
    # "small": a 3 x 3 first convolution of stride 1 and no max-pooling, for images of 32 pixels; "timm": as timm has it
    view_stem: Literal["timm", "small"] = "timm"
    # of a view_tower: widths of the layers of its projection head, the last that of the embedding
    projection: Annotated[tuple[int, ...], _WIDTHS] = DEFAULT_PROJECTION
    embed_dim: Count | None = None  # width of the embedding that both towers are projected to; None: 256
    tokenizer: Text | None = None  # a local folder, a hub name, or an open_clip config name; None: the model's own
    # tokens a caption is cut or padded to; None: the model's own, 77 for a Hugging Face tower
    context_length: Annotated[int, at_least(3)] | None = None
    # what a Hugging Face tower says of a caption: its "first" token or the "mean" over all; None: as its
    # 1_Pooling/config.json has it (sentence-transformers), else by its family
    text_pooling: Literal["first", "mean"] | None = None
    # start the timm tower from weights in a FILE (a state dict of timm or torchvision: .pth, .safetensors); without one
    # from timm's own, which need the hub
    image_weights: Annotated[bool | str, _SWITCH] = False
    text_weights: bool = False  # start the Hugging Face tower from its pretrained weights
    # keep the image tower's weights and statistics; a projection onto a new width still learns
    lock_image: bool = False
    lock_text: bool = False  # the same for the text tower
    unlocked_image_groups: Whole = 0  # of a locked image tower, the last groups of layers that learn all the same
    unlocked_text_layers: Whole = 0  # of a locked text tower, the last layers that learn all the same
    checkpoint_activations: bool = False  # recompute activations in the backward pass: less memory, a third more time
    # LoRA (by peft): the tower's weights stay, and adapters of this rank beside the linear maps of its layers learn,
    # and a projection onto a new width; None: none
    lora_rank: Count | None = None
    lora_alpha: Positive | None = None  # an adapter's change counts lora_alpha / lora_rank times; None: 2 * lora_rank
    lora_dropout: BelowOne = 0.0  # of what an adapter reads
    # "both", "image" or "text"; the other tower learns whole, unless it is locked
    lora_towers: Literal["both", "image", "text"] = "both"

    def _check(self) -> None:
        of_views = self.view_tower is not None
        self.leave_out(not of_views, "be left out without view_tower", "view_stem", "projection")
        self.leave_out(of_views, "be left out where view_tower is given", "model", "image_tower", "embed_dim")
        if of_views:
            self.refuse_text()
        hint = "the image and the text tower are given together, instead of model"
        require(self.image_tower is None or self.text_tower is not None, self, "text_tower", "be given too", hint)
        require(self.text_tower is None or self.image_tower is not None, self, "image_tower", "be given too", hint)
        self.leave_out(self.is_pair, "be left out where image_tower and text_tower are given", "model")
        hint = "an open_clip config sets its own"
        self.leave_out(not self.is_pair, "be left out", "embed_dim", "text_pooling", hint=hint)
        hint = "it belongs to image_tower and text_tower; an open_clip model takes `pretrained`"
        self.leave_out(not self.is_pair, "be False", "text_weights", hint=hint)
        self.leave_out(not self.is_pair and not of_views, "be False", "image_weights", hint=hint)
        for switch, count in (("lock_image", "unlocked_image_groups"), ("lock_text", "unlocked_text_layers")):
            hint = f"it counts the exceptions to {switch}, so set {switch} too"
            self.leave_out(not getattr(self, switch), f"be 0 without {switch}", count, hint=hint)
        no_lora = self.lora_rank is None
        self.leave_out(no_lora, "be left out without lora_rank", "lora_alpha", "lora_dropout", "lora_towers")
        for tower, other in (("image", "text"), ("text", "image")):
            hint = f"adapters keep the tower's weights as they are; for the other tower alone set lora_towers: {other}"
            rule = f"be False where the {tower} tower has adapters"
            self.leave_out(self.has_lora(tower), rule, f"lock_{tower}", hint=hint)

    def refuse_text(self) -> None:
        """One encoder for two views has neither a text tower nor LoRA."""
        texts = ("text_tower", "tokenizer", "context_length", "text_pooling", "text_weights", "lock_text", "lora_rank")
        hint = "there is one image encoder, which learns or is locked whole, and no text tower"
        self.leave_out(True, "be left out for two views", *texts, hint=hint)

    def has_lora(self, tower: str) -> bool:
        """Whether the "image" or the "text" tower has adapters."""
        return self.lora_rank is not None and self.lora_towers in ("both", tower)

    def as_saved_in(self, folder: Path) -> Model:
        """The same, locked and adapted as it is, with the design that lies in ``folder``."""
        left_open = {name: getattr(Model(), name) for name in _DESIGN}
        return replace(self, pretrained=str(folder), **left_open)

    def without_lora(self) -> Model:
        """The same model as it is once its adapters are added to its weights."""
        return replace(self, lora_rank=None, lora_alpha=None, lora_dropout=0.0, lora_towers="both")

    @property
    def lora_scale(self) -> float:
        """What an adapter's change is multiplied by."""
        if self.lora_rank is None or self.lora_alpha is None:
            return 2.0
        return self.lora_alpha / self.lora_rank

    @property
    def is_pair(self) -> bool:
        return self.image_tower is not None
