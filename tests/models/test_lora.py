"""LoRA: adapters alone learn, a run goes on with them, and what leaves the run is an ordinary model."""

import dataclasses

import pytest
import torch

from fullbatch.config.model import Model
from fullbatch.loading import load_trained
from fullbatch.models.adapters import LinearAttention, plain_state
from fullbatch.models.build import build_model
from fullbatch.models.saved import export
from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.models.conftest import some_images
from tests.models.siglip import write_siglip
from tests.training.small import differences, saved_state, small_config

WORDS = ["a photo of a cat", "two dogs running fast", "the cat", ""]
HEADS = {"attn.packed_qkv", "attn.out_proj", "mlp.c_fc", "mlp.c_proj"}  # of a layer of open_clip
TIMM = {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
BERT = {"attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"}


def learning(module):
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


def adapted(module, layers):
    """The names of maps with adapters in each member of a list of layers."""
    names = [name.split(".lora_A.")[0] for name in learning(module) if ".lora_A." in name]
    return [{name.removeprefix(f"{layer}.") for name in names if name.startswith(f"{layer}.")} for layer in layers]


def stirred(model):
    """As after training: adapters that change something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def embeddings(model):
    model.eval()
    with torch.no_grad():
        return model(some_images(model.image_size), model.tokenize(WORDS))


def assert_same(one, other, atol=1e-6):
    for mine, theirs in zip(embeddings(one), embeddings(other), strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)


@pytest.fixture(params=["open_clip", "custom_text", "quick_gelu", "siglip", "pair"])
def towers(request, write_config, text_folder, tmp_path):
    match request.param:
        case "open_clip":
            return Model(write_config())
        case "custom_text":
            return Model(write_config(custom_text=True))
        case "quick_gelu":
            return Model(write_config(quick_gelu=True))
        case "siglip":
            config, tokenizer = write_siglip(tmp_path / "siglip")
            return Model(config, tokenizer=tokenizer)
        case "pair":
            return Model(image_tower="test_vit", text_tower=text_folder, embed_dim=20, context_length=16)


def both(towers, **lora):
    """The same model without and with adapters."""
    models = []
    for config in (towers, dataclasses.replace(towers, **{"lora_rank": 3, **lora})):
        torch.manual_seed(7)
        models.append(build_model(config))
    return models


def test_fresh_adapters_change_nothing_and_merged_ones_give_the_same_model(towers, tmp_path):
    plain, lora = both(towers)
    assert_same(plain, lora)
    stirred(lora)
    before = embeddings(plain)
    assert all((mine - theirs).abs().max() > 0.01 for mine, theirs in zip(before, embeddings(lora), strict=True))
    plain.backbone.load_state_dict(lora.plain_weights())
    assert_same(plain, lora, atol=2e-6)
    written = export(lora, tmp_path / "out", "safetensors", temperature=0.05, bias=None)
    exported = build_model(Model(pretrained=str(written)))
    assert not any("lora" in name for name in exported.state_dict())
    assert_same(exported, lora, atol=2e-6)


def test_adapters_alone_learn_and_all_of_them_do(towers):
    _, lora = both(towers)
    frozen = {name: weight.clone() for name, weight in lora.named_parameters() if not weight.requires_grad}
    optimizer = torch.optim.SGD([weight for weight in lora.parameters() if weight.requires_grad], lr=0.1)
    for _ in range(2):  # in the first step the maps down have no gradient, for those up are 0
        optimizer.zero_grad()
        image_BD, text_BD = lora.train()(some_images(lora.image_size), lora.tokenize(WORDS))
        (image_BD @ text_BD.T).logsumexp(1).sum().backward()
        optimizer.step()
    own = {"backbone.visual_projection.weight", "backbone.text_projection.weight"}  # new with a pair
    for name in learning(lora):
        assert ".lora_" in name or name in own
        assert lora.get_parameter(name).grad.abs().max() > 0.0, name
    for name, weight in frozen.items():
        assert torch.equal(weight, lora.get_parameter(name)), name


def test_every_map_of_every_layer_has_one(write_config, text_folder, tmp_path):
    visual, text = "backbone.visual.transformer.resblocks", "backbone.transformer.resblocks"
    model = build_model(Model(write_config(), lora_rank=2))
    assert adapted(model, [f"{visual}.0", f"{visual}.1", f"{text}.0", f"{text}.1"]) == [HEADS] * 4
    model = build_model(Model(image_tower="test_vit", text_tower=text_folder, context_length=16, lora_rank=2))
    found = adapted(model, [f"backbone.visual.blocks.{layer}" for layer in range(len(model.backbone.visual.blocks))])
    assert found == [TIMM] * len(found) and len(found) > 1
    assert adapted(model, [f"backbone.text.transformer.layer.{layer}" for layer in range(3)]) == [BERT] * 3
    config, tokenizer = write_siglip(tmp_path)
    model = build_model(Model(config, tokenizer=tokenizer, lora_rank=2))
    assert adapted(model, ["backbone.visual.trunk.blocks.0", "backbone.text.transformer.resblocks.1"]) == [TIMM, HEADS]
    assert len(learning(model)) == 2 * 4 * (len(model.backbone.visual.trunk.blocks) + 2)


@pytest.mark.parametrize("tower", ["image", "text"])
def test_one_tower_has_adapters_the_other_learns_whole_or_is_locked(write_config, tower):
    other, lock = ("transformer", "lock_text") if tower == "image" else ("visual", "lock_image")
    model = build_model(Model(write_config(), lora_rank=2, lora_towers=tower))
    assert not any(".lora_" in name for name in learning(getattr(model.backbone, other)))
    assert learning(getattr(model.backbone, other)) == {n for n, _ in getattr(model.backbone, other).named_parameters()}
    locked = build_model(Model(write_config(), lora_rank=2, lora_towers=tower, **{lock: True}))
    assert learning(locked) == {name for name in learning(model) if ".lora_" in name}


def test_alpha_and_dropout(write_config):
    plain, lora = both(Model(write_config()), lora_alpha=1.5)
    stirred(lora)
    plain.backbone.load_state_dict(lora.plain_weights())
    assert_same(plain, lora)
    assert lora.adapter_scale == 0.5 and both(Model(write_config()))[1].adapter_scale == 2.0
    dropping = stirred(both(Model(write_config()), lora_dropout=0.5)[1])
    tokens = dropping.tokenize(WORDS)
    assert not torch.equal(dropping.train().encode_text(tokens), dropping.encode_text(tokens))
    assert torch.equal(dropping.eval().encode_text(tokens), dropping.encode_text(tokens))


def test_checkpointed_activations_and_bfloat16(write_config):
    gradients = []
    for recompute in (False, True):
        model = stirred(both(Model(write_config(), checkpoint_activations=recompute))[1])
        image_BD, text_BD = model(some_images(32), model.tokenize(WORDS))
        (image_BD * text_BD).sum().backward()
        gradients.append([model.get_parameter(name).grad for name in sorted(learning(model))])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    with torch.autocast("cpu", torch.bfloat16):
        image_BD, text_BD = model(some_images(32), model.tokenize(WORDS))
    assert image_BD.dtype == text_BD.dtype == torch.float32
    torch.testing.assert_close(text_BD, model.encode_text(model.tokenize(WORDS)), atol=0.05, rtol=0)


def test_statistics_of_a_tower_with_adapters_stay(text_folder):
    model = build_model(
        Model(image_tower="test_resnet", text_tower=text_folder, context_length=8, lora_rank=2, lora_towers="text")
    )
    assert any(isinstance(m, torch.nn.BatchNorm2d) and m.training for m in model.modules())
    with pytest.raises(ValueError, match=r"image tower of the model 'test_resnet.*--lora-towers text"):
        build_model(Model(image_tower="test_resnet", text_tower=text_folder, context_length=8, lora_rank=2))


def test_mistakes(write_config, monkeypatch):
    for fields, message in (
        ({"lora_rank": 0}, "lora_rank must be a whole number of at least 1"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha must be a positive number"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "lora_dropout must lie in"),
        ({"lora_rank": 4, "lora_towers": "vision"}, "lora_towers must be one of 'both', 'image', 'text'"),
        ({"lora_alpha": 4.0}, "lora_alpha must be left out without lora_rank"),
        ({"lora_towers": "text"}, "lora_towers must be left out without lora_rank"),
        ({"lora_rank": 4, "lock_text": True}, r"lock_text must be False where the text tower .*lora_towers: image"),
        ({"lora_rank": 4, "lora_towers": "image", "lock_image": True}, "lock_image must be False"),
    ):
        with pytest.raises(ValueError, match=message):
            Model(**fields)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--lora-rank 4 needs the package peft.*pip install 'fullbatch\[lora\]'"):
        build_model(Model(write_config(), lora_rank=4))


# ---------------------------------------------------------------------------------------------------------------------
# runs


def lora_run(folder, **training):
    config = small_config(folder, "openclip", steps=12, **training)
    optimizer = dataclasses.replace(config.optimizer, lr=0.01)
    run = dataclasses.replace(config.run, save_every=6)
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, lora_rank=2), optimizer=optimizer, run=run
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = lora_run(tmp_path_factory.mktemp("lora"), ema=0.5)
    return config, train(config).folder


def test_a_run_is_exported_as_an_ordinary_model(finished, tmp_path):
    config, run = finished
    for average in (True, False):
        loaded = load_trained(run, average).model
        assert not any("lora" in name for name in loaded.state_dict())
        exported = build_model(
            Model(pretrained=str(load_trained(run, average).export(tmp_path / str(average), "open_clip")))
        )
        assert_same(loaded, exported)
        live = build_model(config.model)
        state = saved_state(run, 12)
        live.load_state_dict(state["model"])
        if average:
            live.load_state_dict(state["average"], strict=False)
        assert_same(loaded, live, atol=2e-6)


def test_only_adapters_moved(finished):
    _, run = finished
    early, late = (saved_state(run, step)["model"] for step in (6, 12))
    moved = {name for name in early if not torch.equal(early[name], late[name])}
    assert moved and all(".lora_" in name for name in moved)
    assert len(moved) == sum(".lora_" in name for name in early)
    assert saved_state(run, 12)["average"].keys() == moved


def test_plain_state_of_a_plain_model_is_its_own():
    state = {"a.weight": torch.ones(2), "attn.in_proj_weight": torch.ones(3)}
    assert plain_state(state, 2.0) == state


def test_a_resumed_run_ends_where_a_whole_one_does(tmp_path):
    config = lora_run(tmp_path)
    whole = train(config).folder
    parted = dataclasses.replace(config, run=dataclasses.replace(config.run, name="parted"))
    folder = train(parted).folder
    last = checkpoint.folder_of(folder / "checkpoints", 12)
    (last / "model.pt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"--resume cannot change --lora-rank \(it was 2, now None\)"):
        train(dataclasses.replace(parted, model=parted.model.without_lora()), resume=folder)
    train(parted, resume=folder)
    assert not differences(saved_state(whole, 12), saved_state(folder, 12))


def on_rank(rank, config):
    return train(config).results


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_reproduce_one(tmp_path, two_ranks, parallel):
    if parallel == "fsdp" and torch.__version__.startswith("2.6."):
        pytest.skip("FSDP2 of torch 2.6 needs a GPU")
    config = lora_run(tmp_path, parallel=parallel)
    one = train(config).folder
    two = dataclasses.replace(config, run=dataclasses.replace(config.run, name="two"))
    two_ranks.run(on_rank, two)
    assert_same(load_trained(one).model, load_trained(tmp_path / "two").model, atol=1e-4)


def test_masks_of_samples_and_heads():
    """As nn.MultiheadAttention takes them: (L, L), or (samples * heads, L, L)."""
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    ours, states_BLW = LinearAttention(theirs), torch.randn(3, 5, 8)
    causal_LL = torch.full((5, 5), float("-inf")).triu(1)
    for mask in (None, causal_LL, causal_LL + torch.randn(6, 5, 5)):
        given = (states_BLW, states_BLW, states_BLW)
        expected, _ = theirs(*given, need_weights=False, attn_mask=mask)
        torch.testing.assert_close(ours(*given, need_weights=False, attn_mask=mask)[0], expected)
