"""SigLIP architectures: scale and bias come with the weights and stay through training, resume and export."""

import dataclasses
import math

import open_clip
import pytest
import torch

from fullbatch.config.methods import ObjectiveConfig
from fullbatch.config.model import Model
from fullbatch.config.optimization import Optimizer
from fullbatch.loading import load_trained
from fullbatch.models.build import build_model
from fullbatch.models.saved import export
from fullbatch.training_run import train
from tests.models.conftest import some_images
from tests.models.siglip import CAPTIONS, write_siglip
from tests.training.small import small_config

SCALE, BIAS = 117.0, -12.5  # as SigLIP's end


@pytest.fixture
def siglip(tmp_path):
    """The model, and a file of weights with logit_scale and logit_bias as open_clip saves them."""
    config, tokenizer = write_siglip(tmp_path / "siglip")
    torch.manual_seed(0)
    state = build_model(Model(config, tokenizer=tokenizer)).backbone.state_dict()
    state |= {"logit_scale": torch.tensor(math.log(SCALE)), "logit_bias": torch.tensor(BIAS)}
    torch.save({"state_dict": state}, tmp_path / "siglip.pt")
    return Model(config, tokenizer=tokenizer, pretrained=str(tmp_path / "siglip.pt"))


def embeddings(model):
    model.eval()
    with torch.no_grad():
        return model(some_images(model.image_size), model.tokenize(CAPTIONS))


def test_weights_bring_scale_and_bias(siglip):
    model = build_model(siglip)
    assert model.initial_temperature == pytest.approx(1 / SCALE, rel=1e-6) and model.initial_bias == BIAS
    assert (model.width, model.context_length) == (64, 64)
    assert not model.backbone.logit_scale.requires_grad and not model.backbone.logit_bias.requires_grad


def test_every_weight_but_these_two_learns(siglip):
    model = build_model(siglip)
    image_BD, text_BD = model(some_images(160, len(CAPTIONS)), model.tokenize(CAPTIONS))
    (image_BD * text_BD).sum().backward()
    unused = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert unused == {"backbone.logit_scale", "backbone.logit_bias"}


def test_the_text_tower_sees_both_ways(siglip):
    """Every token counts at the last position, and none is masked: SigLIP reads a caption where its padding ends."""
    model = build_model(siglip).eval()
    tokens_BL = model.tokenize(["a photo of a cat"])
    assert tokens_BL.shape == (1, 64) and (tokens_BL[0, -40:] == model.tokenize.padding).all()
    other_BL = tokens_BL.clone()
    other_BL[0, 3] += 1
    states = []
    hook = model.backbone.text.transformer.register_forward_hook(lambda _, inputs, out: states.append(out))
    with torch.no_grad():
        model.encode_text(tokens_BL)
        model.encode_text(other_BL)
    hook.remove()
    assert not torch.equal(states[0][0, 0], states[1][0, 0])  # an earlier position sees a later token


def test_captions_are_canonical_pieces_of_words(siglip):
    tokenize = build_model(siglip).tokenize
    assert tokenize.vocabulary <= 512
    assert torch.equal(tokenize(["A photo, of a CAT!"]), tokenize(["a photo of a cat"]))
    assert int(tokenize(["a photo of a cat"])[0].eq(1).sum()) > 40
    assert len(set(map(tuple, tokenize(CAPTIONS).tolist()))) == len(CAPTIONS)


@pytest.mark.parametrize(
    ("format", "place"), [("open_clip", "o"), ("safetensors", "s"), ("safetensors", "s.safetensors")]
)
@pytest.mark.parametrize("bias", [None, -3.0])
def test_exports_keep_both(siglip, tmp_path, format, place, bias):
    """None: the objective has no bias of its own, so the model's stays."""
    model = build_model(siglip)
    written = export(model, tmp_path / "out" / place, format, temperature=0.02, bias=bias)
    again = build_model(Model(pretrained=str(written), tokenizer=siglip.tokenizer))
    assert again.initial_temperature == pytest.approx(0.02, rel=1e-6)
    assert again.initial_bias == (BIAS if bias is None else bias)
    assert again.backbone.logit_bias.item() == again.initial_bias
    for mine, theirs in zip(embeddings(model), embeddings(again), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    if format == "open_clip":
        theirs = open_clip.create_model(f"local-dir:{written}")
        assert theirs.logit_bias.item() == again.initial_bias
        assert theirs.logit_scale.exp().item() == pytest.approx(50.0)


def tuning(folder, model, method="tuneclip", steps=4, **objective):
    config = small_config(folder, method, steps=steps)
    return dataclasses.replace(
        config,
        model=model,
        objective=ObjectiveConfig(method=method, **objective),
        optimizer=Optimizer(lr=1e-5, temperature_lr=1e-3),
        run=dataclasses.replace(config.run, save_every=2),
    )


def test_tuneclip_keeps_temperature_and_bias_through_resume_and_export(siglip, tmp_path):
    config = tuning(tmp_path, siglip)
    run = train(dataclasses.replace(config, training=dataclasses.replace(config.training, samples=16))).folder
    (tmp_path / "siglip.pt").unlink()  # a run that goes on has all it needs
    train(config, resume=run)
    loaded = load_trained(run)
    assert loaded.step == 4 and loaded.bias == BIAS
    assert loaded.temperature == pytest.approx(1 / SCALE, rel=1e-6)
    again = build_model(Model(pretrained=str(load_trained(run).export(tmp_path / "out", "open_clip"))))
    assert again.initial_temperature == pytest.approx(1 / SCALE, rel=1e-6) and again.initial_bias == BIAS


def test_the_users_temperature_goes_before_the_weights(siglip, tmp_path):
    run = train(tuning(tmp_path, siglip, steps=2, settings={"temperature": 0.05})).folder
    assert load_trained(run).temperature == 0.05


def test_an_objective_with_a_bias_has_its_own(siglip, tmp_path):
    run = train(tuning(tmp_path, siglip, "siglip", steps=2)).folder
    learned = load_trained(run)
    assert learned.bias != BIAS and learned.bias == pytest.approx(BIAS, abs=0.1)


def test_pixels_of_weights_given_as_a_file_are_normalised_as_those_of_their_tag():
    from fullbatch.models.open_clip_towers import design_named

    assert design_named("ViT-B-16-SigLIP").mean == (0.5, 0.5, 0.5) == design_named("ViT-B-16-SigLIP").std
    assert design_named("ViT-B-32").mean[0] == pytest.approx(0.48145466)
