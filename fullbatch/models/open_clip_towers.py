"""open_clip models: found by name or JSON file, built without touching a hub, given open_clip weights."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fullbatch.config.messages import listed, nearest
from fullbatch.models.design import OPENAI_MEAN, OPENAI_STD, OpenClipDesign
from fullbatch.models.weights import fetched, first_line, load_weights

TINY = Path(__file__).with_name("tiny.json")
_REQUIRED = ("embed_dim", "vision_cfg", "text_cfg")
_MOST_LAYERS = 10_000
START_SCALE = ("init_logit_scale", "init_logit_bias")  # where training starts; no part of the architecture


def design_named(model: str) -> OpenClipDesign:
    """The design that `--model` names."""
    import open_clip

    if model == "tiny":
        return OpenClipDesign("tiny", read_config(TINY))
    if model.endswith(".json"):
        return OpenClipDesign(model, read_config(Path(model)))
    name = model.replace("/", "-")  # OpenAI writes ViT-B/32
    known = open_clip.list_models()
    if name not in known:
        guess = nearest(name, ["tiny", *known])
        raise ValueError(f"--model {model!r} is neither 'tiny', nor a .json file, nor an open_clip config{guess}")
    return OpenClipDesign(name, open_clip.get_model_config(name), *_normalisation(name))


def _normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of pixels that all of open_clip's weights for a model want (SigLIP's: 0.5).  open_clip notes
    them by the tag alone, but the same weights given as a file must see the same pixels."""
    import open_clip
    from open_clip.pretrained import get_pretrained_cfg

    noted = [get_pretrained_cfg(name, tag) for tag in open_clip.list_pretrained_tags_by_model(name)]
    pairs = {(tuple(n.get("mean") or OPENAI_MEAN), tuple(n.get("std") or OPENAI_STD)) for n in noted}
    return pairs.pop() if len(pairs) == 1 else (OPENAI_MEAN, OPENAI_STD)


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"The open_clip config {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The open_clip config {path} is not JSON: {error}.") from None
    config = config.get("model_cfg", config) if isinstance(config, dict) else {}
    config = config if isinstance(config, dict) else {}
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        raise ValueError(f"The open_clip config {path} lacks {listed(missing)}; it needs {listed(_REQUIRED)}.")
    for tower in ("vision_cfg", "text_cfg"):
        if not isinstance(config[tower], dict):
            raise ValueError(f"The open_clip config {path}: {tower} must map names to values, got {config[tower]!r}.")
        layers = config[tower].get("layers")
        if isinstance(layers, int) and layers > _MOST_LAYERS:  # building them would take for ever
            raise ValueError(f"The open_clip config {path}: {tower} has {layers:,} layers, more than {_MOST_LAYERS:,}.")
    return dict(config)


def build_open_clip(design: OpenClipDesign) -> nn.Module:
    """The model with random weights; its logit scale and bias are frozen, the temperature lives in the objective."""
    from open_clip.model import CLIP, CustomTextCLIP

    if "multimodal_cfg" in design.config:
        raise ValueError(
            f"The model {design.name!r} is a CoCa model, whose caption decoder a contrastive loss does not train; "
            "use a model without multimodal_cfg, such as 'ViT-B-32'."
        )
    config = json.loads(json.dumps(design.config))
    vision, text = config["vision_cfg"], config["text_cfg"]
    custom_text = config.pop("custom_text", False) or "hf_model_name" in text
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    made: type[nn.Module] = CustomTextCLIP if custom_text else CLIP
    if "hf_model_name" in text:
        text["hf_model_pretrained"] = False
        advice = "use a model with open_clip's own text tower, or connect to the hub"
        with fetched(f"The text tower {text['hf_model_name']!r} of the model {design.name!r}", advice):
            model = made(**config)
    else:
        try:
            model = made(**config)
        except Exception as error:  # whatever its layers say to sizes that cannot be
            raise ValueError(f"open_clip cannot build the model {design.name!r}: {first_line(error)}.") from None
    for name in ("logit_scale", "logit_bias"):
        parameter = getattr(model, name)
        if parameter is not None:
            parameter.requires_grad_(False)
    return model


def tag_weights(design: OpenClipDesign, tag: str) -> tuple[OpenClipDesign, Path]:
    """The weights of an open_clip tag, and the design as they were trained: normalisation and activation."""
    import open_clip
    from open_clip.pretrained import download_pretrained, get_pretrained_cfg

    settings = get_pretrained_cfg(design.name, tag)
    if not settings:
        tags = open_clip.list_pretrained_tags_by_model(design.name)
        few = [*tags[:5], f"{len(tags) - 5} more"] if len(tags) > 6 else tags
        offer = f"its tags are {listed(few)}" if tags else "it has no tags"
        raise ValueError(
            f"--pretrained {tag!r} is neither a file, nor a folder, nor an open_clip tag of the model "
            f"{design.name!r} ({offer}){nearest(tag, tags)}"
        )
    advice = "connect to the hub, or download the checkpoint and give its path by --pretrained PATH"
    with fetched(f"The weights {tag!r} of the model {design.name!r}", advice):
        path = Path(download_pretrained(settings))
    config = dict(design.config)
    if settings.get("quick_gelu", False) != config.get("quick_gelu", False):
        config["quick_gelu"] = bool(settings.get("quick_gelu", False))
        warnings.warn(
            f"The weights {tag!r} were trained with quick_gelu={config['quick_gelu']}, so that the model "
            f"{design.name!r} is built with it too.",
            stacklevel=2,
        )
    mean, std = settings.get("mean") or design.mean, settings.get("std") or design.std
    return dataclasses.replace(design, config=config, mean=tuple(mean), std=tuple(std)), path


def load_open_clip(
    model: nn.Module, state: dict[str, Tensor], source: str, name: str
) -> tuple[float | None, float | None]:
    """Load open_clip weights, old layouts and other image sizes included; return their temperature and bias, or None
    where they have none: the objective has its own."""
    from open_clip.convert import convert_state_dict
    from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed

    state = convert_state_dict(model, state)
    if "positional_embedding" in state and not hasattr(model, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    state.pop("text.transformer.embeddings.position_ids", None)  # saved by old versions of transformers
    scale, bias = _number(state, "logit_scale"), _number(state, "logit_bias")
    for key in ("logit_scale", "logit_bias"):
        own: Tensor | None = getattr(model, key)
        if own is None:
            state.pop(key, None)
        elif key in state and state[key].numel() == 1:
            state[key] = state[key].reshape(own.shape)
        elif key not in state:
            state[key] = own.detach().clone() if key == "logit_scale" else own.new_zeros(own.shape)
    try:
        resize_pos_embed(state, model)
        resize_text_pos_embed(state, model)
    except (KeyError, AttributeError, RuntimeError, AssertionError):
        pass  # no positions that can be resized: load_weights says what does not fit
    load_weights(model, state, source, name)
    if scale is None:
        warnings.warn(f"{source} has no logit_scale: a temperature does not come with it.", stacklevel=2)
    return None if scale is None else math.exp(-scale), bias


def _number(state: dict[str, Tensor], key: str) -> float | None:
    return float(state[key]) if key in state and state[key].numel() == 1 else None


def registered_name(design: OpenClipDesign) -> str | None:
    """The name under which open_clip itself knows exactly this config, if there is one."""
    import open_clip

    names = sorted(open_clip.list_models(), key=lambda name: name != design.name)  # the user's own name first
    return next((name for name in names if open_clip.get_model_config(name) == design.config), None)
