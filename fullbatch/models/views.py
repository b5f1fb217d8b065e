"""One image encoder and a projection head for two views of each image: SimCLR's model."""

# B: images   C, H, W: channels, pixels   F: features of the encoder   D: width of the embedding

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.config.messages import nearest
from fullbatch.config.model import Model
from fullbatch.models.design import ViewsDesign
from fullbatch.models.pair import timm_tower
from fullbatch.models.towers import TwoTowers

SMALL_SIZE = 32  # pixels a side that the small stem is made for


class ViewBackbone(nn.Module):
    """A timm encoder and a projection head, which is left behind after training."""

    def __init__(self, visual: Any, projection: Sequence[int]) -> None:
        super().__init__()
        self.visual = visual
        self.projection = projection_head(int(visual.num_features), projection)

    def encode_image(self, images_BCHW: Tensor) -> Tensor:
        embedded_BD: Tensor = self.projection(self.visual(images_BCHW))
        return embedded_BD

    def lock_image_tower(self, unlocked_groups: int = 0) -> None:
        """Freeze the encoder but for its last groups of layers; the projection keeps learning."""
        from timm.models import group_parameters

        self.visual.requires_grad_(False)
        if unlocked_groups:
            groups = group_parameters(self.visual, self.visual.group_matcher())
            for key in sorted(groups)[-unlocked_groups:]:
                for name in groups[key]:
                    self.visual.get_parameter(name).requires_grad_(True)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.visual.set_grad_checkpointing(enable)


class TwoViews(TwoTowers):
    """``TwoTowers`` whose second tower is the first: what a batch holds in place of captions is another view.

    The views go through the encoder one after the other, as in SimCLR's and SogCLR's code, so that BatchNorm sees a
    view of the whole batch at a time.
    """

    def features(self, images_BCHW: Tensor) -> Tensor:
        """What the encoder gives before the projection, for nearest neighbours and linear probes; not normalised."""
        features_BF: Tensor = self.backbone.visual(self.normalised(images_BCHW))
        return features_BF.float()

    def encode_text(self, tokens_BL: Tensor) -> Tensor:
        """Of a second view; the name is that of the place it has."""
        return self.encode_image(tokens_BL)

    def _side_by_side(self, images_BCHW: Tensor, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
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
    import timm

    assert config.view_tower is not None
    if not timm.is_model(config.view_tower):
        guess = nearest(config.view_tower, timm.list_models())
        raise ValueError(f"--view-tower {config.view_tower!r} is not a timm model{guess}")
    return ViewsDesign(config.view_tower, config.view_stem, config.projection)


def build_views(design: ViewsDesign, weights: bool | str) -> tuple[ViewBackbone, ViewsDesign]:
    """The encoder, and the design with its image size and normalisation filled in."""
    from timm.data.config import resolve_model_data_config

    resolve: Any = resolve_model_data_config
    visual = timm_tower("--view-tower", design.tower, design.image_size, weights)
    wanted = resolve(visual)
    own_size = SMALL_SIZE if design.stem == "small" else int(wanted["input_size"][-1])
    if design.stem == "small":
        _make_stem_small(visual, design.tower)
    filled = dataclasses.replace(
        design,
        image_size=design.image_size or own_size,
        mean=design.mean or tuple(wanted["mean"]),
        std=design.std or tuple(wanted["std"]),
    )
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
