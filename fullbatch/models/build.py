"""From the description of a model to two towers that are ready to train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import assert_never

from fullbatch.config.model import DEFAULT_MODEL, Model
from fullbatch.models.adapters import add_adapters
from fullbatch.models.design import Design, OpenClipDesign, PairDesign, ViewsDesign
from fullbatch.models.open_clip_towers import START_SCALE, build_open_clip, design_named, load_open_clip, tag_weights
from fullbatch.models.saved import Saved, check_design, find_saved
from fullbatch.models.timm_towers import TwoViews, build_pair, build_views, pair_design, views_design
from fullbatch.models.tokenizers import NoText, Tokenizer, given_tokenizer, hugging_face_tokenizer, tokenizer_of_config
from fullbatch.models.two_towers import TwoTowers
from fullbatch.models.weights import first_line, load_weights


def build_model(config: Model, image_size: int | None = None) -> TwoTowers:
    """The towers that ``config`` describes; ``image_size`` None is what the model wants.

    >>> model = build_model(Model("tiny"))
    >>> model.width, model.image_size, model.context_length
    (128, 64, 24)
    """
    saved = find_saved(Path(config.pretrained)) if config.pretrained else None
    design = _design(config, saved).resized(config.context_length, image_size)
    if config.pretrained and saved is None:
        if not isinstance(design, OpenClipDesign):
            what = "two views" if isinstance(design, ViewsDesign) else "a pair of towers"
            raise ValueError(f"--pretrained {config.pretrained!r} does not exist; for {what} give a file.")
        design, weights = tag_weights(design, config.pretrained)
        saved = Saved(weights)
    fresh = saved is None
    tokenizer = NoText() if isinstance(design, ViewsDesign) else _tokenizer(config, design, saved)
    backbone: Any
    match design:
        case OpenClipDesign():
            backbone = build_open_clip(design)
            sides = backbone.visual.image_size
            height, size = (sides, sides) if isinstance(sides, int) else sides
            if height != size:
                raise ValueError(
                    f"The model {design.name!r} wants images of {height} x {size}; only square ones are supported."
                )
            width = int(design.config["embed_dim"])
        case PairDesign():
            assert isinstance(tokenizer, Tokenizer)
            images, text = fresh and config.image_weights, fresh and config.text_weights
            backbone, design = build_pair(design, tokenizer, images, text)
            width, size = design.embed_dim, design.image_size or 0
        case ViewsDesign():
            config.refuse_text()  # also where the weights brought the design
            backbone, design = build_views(design, fresh and config.image_weights)
            width, size = design.projection[-1], design.image_size or 0
        case _:
            assert_never(design)
    temperature: float | None = None
    bias: float | None = None
    if saved is not None and saved.weights is not None:
        if isinstance(design, OpenClipDesign):
            temperature, bias = load_open_clip(backbone, saved.state(), str(saved.weights), design.name)
        else:
            load_weights(backbone, saved.state(), str(saved.weights), design.name)
    if saved is not None and saved.temperature is not None:
        temperature, bias = saved.temperature, bias if saved.bias is None else saved.bias

    locked = _lock(backbone, design.name, config)
    if config.lora_rank is not None:
        add_adapters(backbone, config, design.name)
    if config.checkpoint_activations:
        _checkpoint_activations(backbone, design.name)
    return (TwoViews if isinstance(design, ViewsDesign) else TwoTowers)(
        backbone,
        design,
        tokenizer,
        width=width,
        image_size=size,
        locked=locked,
        initial_temperature=temperature,
        initial_bias=bias,
        adapter_scale=config.lora_scale,
    )


def rebuild_model(config: Model, folder: Path) -> TwoTowers:
    """The towers whose design ``write_design`` left in ``folder``, locked as ``config`` says, with fresh weights."""
    check_design(folder)
    try:
        return build_model(config.as_saved_in(folder))
    except (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError) as error:
        raise ValueError(f"{folder} describes no model ({type(error).__name__}: {first_line(error)}).") from None


def require_temperature(model: TwoTowers, source: str) -> float:
    """The temperature that came with the weights in ``source``; for a method that is to keep it, nothing stands in."""
    if model.initial_temperature is None:
        raise ValueError(
            f"{source} has no logit_scale, so that the temperature it was trained with is not known; "
            "give it by --settings.temperature (CLIP's end at 0.01, a logit_scale of 100)."
        )
    return model.initial_temperature


def _design(config: Model, saved: Saved | None) -> Design:
    """The design that was saved with the weights, unless the user names one; if both, they must agree."""
    if config.view_tower is not None:
        named: Design = views_design(config)
    else:
        named = pair_design(config) if config.is_pair else design_named(config.model)
    if saved is None or saved.design is None:
        return named
    chosen = config.is_pair or config.view_tower is not None or config.model != DEFAULT_MODEL
    if chosen and not _alike(named, saved.design):
        raise ValueError(
            f"{saved.weights} was saved with another architecture ({saved.design.name}) than {named.name}; "
            "leave --model, --image-tower, --text-tower and --view-tower out, for it brings its own."
        )
    return saved.design


def _alike(named: Design, saved: Design) -> bool:
    if isinstance(named, OpenClipDesign) and isinstance(saved, OpenClipDesign):
        plain = [{k: v for k, v in d.config.items() if k not in START_SCALE} for d in (named, saved)]
        return plain[0] == plain[1]
    if isinstance(named, PairDesign) and isinstance(saved, PairDesign):
        return (named.image_tower, named.embed_dim) == (saved.image_tower, saved.embed_dim)
    if isinstance(named, ViewsDesign) and isinstance(saved, ViewsDesign):
        return (named.tower, named.stem, named.projection) == (saved.tower, saved.stem, saved.projection)
    return False


def _tokenizer(config: Model, design: OpenClipDesign | PairDesign, saved: Saved | None) -> Tokenizer:
    given = config.tokenizer or (saved.tokenizer if saved is not None else None)
    if isinstance(design, OpenClipDesign):
        return tokenizer_of_config(design.config["text_cfg"], given, design.name)
    if given is not None:
        return given_tokenizer(given, design.context_length, design.text_tower)
    return hugging_face_tokenizer(design.text_tower, design.context_length, design.text_tower)


def _lock(backbone: Any, name: str, config: Model) -> list[nn.Module]:
    """Freeze the towers that are to stay, or that only adapters are to move, and name their modules."""
    locked: list[nn.Module] = []
    if config.lock_image or config.has_lora("image"):
        with _supported(name, "unlock a part of its image tower", "--unlocked-image-groups 0"):
            backbone.lock_image_tower(unlocked_groups=config.unlocked_image_groups)
        locked.append(backbone.visual)
    if config.lock_text or config.has_lora("text"):
        with _supported(name, "unlock a part of its text tower", "--unlocked-text-layers 0"):
            backbone.lock_text_tower(unlocked_layers=config.unlocked_text_layers)
        # open_clip's plain CLIP has no text module: its parts lie side by side.
        parts = ("text",) if hasattr(backbone, "text") else ("token_embedding", "transformer", "ln_final")
        locked += [getattr(backbone, part) for part in parts]
    return locked


def _checkpoint_activations(backbone: Any, name: str) -> None:
    with _supported(name, "recompute its activations", "no --checkpoint-activations"):
        trunk = getattr(backbone.visual, "trunk", None)
        if trunk is not None:
            trunk.set_grad_checkpointing(True)  # open_clip's wrapper would only log that it cannot
        if type(backbone.visual).__name__ == "ModifiedResNet":
            raise ValueError("open_clip's ResNets do not support it")
        backbone.set_grad_checkpointing()


@contextmanager
def _supported(name: str, what: str, use: str) -> Iterator[None]:
    """A step that some models do not support becomes one sentence about the model."""
    try:
        yield
    except Exception as error:  # each library has its own way to refuse
        raise ValueError(f"The model {name!r} cannot {what} ({first_line(error)}); use {use}.") from None
