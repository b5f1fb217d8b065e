"""One encoder for two views: its face is that of two towers, and it is saved, exported and refused as they are."""

import json

import pytest
import torch

from fullbatch.config.model import Model
from fullbatch.config.run import RunConfig
from fullbatch.models.build import build_model, rebuild_model
from fullbatch.models.design import ViewsDesign, from_json, to_json
from fullbatch.models.saved import export, write_design
from fullbatch.models.timm_towers import TwoViews, projection_head
from fullbatch.models.two_towers import batch_norm_names, is_convolutional

SMALL = Model(view_tower="test_resnet", view_stem="small", projection=(16, 8))


def pictures(count=4, size=32):
    return torch.randint(256, (count, 3, size, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_model(SMALL)


def test_it_has_the_face_of_two_towers(model):
    assert isinstance(model, TwoViews)
    assert (model.width, model.image_size, model.context_length) == (8, 32, 0)
    first, second = model(pictures(), pictures().flip(3))
    assert first.shape == second.shape == (4, 8)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(4))
    assert model(pictures(), None)[1] is None and model(None, pictures())[0] is None
    assert model.features(pictures()).shape == (4, 96)


def test_both_views_pass_the_same_encoder_one_after_the_other(model):
    model.eval()
    first, second = model(pictures(), pictures())
    assert torch.equal(first, second)
    norm = model.backbone.projection[1]
    model.train()
    before = int(norm.num_batches_tracked)
    model(pictures(), pictures())
    assert int(norm.num_batches_tracked) == before + 2
    tracked = norm.num_batches_tracked.clone()
    one, two = model._side_by_side(pictures(), pictures().flip(3))  # as in a recorded step
    assert int(norm.num_batches_tracked) == int(tracked) + 2
    torch.testing.assert_close((one, two), model(pictures(), pictures().flip(3)))
    assert len(batch_norm_names(model)) > 2 and is_convolutional(model)


def test_features_are_what_the_projection_reads(model):
    model.eval()
    expected = torch.nn.functional.normalize(model.backbone.projection(model.features(pictures())), dim=-1)
    torch.testing.assert_close(model.encode_image(pictures()), expected)


def test_the_head_is_the_authors():
    kinds = [type(layer).__name__ for layer in projection_head(512, (2048, 128))]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    head = projection_head(512, (2048, 128))
    assert head[0].bias is None and head[3].bias is None
    assert head[1].affine and not head[4].affine
    assert [layer.out_features for layer in (head[0], head[3])] == [2048, 128]


def test_the_small_stem_keeps_the_size():
    """ResNet-18 on 32 pixels ends at 4 x 4, not at 1 x 1."""
    small = build_model(Model(view_tower="resnet18", view_stem="small"))
    assert small.image_size == 32
    visual = small.backbone.visual
    assert visual.conv1.stride == (1, 1) and visual.conv1.kernel_size == (3, 3)
    assert visual.forward_features(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    weights = sum(p.numel() for p in visual.parameters())
    assert weights == 11_168_832  # torchvision's ResNet-18 without its classes, 7 x 7 x 3 x 64 now 3 x 3 x 3 x 64


def test_it_says_why_there_is_no_tokenizer(model):
    with pytest.raises(ValueError, match="two views of images and has no text tower"):
        model.tokenize(["a dog"])


def test_the_design_goes_through_json(model):
    text = to_json(model.design, temperature=0.1)
    assert json.loads(text)["kind"] == "views"
    design, extra = from_json(text)
    assert design == model.design and isinstance(design, ViewsDesign) and extra == {"temperature": 0.1}


def test_it_is_built_again_from_its_run_folder(model, tmp_path):
    write_design(model, tmp_path)
    again = rebuild_model(SMALL, tmp_path)
    assert isinstance(again, TwoViews) and again.design == model.design
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(pictures(), None)[0], model.eval()(pictures(), None)[0])


@pytest.mark.parametrize("name", ["views.safetensors", "folder"])
def test_it_is_exported_and_loaded(model, tmp_path, name):
    path = export(model, tmp_path / name, "safetensors", 0.1, None)
    loaded = build_model(Model(pretrained=str(path)))
    assert isinstance(loaded, TwoViews) and loaded.initial_temperature == 0.1
    images = pictures()
    assert torch.equal(loaded.eval().features(images), model.eval().features(images))
    assert torch.equal(loaded(images, None)[0], model(images, None)[0])
    with pytest.raises(ValueError, match="saved with another architecture"):
        build_model(Model(view_tower="resnet18", pretrained=str(path)))
    with pytest.raises(ValueError, match="lora_rank must be left out for two views"):
        build_model(Model(pretrained=str(path), lora_rank=4))


@pytest.mark.parametrize("format", ["open_clip", "huggingface"])
def test_other_formats_have_no_place_for_it(model, tmp_path, format):
    with pytest.raises(ValueError, match="export it with --format safetensors"):
        export(model, tmp_path / "out", format, 0.1, None)


def test_the_encoder_can_be_locked():
    locked = build_model(Model(view_tower="test_resnet", lock_image=True, projection=(8,)))
    learns = {name for name, p in locked.named_parameters() if p.requires_grad}
    assert learns == {"backbone.projection.0.weight"}
    assert not locked.train().backbone.visual.training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"view_tower": "resnet1818"}, "is not a timm model; did you mean 'resnet18"),
        ({"view_tower": "test_vit", "view_stem": "small"}, "'test_vit' is none"),
        ({"view_tower": "test_resnet", "pretrained": "nowhere.pt"}, "does not exist; for two views give a file"),
    ],
)
def test_models_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        build_model(Model(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"view_tower": "resnet18", "model": "ViT-B-32"}, "model must be left out where view_tower is given"),
        ({"view_tower": "resnet18", "image_tower": "resnet18"}, "image_tower must be left out where view_tower"),
        ({"view_tower": "resnet18", "embed_dim": 64}, "embed_dim must be left out where view_tower"),
        ({"view_tower": "resnet18", "tokenizer": "x"}, "tokenizer must be left out for two views"),
        ({"view_tower": "resnet18", "lock_text": True}, "lock_text must be left out for two views"),
        ({"view_stem": "small"}, "view_stem must be left out without view_tower"),
        ({"projection": (8,)}, "projection must be left out without view_tower"),
        ({"view_tower": "resnet18", "projection": ()}, "projection must be at least one width"),
        ({"view_tower": "resnet18", "crop": (0.5, 1.0)}, "Data.crop must be left out for two views.*view_crop"),
        ({"view_tower": "resnet18", "flip": True}, "Data.flip must be left out for two views"),
        ({"view_grey": 0.5}, "Views.view_grey and the other settings of views belong to a model with a view_tower"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.of(**settings)
