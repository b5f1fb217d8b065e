"""Locked towers: no gradient, no moving statistics, no dropout; and the parts that learn all the same."""

import copy

import pytest
import torch
from torch import nn

from fullbatch.config.model import Model
from fullbatch.models.build import build_model
from tests.models.conftest import CAPTIONS, some_images


def learning(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_locked_image_tower_of_a_vit(write_config):
    model = build_model(Model(write_config(), lock_image=True))
    assert not learning(model.backbone.visual)
    assert learning(model.backbone.transformer)
    assert not model.backbone.visual.training and model.backbone.transformer.training


def test_locked_text_tower_of_plain_clip(write_config):
    model = build_model(Model(write_config(), lock_text=True))
    assert all(name.startswith("backbone.visual.") for name in learning(model))
    assert not model.backbone.transformer.training and model.backbone.visual.training
    assert not model.eval().training and model.train().training
    assert not model.backbone.transformer.training


def test_unlocked_parts(write_config):
    path = write_config()
    model = build_model(Model(path, lock_image=True, unlocked_image_groups=2, lock_text=True, unlocked_text_layers=2))
    blocks = model.backbone.visual.transformer.resblocks
    assert learning(blocks[-1]) and not learning(blocks[0])
    assert blocks[-1].training and not blocks[0].training
    blocks = model.backbone.transformer.resblocks
    assert learning(blocks[-1]) and not learning(blocks[0])


def test_batch_norm_statistics_of_a_locked_resnet_stay(write_config):
    path = write_config({"layers": [1, 1, 1, 1], "width": 8, "image_size": 32, "head_width": 8})
    for lock in (True, False):
        model = build_model(Model(path, lock_image=lock))
        before = copy.deepcopy(model.backbone.visual.bn1.running_mean)
        model.train()
        model(some_images(32), model.tokenize(CAPTIONS))
        assert torch.equal(before, model.backbone.visual.bn1.running_mean) == lock
    with pytest.raises(ValueError, match=r"cannot unlock a part.*--unlocked-image-groups 0"):
        build_model(Model(path, lock_image=True, unlocked_image_groups=1))
    with pytest.raises(ValueError, match="cannot recompute its activations"):
        build_model(Model(path, checkpoint_activations=True))


def test_locked_pair_keeps_its_projections_learning(text_folder):
    model = build_model(
        Model(image_tower="test_resnet", text_tower=text_folder, context_length=8, lock_image=True, lock_text=True)
    )
    assert learning(model) == {"backbone.visual_projection.weight", "backbone.text_projection.weight"}
    drops = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    assert drops and not any(m.training for m in drops)
    rows = [model.encode_text(model.tokenize(["a cat"])) for _ in range(2)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("tower", ["test_resnet", "test_vit"])
def test_unlocked_parts_of_a_pair(text_folder, tower):
    model = build_model(
        Model(
            image_tower=tower,
            text_tower=text_folder,
            context_length=8,
            lock_image=True,
            unlocked_image_groups=1,
            lock_text=True,
            unlocked_text_layers=1,
        )
    )
    layers = model.backbone.text.transformer.layer
    assert [bool(learning(layer)) for layer in layers] == [False, False, True]
    assert [layer.training for layer in layers] == [False, False, True]
    every = {name for name, _ in model.backbone.visual.named_parameters()}
    assert 0 < len(learning(model.backbone.visual)) < len(every)


@pytest.mark.filterwarnings("ignore:Importing from timm.models.helpers:FutureWarning")  # open_clip does
def test_timm_tower_inside_open_clip_unlocks_by_groups(write_config):
    path = write_config({"timm_model_name": "test_vit", "timm_proj": "linear", "image_size": 160})
    full = build_model(Model(path, lock_image=True))
    assert not learning(full.backbone.visual.trunk) and learning(full.backbone.visual.head)
    part = build_model(Model(path, lock_image=True, unlocked_image_groups=2))
    assert learning(part.backbone.visual.trunk)
    assert not part.backbone.visual.trunk.patch_embed.training
