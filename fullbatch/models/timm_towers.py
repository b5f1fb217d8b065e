"""timm's image towers: in a pair with a Hugging Face text tower, or alone on two views of each image."""

# B: images, pairs   C, H, W: channels, pixels   L: tokens   F: features of a tower   D: width of the embedding

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from fullbatch.config.extras import require_extra
from fullbatch.config.messages import listed, nearest
from fullbatch.config.model import DEFAULT_PAIR_WIDTH, Model
from fullbatch.data.loader import TextSize
from fullbatch.models.design import PairDesign, ViewsDesign
from fullbatch.models.tokenizers import Tokenizer
from fullbatch.models.two_towers import TwoTowers, compiled
from fullbatch.models.weights import fetched, load_weights, read_weights

AnyTimm = TypeVar("AnyTimm", PairDesign, ViewsDesign)
DEFAULT_CONTEXT = 77
_POOLING = "1_Pooling/config.json"
# Text towers whose configs are known here, so that random weights need no hub.
_KNOWN: dict[str, dict[str, Any]] = {
    "distilbert-base-uncased": {"model_type": "distilbert"},
    "bert-base-uncased": {"model_type": "bert"},
    "roberta-base": {
        "model_type": "roberta",
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    },
}
_FIRST_TOKEN = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "deberta", "deberta-v2")


class _TimmBackbone(nn.Module):
    """``visual`` is a timm model without its classifier."""

    visual: Any

    def lock_image_tower(self, unlocked_groups: int = 0) -> None:
        """Freeze the timm tower but for its last groups of layers; its projection keeps learning."""
        from timm.models import group_parameters

        self.visual.requires_grad_(False)
        if unlocked_groups:
            groups = group_parameters(self.visual, self.visual.group_matcher())
            for key in sorted(groups)[-unlocked_groups:]:
                for name in groups[key]:
                    self.visual.get_parameter(name).requires_grad_(True)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.visual.set_grad_checkpointing(enable)


