"""A timm image tower beside a Hugging Face text tower."""

import dataclasses
import json
import shutil

import pytest
import torch

from fullbatch.config.model import Model
from fullbatch.models.build import build_model
from fullbatch.models.saved import export
from fullbatch.models.two_towers import batch_norm_names
from tests.models.conftest import CAPTIONS, some_images

WORDS = ["a photo of a cat", "two dogs running fast", "the cat", ""]


@pytest.fixture
def pair(text_folder):
    return Model(image_tower="test_vit", text_tower=text_folder, embed_dim=20, context_length=16)


def embeddings(model, size=160):
    model.eval()
    with torch.no_grad():
        return model(some_images(size), model.tokenize(WORDS))


def test_every_weight_learns(pair):
    model = build_model(pair)
    assert (model.width, model.image_size, model.context_length) == (20, 160, 16)
    image_BD, text_BD = model(some_images(160), model.tokenize(WORDS))
    (image_BD * text_BD).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    for rows in (image_BD, text_BD):
        assert rows.shape == (4, 20) and rows.dtype == torch.float32


def test_padding_changes_no_embedding(pair):
    model = build_model(pair).eval()
    tokens_BL = model.tokenize(WORDS)
    assert torch.equal(tokens_BL[3], torch.tensor([2, 3] + [0] * 14))
    with torch.no_grad():
        torch.testing.assert_close(model.encode_text(tokens_BL), model.encode_text(tokens_BL[:, :8]), atol=1e-6, rtol=0)


def test_first_token_is_pooled(pair):
    model = build_model(pair).eval()
    tokens_BL = model.tokenize(WORDS)
    with torch.no_grad():
        inner = model.backbone.text(input_ids=tokens_BL, attention_mask=(tokens_BL != 0).long()).last_hidden_state
        torch.testing.assert_close(model.backbone.encode_text(tokens_BL), model.backbone.text_projection(inner[:, 0]))


def test_text_weights_come_from_the_folder(pair):
    from transformers import AutoModel

    model = build_model(dataclasses.replace(pair, text_weights=True))
    theirs = AutoModel.from_pretrained(pair.text_tower).state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in model.backbone.text.state_dict().items())


def test_text_weights_of_16_bits_learn_in_32(pair, tmp_path):
    from transformers import AutoModel

    shutil.copytree(pair.text_tower, tmp_path / "half")
    AutoModel.from_pretrained(pair.text_tower).half().save_pretrained(tmp_path / "half")
    model = build_model(dataclasses.replace(pair, text_tower=str(tmp_path / "half"), text_weights=True))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_bert_and_mean_pooling_without_a_hub(tmp_path, text_folder):
    """A BERT folder has a pooler that would never learn; T5 is an encoder and a decoder, pooled by the mean."""
    from transformers import BertConfig, T5Config

    small_bert = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    small_t5 = T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    for config in (small_bert, small_t5):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        model = build_model(
            Model(image_tower="test_vit", text_tower=str(folder), tokenizer=text_folder, context_length=10)
        )
        model.encode_text(model.tokenize(WORDS)).sum().backward()
        text = [*model.backbone.text.parameters(), *model.backbone.text_projection.parameters()]
        assert all(p.grad is not None for p in text)


def test_tokens_follow_the_tokenizer_where_weights_are_random(text_folder):
    model = build_model(Model(image_tower="test_vit", text_tower=text_folder, tokenizer="ViT-B-32", context_length=16))
    assert model.backbone.text.config.vocab_size == 49408
    assert embeddings(model)[1].shape == (4, 256)
    assert model.tokenize(CAPTIONS).shape == (4, 16)


def test_batch_norm_is_named(text_folder):
    model = build_model(Model(image_tower="test_resnet", text_tower=text_folder, context_length=16))
    assert batch_norm_names(model) and "backbone.visual.bn1" in batch_norm_names(model)
    locked = build_model(Model(image_tower="test_resnet", text_tower=text_folder, context_length=16, lock_image=True))
    assert not batch_norm_names(locked)


def test_image_size_of_choice(pair):
    model = build_model(pair, image_size=64)
    assert model.image_size == 64
    assert embeddings(model, 64)[0].shape == (4, 20)


