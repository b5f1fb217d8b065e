"""Mistakes in naming a model: one sentence with what is allowed and what to do, and never a hub's stack of errors."""

import dataclasses
import json
import math

import pytest
import torch

from fullbatch.config.model import Model
from fullbatch.models.build import build_model, require_temperature
from fullbatch.models.saved import export
from tests.training.small import TOWERS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ""}, "model must name a model"),
        ({"image_tower": "resnet50"}, "text_tower must be given too"),
        ({"text_tower": "bert-base-uncased"}, "image_tower must be given too"),
        ({"model": "ViT-B-32", "image_tower": "a", "text_tower": "b"}, "model must be left out"),
        ({"embed_dim": 64}, "embed_dim must be left out"),
        ({"image_weights": True}, "image_weights must be False"),
        ({"unlocked_image_groups": 2}, "must be 0 without lock_image"),
        ({"unlocked_text_layers": -1}, "whole number of at least 0"),
        ({"context_length": 2}, "at least 3"),
        ({"lock_image": 1}, "lock_image must be one of True, False"),
        ({"pretrained": ""}, "pretrained must be a name or a path"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        Model(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "ViT-B-23"}, r"nor an open_clip config; did you mean 'ViT-B-32'\?$"),
        ({"model": "no/such.json"}, "cannot be read: No such file"),
        ({"model": "ViT-B-32", "pretrained": "openia"}, r"\(its tags are openai.*did you mean 'openai'\?$"),
        ({"pretrained": "openai"}, r"it has no tags\)\.$"),
        ({"model": "ViT-B/32-quickgelu", "pretrained": "openai"}, "weights 'openai'.*could not be loaded.*connect"),
        ({"model": "ViT-B-16-SigLIP"}, "tokenizer .* of the model 'ViT-B-16-SigLIP' could not.*--tokenizer PATH"),
        ({"model": "coca_ViT-B-32"}, "CoCa"),
        ({"image_tower": "resnet5", "text_tower": "x"}, r"is not a timm model; did you mean 'resnet50'\?$"),
        ({"image_tower": "test_vit", "text_tower": "no-such-bert"}, "config of --text-tower .*give a local folder"),
        (
            {"image_tower": "test_vit", "text_tower": "distilbert-base-uncased"},
            "model 'distilbert-base-uncased' could not be loaded.*--tokenizer PATH",
        ),
    ],
)
def test_names_that_cannot_be_had(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_model(Model(**fields))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 450
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_weights_of_towers_need_the_hub(text_folder):
    with pytest.raises(ValueError, match=r"weights of --image-tower 'test_vit' could not.*leave --image-weights out"):
        build_model(Model(image_tower="test_vit", text_tower=text_folder, image_weights=True, context_length=8))
    known = Model(image_tower="test_vit", text_tower="distilbert-base-uncased", tokenizer=text_folder)
    with pytest.raises(ValueError, match="weights of --text-tower 'distilbert-base-uncased' could not"):
        build_model(dataclasses.replace(known, text_weights=True))


def test_transformers_is_an_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package transformers.*fullbatch\[text\]"):
        build_model(Model(image_tower="test_vit", text_tower="distilbert-base-uncased"))


def test_tokenizers_that_do_not_fit(text_folder, write_config):
    pair = Model(image_tower="test_vit", text_tower=text_folder, context_length=8)
    with pytest.raises(ValueError, match="49408 tokens and the weights"):
        build_model(dataclasses.replace(pair, tokenizer="ViT-B-32", text_weights=True))
    with pytest.raises(ValueError, match="only 64"):
        build_model(Model(write_config(text={"vocab_size": 64}), tokenizer="ViT-B-32"))
    with pytest.raises(ValueError, match="reads a caption at its largest token id"):
        build_model(Model(write_config(), tokenizer=text_folder))
    with pytest.raises(ValueError, match="exceeds the 32 positions"):
        build_model(dataclasses.replace(pair, context_length=40))


def test_configs_that_are_none(tmp_path, write_config):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        build_model(Model(str(broken)))
    broken.write_text('{"embed_dim": 3}')
    with pytest.raises(ValueError, match="lacks vision_cfg, text_cfg"):
        build_model(Model(str(broken)))
    with pytest.raises(ValueError, match=r"open_clip cannot build .*patch_sise"):
        build_model(Model(write_config({"patch_sise": 3})))


@pytest.mark.parametrize(
    ("vision", "text", "message"),
    [
        ({"patch_size": 0}, {}, "open_clip cannot build the model"),
        ({}, "x", "text_cfg must map names to values, got 'x'"),
        ([], {}, "vision_cfg must map names to values"),
        ({"layers": 10**9}, {}, "vision_cfg has 1,000,000,000 layers"),
        ({}, {"layers": 10**9}, "text_cfg has 1,000,000,000 layers"),
        ({"width": 10**12}, {}, "open_clip cannot build the model"),
        ({"head_width": 0}, {}, "open_clip cannot build the model"),
        ({}, {"heads": 0}, "open_clip cannot build the model"),
    ],
)
def test_configs_that_cannot_be(tmp_path, vision, text, message):
    config = json.loads(json.dumps(TOWERS))
    for tower, change in (("vision_cfg", vision), ("text_cfg", text)):
        config[tower] = {**config[tower], **change} if isinstance(change, dict) else change
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as caught:
        build_model(Model(str(path)))
    assert "\n" not in str(caught.value)


def test_a_config_of_brackets(tmp_path):
    path = tmp_path / "odd.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"odd\.json is not JSON"):
        build_model(Model(str(path)))


def test_checkpoints_that_do_not_fit(tmp_path, write_config):
    path, file = write_config(), tmp_path / "w.pt"
    state = build_model(Model(path)).backbone.state_dict()
    state["visual.proj"] = state["visual.proj"][:, :3]
    del state["ln_final.bias"]
    torch.save({**state, "extra": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"in 3 of its weights \(ln_final.bias is missing, extra is unknown, visual"):
        build_model(Model(path, pretrained=str(file)))
    torch.save({"epoch": 3}, file)
    with pytest.raises(ValueError, match="holds no state dict"):
        build_model(Model(path, pretrained=str(file)))
    for name in ("w.pt", "w.safetensors"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(ValueError, match=r"readable|cannot be read"):
            build_model(Model(path, pretrained=str(tmp_path / name)))
    (tmp_path / "w.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        build_model(Model(path, pretrained=str(tmp_path / "w.npz")))


def test_a_checkpoint_of_another_size(tmp_path, write_config):
    """Patches of another size: positions could be resized, weights cannot; the message has shapes."""
    torch.save(build_model(Model(write_config())).backbone.state_dict(), tmp_path / "w.pt")
    for vision in ({"patch_size": 8}, {"width": 48}, {"layers": 3}):
        with pytest.raises(
            ValueError, match=r"w\.pt does not fit the model .*small\.json.* in \d+ of its weights"
        ) as caught:
            build_model(Model(write_config(vision), pretrained=str(tmp_path / "w.pt")))
        assert "\n" not in str(caught.value)
        assert "instead of" in str(caught.value) or "is missing" in str(caught.value)


def test_a_checkpoint_without_a_scale(tmp_path, write_config):
    """The towers are whole; a method that keeps the temperature of its weights asks for it."""
    path, file = write_config(), tmp_path / "w.pt"
    state = build_model(Model(path)).backbone.state_dict()
    del state["logit_scale"]
    torch.save(state, file)
    with pytest.warns(UserWarning, match=r"w\.pt has no logit_scale"):
        model = build_model(Model(path, pretrained=str(file)))
    assert model.initial_temperature is None
    assert torch.equal(model.backbone.visual.proj, state["visual.proj"])
    with pytest.raises(ValueError, match=r"^w\.pt has no logit_scale.*give it by --settings\.temperature"):
        require_temperature(model, "w.pt")
    torch.save({**state, "logit_scale": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match=r"logit_scale is \(2,\) instead of \(\)"):
        build_model(Model(path, pretrained=str(file)))
    torch.save({**state, "logit_scale": torch.tensor([4.0])}, file)
    assert require_temperature(build_model(Model(path, pretrained=str(file))), "w.pt") == pytest.approx(math.exp(-4.0))


def test_checkpoints_with_code_are_not_run(tmp_path, write_config):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint of tensors"):
        build_model(Model(write_config(), pretrained=str(tmp_path / "evil.pt")))


def test_exports_bring_their_architecture(tmp_path, write_config):
    model = build_model(Model(write_config()))
    folder = export(model, tmp_path / "out", "open_clip", temperature=0.1, bias=None)
    build_model(Model(write_config(), pretrained=str(folder)))
    with pytest.raises(ValueError, match="another architecture"):
        build_model(Model(write_config({"layers": 1}), pretrained=str(folder)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"neither fullbatch\.safetensors, nor open_clip_config\.json"):
        build_model(Model(pretrained=str(tmp_path / "empty")))