class PairBackbone(_TimmBackbone):
    """The two towers under the method names of open_clip's models.  Attention leaves the token ``padding`` out; a
    caption is pooled by its first token ([CLS]), as the BERT family does unless told, or by the mean over it."""

    def __init__(self, visual: Any, text: Any, embed_dim: int, padding: int, pooling: str | None = None) -> None:
        super().__init__()
        self.visual, self.text, self.padding = visual, text, padding
        family = "first" if text.config.model_type in _FIRST_TOKEN else "mean"
        self.first_token = (pooling or family) == "first"
        self.visual_projection = _projection(visual.head_hidden_size, embed_dim)
        self.text_projection = _projection(text.config.hidden_size, embed_dim)

    def encode_image(self, images_BCHW: Tensor) -> Tensor:
        features_BD: Tensor = self.visual_projection(self.visual(images_BCHW))
        return features_BD

    def encode_text(self, tokens_BL: Tensor) -> Tensor:
        real_BL = tokens_BL != self.padding
        states_BLF: Tensor = self.text(input_ids=tokens_BL, attention_mask=real_BL.long()).last_hidden_state
        if self.first_token:
            pooled_BF = states_BLF[:, 0]
        else:
            weight_BL1 = real_BL.unsqueeze(-1).to(states_BLF.dtype)
            pooled_BF = (states_BLF * weight_BL1).sum(1) / weight_BL1.sum(1).clamp(min=1.0)
        features_BD: Tensor = self.text_projection(pooled_BF)
        return features_BD

    def lock_text_tower(self, unlocked_layers: int = 0) -> None:
        """Freeze the text tower but for its last layers; its projection keeps learning."""
        self.text.requires_grad_(False)
        if unlocked_layers:
            depth = self.text.config.num_hidden_layers
            stacks = [m for m in self.text.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
            if not stacks:
                raise ValueError("its layers cannot be told apart")
            for layer in stacks[0][-unlocked_layers:]:
                layer.requires_grad_(True)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        self.text.gradient_checkpointing_enable({"use_reentrant": False})


def pair_design(config: Model) -> PairDesign:
    """The design that `--image-tower` and `--text-tower` name."""
    assert config.image_tower is not None and config.text_tower is not None
    require_extra("transformers", "text", f"--text-tower {config.text_tower!r}")
    _require_timm("--image-tower", config.image_tower)
    return PairDesign(
        image_tower=config.image_tower,
        text_tower=config.text_tower,
        text_config=text_config_named(config.text_tower),
        embed_dim=config.embed_dim or DEFAULT_PAIR_WIDTH,
        context_length=config.context_length or DEFAULT_CONTEXT,
        pooling=config.text_pooling or _pooling_of(config.text_tower),
    )


def _require_timm(flag: str, name: str) -> None:
    import timm

    if not timm.is_model(name):
        raise ValueError(f"{flag} {name!r} is not a timm model{nearest(name, timm.list_models())}")


def text_config_named(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    if name in _KNOWN and not Path(name).is_dir():
        return dict(AutoConfig.for_model(**_KNOWN[name]).to_dict())
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"--text-tower {name!r} is a folder without config.json; give one that transformers wrote.")
    guess = nearest(name, _KNOWN).rstrip(".")
    with fetched(f"The config of --text-tower {name!r}", f"give a local folder, or connect to the hub{guess}"):
        return dict(AutoConfig.from_pretrained(name).to_dict())


def _pooling_of(name: str) -> Literal["first", "mean"] | None:
    """As sentence-transformers writes it beside a model; None where the model is none of theirs."""
    from transformers.utils import cached_file

    if name in _KNOWN and not Path(name).is_dir():
        return None
    silent = dict.fromkeys(("gated_repo", "missing_entries", "connection_errors"), False)
    file = cached_file(name, _POOLING, **{f"_raise_exceptions_for_{why}": raised for why, raised in silent.items()})
    if file is None:
        return None
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        switched_on = [name for name, on in content.items() if name.startswith("pooling_mode_") and on]
        modes = [name.removeprefix("pooling_mode_") for name in switched_on]
        modes = [content["pooling_mode"]] if "pooling_mode" in content else modes
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {error}; mend it, or set --text-pooling first or mean.") from None
    if modes in (["mean_tokens"], ["mean"]):
        return "mean"
    if modes in (["cls_token"], ["cls"]):
        return "first"
    raise ValueError(f"{file} pools by {listed(modes) or 'nothing'}; set --text-pooling first or mean.")


def build_pair(
    design: PairDesign, tokenizer: Tokenizer, image_weights: bool | str, text_weights: bool
) -> tuple[PairBackbone, PairDesign]:
    """The towers, and the design with the timm tower's image size and normalisation filled in."""
    visual = timm_tower("--image-tower", design.image_tower, design.image_size, image_weights)
    text = _text_tower(design, tokenizer, text_weights)
    filled = dataclasses.replace(_filled(design, visual), text_config=text.config.to_dict())
    return PairBackbone(visual, text, design.embed_dim, tokenizer.padding, design.pooling), filled


def _filled(design: AnyTimm, visual: Any, image_size: int | None = None) -> AnyTimm:
    """With the timm tower's image size and normalisation, where the design leaves them open."""
    from timm.data.config import resolve_model_data_config

    resolve: Any = resolve_model_data_config
    wanted = resolve(visual)
    return dataclasses.replace(
        design,
        image_size=design.image_size or image_size or int(wanted["input_size"][-1]),
        mean=design.mean or tuple(wanted["mean"]),
        std=design.std or tuple(wanted["std"]),
    )


def timm_tower(flag: str, name: str, image_size: int | None, weights: bool | str) -> Any:
    """A timm model without its classifier; with its own weights, a file's, or none.  ``flag`` is where the user named
    it."""
    import timm

    options: dict[str, Any] = {"num_classes": 0}
    if image_size is not None:
        options["img_size"] = image_size
    what, advice = f"{flag} {name!r}", "choose another tower or another image size"
    if weights is True:
        what = f"The weights of {flag} {name!r}"
        advice = "leave --image-weights out, name a file after it, or connect to the hub"
    with fetched(what, advice):
        try:
            tower = timm.create_model(name, pretrained=weights is True, **options)
        except TypeError:  # a network that takes every size does not know img_size
            options.pop("img_size", None)
            tower = timm.create_model(name, pretrained=weights is True, **options)
    if isinstance(weights, str):
        _load_tower(tower, Path(weights).expanduser(), name)
    return tower


def _load_tower(tower: Any, path: Path, name: str) -> None:
    """Without a classifier's head, and by timm's rule for published weights (other positions, other names) if it has
    one."""
    if not path.is_file():
        raise ValueError(f"--image-weights {str(path)!r} is not a file; give a state dict of {name!r}.")
    heads = tower.default_cfg.get("classifier") or ()
    heads = tuple(f"{head}." for head in ((heads,) if isinstance(heads, str) else heads))
    own = tower.state_dict()
    state = {key: value for key, value in read_weights(path).items() if key in own or not key.startswith(heads)}
    rule = getattr(sys.modules[type(tower).__module__], "checkpoint_filter_fn", None)
    if rule is not None:
        with fetched(f"{path}, as weights of {name!r},", "name the tower that it was trained with"):
            state = rule(state, tower)
    load_weights(tower, state, str(path), name)


def _text_tower(design: PairDesign, tokenizer: Tokenizer, pretrained: bool) -> Any:
    """Without pretrained weights the table of tokens follows the tokenizer, so that any tokenizer will do."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(**design.text_config)
    rows, name = int(config.vocab_size), design.text_tower
    if pretrained:
        if tokenizer.vocabulary > rows:
            raise ValueError(
                f"The tokenizer {tokenizer.name!r} knows {tokenizer.vocabulary} tokens and the weights of {name!r} "
                f"only {rows}; leave --tokenizer out, or leave --text-weights out."
            )
        with fetched(f"The weights of --text-tower {name!r}", "leave --text-weights out, or give a local folder"):
            model = _without_pooler(AutoModel.from_pretrained, name).float()  # else it has the file's 16 bits
    else:
        config.vocab_size, config.pad_token_id = max(rows, tokenizer.vocabulary), tokenizer.padding
        model = _without_pooler(AutoModel.from_config, config)
    if config.is_encoder_decoder:
        model = model.get_encoder()
    positions = getattr(config, "max_position_embeddings", None)
    reserved = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    if positions is not None and design.context_length > positions - reserved:
        raise ValueError(
            f"--context-length {design.context_length} exceeds the {positions - reserved} positions of {name!r}."
        )
    return model


def _without_pooler(make: Any, source: Any) -> Any:
    """BERT's pooler would be weights that never learn: DistributedDataParallel refuses those."""
    try:
        return make(source, add_pooling_layer=False)
    except TypeError:
        return make(source)


def _projection(features: int, embed_dim: int) -> nn.Linear:
    layer = nn.Linear(features, embed_dim, bias=False)
    torch.nn.init.normal_(layer.weight, std=features**-0.5)
    return layer


# -- one image encoder and a projection head for two views of each image: SimCLR's model -------------------------------


SMALL_SIZE = 32  # pixels a side that the small stem is made for


class ViewBackbone(_TimmBackbone):
    """A timm encoder and a projection head, which is left behind after training."""

    def __init__(self, visual: Any, projection: Sequence[int]) -> None:
        super().__init__()
        self.visual = visual
        self.projection = projection_head(int(visual.num_features), projection)

    def encode_image(self, images_BCHW: Tensor) -> Tensor:
        embedded_BD: Tensor = self.projection(self.visual(images_BCHW))
        return embedded_BD


class TwoViews(TwoTowers):
    """``TwoTowers`` whose second tower is the first: in place of captions, a batch holds another view of each image.
    The views pass the encoder one after the other, as in SimCLR's and SogCLR's code: BatchNorm sees one view at a
    time."""

    def features(self, images_BCHW: Tensor) -> Tensor:
        """What the encoder gives before the projection, for nearest neighbours and linear probes; not normalised."""
        features_BF: Tensor = self.backbone.visual(self.normalised(images_BCHW))
        return features_BF.float()

    def encode_text(self, tokens_BL: Tensor, size: TextSize | None = None) -> Tensor:
        """Of a second view; the name is that of the place it has."""
        return self.encode_image(tokens_BL)

    def compile(self, **options: Any) -> None:
        self.encode_image = compiled(self.encode_image, **options)  # type: ignore[method-assign]

    def _side_by_side(
        self, images_BCHW: Tensor, tokens_BL: Tensor, size: TextSize | None = None
    ) -> tuple[Tensor, Tensor]:
        """Never at the same time: both passes move the same BatchNorm statistics."""
        return self.encode_image(images_BCHW), self.encode_text(tokens_BL)


def projection_head(features: int, widths: Sequence[int]) -> nn.Sequential:
    """Linear maps to these widths, with BatchNorm and ReLU between; the last BatchNorm has no gain and no bias."""
    layers: list[nn.Module] = []
    for place, width in enumerate(widths):
        last = place == len(widths) - 1
        layers.append(nn.Linear(features, width, bias=False))
        layers.append(nn.BatchNorm1d(width, affine=not last))
        if not last:
            layers.append(nn.ReLU(inplace=True))
        features = width
    return nn.Sequential(*layers)


def views_design(config: Model) -> ViewsDesign:
    """The design that `--view-tower` names."""
    assert config.view_tower is not None
    _require_timm("--view-tower", config.view_tower)
    return ViewsDesign(config.view_tower, config.view_stem, config.projection)


def build_views(design: ViewsDesign, weights: bool | str) -> tuple[ViewBackbone, ViewsDesign]:
    """The encoder, and the design with its image size and normalisation filled in."""
    visual = timm_tower("--view-tower", design.tower, design.image_size, weights)
    filled = _filled(design, visual, SMALL_SIZE if design.stem == "small" else None)
    if design.stem == "small":
        _make_stem_small(visual, design.tower)
    return ViewBackbone(visual, design.projection), filled


def _make_stem_small(visual: Any, name: str) -> None:
    """For images of about 32 pixels: a 3 x 3 convolution that keeps their size, and no max-pooling after it."""
    from timm.models.resnet import ResNet

    if not isinstance(visual, ResNet):
        raise ValueError(
            f"--view-stem small replaces the first convolution and the max-pooling of a ResNet, and {name!r} is none; "
            "use resnet18, resnet34 or resnet50, or leave it out."
        )
    visual.conv1 = nn.Conv2d(3, visual.bn1.num_features, 3, stride=1, padding=1, bias=False)
    torch.nn.init.kaiming_normal_(visual.conv1.weight, mode="fan_out", nonlinearity="relu")
    visual.maxpool = nn.Identity()