@pytest.mark.parametrize("place", ["model.safetensors", "folder"])
def test_safetensors_there_and_back(pair, tmp_path, place):
    model = build_model(pair)
    written = export(model, tmp_path / place, "safetensors", temperature=0.03, bias=-1.5)
    again = build_model(Model(pretrained=str(written)))
    for mine, theirs in zip(embeddings(model), embeddings(again), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    assert (again.initial_temperature, again.initial_bias) == (0.03, -1.5)
    assert again.context_length == 16


def test_checkpointed_activations_change_no_gradient(pair):
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model = build_model(dataclasses.replace(pair, checkpoint_activations=checkpoint))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        image_BD, text_BD = model(some_images(160), model.tokenize(WORDS))
        (image_BD * text_BD).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# ---------------------------------------------------------------------------------------------------------------------
# weights from a local file, and how they pool


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_image_weights_come_from_a_file(pair, tmp_path, ending):
    """As timm and torchvision write them: with the head of a classifier, which a tower does not have."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(7)
    theirs, path = timm.create_model("test_vit", num_classes=10).state_dict(), tmp_path / f"tower.{ending}"
    save_file(theirs, path) if ending == "safetensors" else torch.save({"state_dict": theirs}, path)
    model = build_model(dataclasses.replace(pair, image_weights=str(path)))
    ours = model.backbone.visual.state_dict()
    assert ours and all(torch.equal(value, theirs[key]) for key, value in ours.items())
    smaller = build_model(dataclasses.replace(pair, image_weights=str(path)), image_size=64)
    assert embeddings(smaller, 64)[0].shape == (4, 20), "positions are interpolated, as timm does"
    views = build_model(Model(view_tower="test_vit", image_weights=str(path)))
    assert all(torch.equal(value, theirs[key]) for key, value in views.backbone.visual.state_dict().items())


def test_a_file_that_does_not_fit_is_refused(pair, tmp_path):
    import timm

    state = timm.create_model("test_vit", num_classes=10).state_dict()
    state["stranger"] = state.pop("norm.weight")
    torch.save(state, tmp_path / "odd.pth")
    misfit = (
        r"odd.pth does not fit the model 'test_vit' in 2 of its weights \(norm.weight is missing, stranger is unknown"
    )
    with pytest.raises(ValueError, match=misfit):
        build_model(dataclasses.replace(pair, image_weights=str(tmp_path / "odd.pth")))
    with pytest.raises(ValueError, match=r"--image-weights .*gone.pth.* is not a file"):
        build_model(dataclasses.replace(pair, image_weights=str(tmp_path / "gone.pth")))


@pytest.mark.parametrize(
    ("said", "first"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, False),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, True),
        ({"pooling_mode": "mean"}, False),
    ],
)
def test_text_weights_pool_as_their_folder_says(pair, tmp_path, said, first):
    """sentence-transformers writes how: MiniLM is of the BERT family and means the mean."""
    folder = with_pooling(pair, tmp_path, said)
    model = build_model(dataclasses.replace(pair, text_tower=folder, text_weights=True)).eval()
    tokens_BL = model.tokenize(WORDS)
    real_BL = tokens_BL != 0
    with torch.no_grad():
        states = model.backbone.text(input_ids=tokens_BL, attention_mask=real_BL.long()).last_hidden_state
        mean = (states * real_BL[..., None]).sum(1) / real_BL.sum(1, keepdim=True)
        wanted = model.backbone.text_projection(states[:, 0] if first else mean)
        torch.testing.assert_close(model.backbone.encode_text(tokens_BL), wanted)
    export(model, tmp_path / "model", "safetensors", temperature=0.03, bias=None)
    again = build_model(Model(pretrained=str(tmp_path / "model"), tokenizer=folder))
    assert again.backbone.first_token == first, "it stays with the weights"


def test_pooling_may_be_said(pair, tmp_path):
    assert build_model(pair).backbone.first_token
    assert not build_model(dataclasses.replace(pair, text_pooling="mean")).backbone.first_token
    folder = with_pooling(pair, tmp_path, {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False})
    with pytest.raises(ValueError, match=r"1_Pooling/config.json pools by max_tokens.*--text-pooling first or mean"):
        build_model(dataclasses.replace(pair, text_tower=folder))
    assert build_model(dataclasses.replace(pair, text_tower=folder, text_pooling="first")).backbone.first_token


def with_pooling(pair, tmp_path, said):
    folder = tmp_path / "sentences"
    shutil.copytree(pair.text_tower, folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **said}))
    return str(folder)
