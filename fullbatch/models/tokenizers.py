"""Captions to token ids: open_clip's own tokenizers, and Hugging Face ones through open_clip's wrapper."""

# B: captions   L: tokens

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullbatch.config.extras import require_extra
from fullbatch.models.weights import fetched

CLIP_VOCABULARY = 49408


@dataclass(frozen=True)
class Tokenizer:
    """Captions, cut or padded to context_length.  It pickles, so that workers can hold one."""

    encoder: Any  # an open_clip tokenizer: SimpleTokenizer (CLIP's) or HFTokenizer
    name: str  # where it came from, for messages
    context_length: int
    vocabulary: int  # how many ids it may give
    padding: int  # the id that fills short captions
    given: str | None = None  # what the user named instead of the model's own; None: it is the model's own
    options: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)  # with which the encoder was made

    def __call__(self, captions: Sequence[str]) -> Tensor:
        if not captions:
            return torch.zeros(0, self.context_length, dtype=torch.long)
        tokens_BL: Tensor = self.encoder(list(captions), context_length=self.context_length)
        return tokens_BL.long()

    def lengths(self, tokens_BL: Tensor) -> Tensor:
        """How many tokens of each caption are no padding; where its end token pads it too, one of them counts."""
        real_BL = tokens_BL != self.padding
        place_L = torch.arange(1, tokens_BL.shape[1] + 1, device=tokens_BL.device)
        ends = getattr(self.hugging_face, "eos_token_id", None) == self.padding
        return ((real_BL * place_L).amax(dim=1) + int(ends)).clamp(1, tokens_BL.shape[1])

    @property
    def hugging_face(self) -> Any | None:
        """The Hugging Face tokenizer inside, which can be saved to a folder; None for CLIP's own."""
        return getattr(self.encoder, "tokenizer", None)


@dataclass(frozen=True)
class NoText:
    """Stands where a model with a text tower has its tokenizer, and says why there is none."""

    name: str = "none"
    context_length: int = 0
    given: str | None = None
    hugging_face: None = None

    def __call__(self, captions: Sequence[str]) -> Tensor:
        raise ValueError(
            "This model was trained on two views of images and has no text tower, so that captions mean nothing to it; "
            "measure it by tasks on images alone (see docs/how-to/two-views.md)."
        )


def clip_tokenizer(context_length: int, options: dict[str, Any] | None = None) -> Tokenizer:
    """CLIP's lower-cased byte-pair encoding, which open_clip brings along."""
    from open_clip.tokenizer import SimpleTokenizer

    encoder = SimpleTokenizer(context_length=context_length, **(options or {}))
    return Tokenizer(encoder, "CLIP", context_length, encoder.vocab_size, 0, options=options or {})


def hugging_face_tokenizer(
    source: str, context_length: int, model: str, options: dict[str, Any] | None = None
) -> Tokenizer:
    """The tokenizer in a local folder or on the hub; ``model`` is named when it cannot be had."""
    from open_clip.tokenizer import HFTokenizer

    require_extra("transformers", "text", f"The tokenizer {source!r} of the model {model!r}")
    advice = "give a folder with the tokenizer's files by --tokenizer PATH, or connect to the hub"
    with fetched(f"The tokenizer {source!r} of the model {model!r}", advice):
        encoder = HFTokenizer(source, context_length=context_length, **(options or {}))
    inner = encoder.tokenizer
    if len(inner) < 10:  # transformers makes an empty one up where it finds a config and no vocabulary
        raise ValueError(f"The tokenizer {source!r} of the model {model!r} has no vocabulary; {advice}.")
    if inner.pad_token_id is None:
        raise ValueError(f"The tokenizer {source!r} of the model {model!r} has no padding token; {advice}.")
    return Tokenizer(encoder, source, context_length, len(inner), inner.pad_token_id, options=options or {})


def tokenizer_of_config(text_config: dict[str, Any], given: str | None, model: str) -> Tokenizer:
    """The tokenizer of an open_clip config's text_cfg, unless another is given."""
    length = int(text_config.get("context_length", 77))
    options = dict(text_config.get("tokenizer_kwargs") or {})
    if text_config.get("tokenizer_mode"):
        options["tokenizer_mode"] = text_config["tokenizer_mode"]
    if given is not None:
        tokenizer = given_tokenizer(given, length, model, options)
        room = int(text_config.get("vocab_size", CLIP_VOCABULARY))
        if tokenizer.vocabulary > room and "hf_model_name" not in text_config:
            raise ValueError(
                f"The tokenizer {given!r} knows {tokenizer.vocabulary} tokens and the model {model!r} only {room}; "
                "give the tokenizer the model was made for, or a JSON config with a larger vocab_size."
            )
        end = getattr(tokenizer.hugging_face, "eos_token_id", None)
        at_largest_id = text_config.get("pool_type", "argmax") == "argmax"
        if tokenizer.hugging_face is not None and at_largest_id and end != room - 1:
            raise ValueError(
                f"The model {model!r} reads a caption at its largest token id, so that captions must end in the id "
                f"{room - 1}, and the tokenizer {given!r} ends them in {end}; set text_cfg.pool_type in a JSON config."
            )
        return tokenizer
    name = text_config.get("hf_tokenizer_name")
    return hugging_face_tokenizer(name, length, model, options) if name else clip_tokenizer(length, options)


def given_tokenizer(given: str, length: int, model: str, options: dict[str, Any] | None = None) -> Tokenizer:
    """A tokenizer the user named: a local folder, an open_clip config name, or a hub name."""
    import open_clip

    if Path(given).is_dir():
        given = str(Path(given).resolve())
    elif given in open_clip.list_models():
        text_config = {**open_clip.get_model_config(given)["text_cfg"], "context_length": length}
        return dataclasses.replace(tokenizer_of_config(text_config, None, given), given=given)
    return dataclasses.replace(hugging_face_tokenizer(given, length, model, options), given=given)
