"""open_clip models: the same embeddings as open_clip's own, checkpoints go both ways."""

import dataclasses
import math
import pickle

import open_clip
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from fullbatch.config.model import Model
from fullbatch.models.build import build_model
from fullbatch.models.saved import export
from fullbatch.models.two_towers import batch_norm_names, is_convolutional
from tests.models.conftest import CAPTIONS, some_images


def embeddings(model):
    model.eval()
    with torch.no_grad():
        return model(some_images(model.image_size), model.tokenize(CAPTIONS))


def assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


def test_tiny_trains_both_towers():
    model = build_model(Model())
    assert (model.width, model.image_size, model.context_length) == (128, 64, 24)
    assert model.initial_temperature is None and model.initial_bias is None
    assert not batch_norm_names(model) and not is_convolutional(model)
    image_BD, text_BD = model(some_images(64), model.tokenize(CAPTIONS))
    (image_BD * text_BD).sum().backward()
    for rows in (image_BD, text_BD):
        assert rows.shape == (4, 128) and rows.dtype == torch.float32
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))
    learning = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in learning)  # DistributedDataParallel wants every weight used
    assert not model.backbone.logit_scale.requires_grad


def test_uint8_images_are_normalised_as_open_clip_does(write_config):
    model = build_model(Model(write_config())).eval()
    pixels = some_images(32, 1)
    transform = open_clip.image_transform(32, is_train=False)
    prepared = transform(Image.fromarray(pixels[0].permute(1, 2, 0).numpy())).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(model.encode_image(pixels), model.encode_image(prepared), atol=1e-6, rtol=0)
        theirs = F.normalize(model.backbone.encode_image(prepared), dim=-1)
        torch.testing.assert_close(model.encode_image(prepared), theirs, atol=1e-6, rtol=0)


def test_bfloat16_autocast_still_gives_float32_unit_rows(write_config):
    model = build_model(Model(write_config()))
    with torch.autocast("cpu", torch.bfloat16):
        rows = model(some_images(32), model.tokenize(CAPTIONS))
    for row in rows:
        assert row.dtype == torch.float32
        torch.testing.assert_close(row.norm(dim=1), torch.ones(4))


def test_tokenizer_is_clips_and_pickles():
    tokenize = pickle.loads(pickle.dumps(build_model(Model()).tokenize))
    assert torch.equal(tokenize(CAPTIONS), open_clip.tokenize(CAPTIONS, context_length=24))
    assert tokenize([]).shape == (0, 24)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_folder_loads_in_open_clip(write_config, tmp_path, quick_gelu):
    model = build_model(Model(write_config(quick_gelu=quick_gelu)))
    folder = export(model, tmp_path / "out", "open_clip", temperature=0.02, bias=-3.0)
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(CAPTIONS)
    assert torch.equal(tokens, model.tokenize(CAPTIONS))
    image = Image.fromarray(some_images(32)[0].permute(1, 2, 0).numpy())
    with torch.no_grad():
        image_BD, text_BD, scale, bias = theirs.eval()(transform(image).unsqueeze(0), tokens)
    mine = embeddings(model)
    assert_same((mine[0][:1], mine[1]), (image_BD, text_BD))
    assert scale.item() == pytest.approx(50.0) and bias.item() == pytest.approx(-3.0)

    again = build_model(Model(pretrained=str(folder)))
    assert_same(mine, embeddings(again))
    assert again.initial_temperature == pytest.approx(0.02) and again.initial_bias == pytest.approx(-3.0)


def test_registered_model_goes_both_ways(tmp_path, monkeypatch, write_config):
    """A small config under a name open_clip knows: .pt there and back."""
    path = write_config(name="small-registered.json")
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    open_clip.add_model_config(path)
    model = build_model(Model("small-registered"))
    file = export(model, tmp_path / "model.pt", "open_clip", temperature=0.05, bias=None)
    theirs = open_clip.create_model("small-registered", pretrained=str(file)).eval()
    with torch.no_grad():
        text_BD = theirs.encode_text(model.tokenize(CAPTIONS), normalize=True)
    torch.testing.assert_close(embeddings(model)[1], text_BD, atol=1e-6, rtol=0)
    assert theirs.logit_scale.item() == pytest.approx(math.log(20))
    with pytest.raises(ValueError, match="give a folder"):
        export(model, tmp_path / "biased.pt", "open_clip", temperature=0.05, bias=1.0)


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model", "ddp", "towers", "safetensors"])
def test_checkpoints_in_many_wrappings(write_config, tmp_path, wrap):
    model = build_model(Model(write_config()))
    state = model.backbone.state_dict()
    file = tmp_path / "weights.pt"
    if wrap == "safetensors":
        from safetensors.torch import save_file

        file = tmp_path / "weights.safetensors"
        save_file(state, file)
    else:
        ddp = {f"module.{key}": value for key, value in state.items()}
        saved = {
            "plain": state,
            "state_dict": {"epoch": 3, "state_dict": ddp},
            "model": {"model": state},
            "ddp": ddp,
            "towers": {"model": {f"module.{key}": value for key, value in model.state_dict().items()}},
        }
        torch.save(saved[wrap], file)
    again = build_model(Model(write_config(), pretrained=str(file)))
    assert_same(embeddings(model), embeddings(again))
    assert again.initial_temperature == pytest.approx(0.07)


def test_other_image_size_and_context_length_resize_positions(write_config, tmp_path):
    path = write_config()
    torch.save(build_model(Model(path)).backbone.state_dict(), tmp_path / "w.pt")
    model = build_model(Model(path, pretrained=str(tmp_path / "w.pt"), context_length=8), image_size=64)
    assert (model.image_size, model.context_length) == (64, 8)
    assert embeddings(model)[0].shape == (4, 16)


def test_siglip_style_config_with_a_given_tokenizer(write_config, text_folder, tmp_path):
    text = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "vocab_size": 64, "context_length": 16}
    text["hf_tokenizer_name"] = "timm/ViT-B-16-SigLIP"
    vision = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": 160}
    path = write_config(vision, text, custom_text=True, init_logit_bias=-10)
    with pytest.raises(ValueError, match=r"small.json.*--tokenizer PATH"):
        build_model(Model(path))
    model = build_model(Model(path, tokenizer=text_folder))
    mine = embeddings(model)
    for format, place in (("open_clip", "folder"), ("safetensors", "model.safetensors"), ("safetensors", "dir")):
        written = export(model, tmp_path / place, format, temperature=0.1, bias=None)
        again = build_model(Model(pretrained=str(written)))
        assert torch.equal(again.tokenize(CAPTIONS), model.tokenize(CAPTIONS))
        assert_same(mine, embeddings(again))
    there = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'folder'}")
    assert torch.equal(there(CAPTIONS), model.tokenize(CAPTIONS))
    theirs = open_clip.create_model(f"local-dir:{tmp_path / 'folder'}").eval()
    with torch.no_grad():
        text_BD = theirs.encode_text(there(CAPTIONS), normalize=True)
    torch.testing.assert_close(mine[1], text_BD, atol=1e-6, rtol=0)


def test_checkpointed_activations_change_no_gradient(write_config):
    path, tokens, gradients = write_config(), None, []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model = build_model(dataclasses.replace(Model(path), checkpoint_activations=checkpoint))
        tokens = model.tokenize(CAPTIONS)
        image_BD, text_BD = model(some_images(32), tokens)
        (image_BD * text_BD).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
