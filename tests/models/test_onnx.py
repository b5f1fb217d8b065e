"""ONNX towers: onnxruntime gives torch's embeddings, whatever the towers are made of and however many rows it gets."""

import json
import re

import numpy as np
import pytest
import torch

from fullbatch.config.model import Model
from fullbatch.models import onnx_towers
from fullbatch.models.build import build_model
from fullbatch.models.onnx_towers import quantize_text
from fullbatch.models.saved import export
from tests.models.conftest import CAPTIONS, some_images
from tests.models.siglip import write_siglip
from tests.tiers import first

onnxruntime = pytest.importorskip("onnxruntime")
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 8}
TRUNK = {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear", "image_size": 160}
KINDS = [
    "vit", "custom_text", "quick_gelu", "attention_pool", "resnet", "timm_trunk", "siglip", "pair", "pair_convolutions",
    "pair_t5", "lora", "lora_pair",
]  # fmt: skip


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def embedded(path, rows):
    opened = session(path)
    return torch.from_numpy(opened.run(None, {opened.get_inputs()[0].name: rows.numpy()})[0])


def stirred(model):
    """As after training: adapters that change something, statistics of batches that are not 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if ".lora_" in name or "running_mean" in name:
                values.copy_(0.2 * torch.randn(values.shape, generator=generator))
            elif "running_var" in name:
                values.copy_(0.5 + torch.rand(values.shape, generator=generator))
    return model.eval()


def t5_folder(place):
    from transformers import T5Config

    config = T5Config(vocab_size=13, d_model=24, d_ff=48, num_layers=2, num_heads=2, d_kv=12, pad_token_id=0)
    config.save_pretrained(place / "t5")
    return str(place / "t5")


@pytest.fixture
def make(write_config, request, tmp_path):
    def make(kind):
        text_folder = request.getfixturevalue("text_folder") if "pair" in kind else ""
        pair = {"text_tower": text_folder, "embed_dim": 20, "context_length": 16}
        match kind:
            case "vit":
                named = Model(write_config({"layers": 1}, {"layers": 1}), checkpoint_activations=True)
            case "custom_text":
                named = Model(write_config(custom_text=True))
            case "quick_gelu":
                named = Model(write_config(quick_gelu=True))
            case "attention_pool":
                named = Model(write_config({"attentional_pool": True, "attn_pooler_heads": 2}))
            case "timm_trunk":
                named = Model(write_config(TRUNK))
            case "pair_t5":
                named = Model(
                    image_tower="test_vit", **{**pair, "text_tower": t5_folder(tmp_path)}, tokenizer=text_folder
                )
            case "resnet":
                named = Model(write_config(RESNET))
            case "siglip":
                config, tokenizer = write_siglip(tmp_path / "siglip")
                named = Model(config, tokenizer=tokenizer)
            case "pair":
                named = Model(image_tower="test_vit", **pair)
            case "pair_convolutions":
                named = Model(image_tower="test_resnet", text_pooling="mean", **pair)
            case "lora":
                named = Model(write_config(), lora_rank=3)
            case "lora_pair":
                named = Model(image_tower="test_vit", lora_rank=3, **pair)
        torch.manual_seed(7)
        return stirred(build_model(named))

    return make


def check_notes(model, folder):
    """What a program must know of the files, it can read in them."""
    from tokenizers import Tokenizer

    about = json.loads((folder / "preprocess.json").read_text())
    image, text = about["image"], about["text"]
    assert (image["size"], image["type"], image["resize"]) == (model.image_size, "uint8", "shortest side to size")
    assert image["mean"] == pytest.approx(model.design.mean) and image["std"] == pytest.approx(model.design.std)
    assert about["temperature"] == 0.05 and about["width"] == model.width
    noted = session(folder / "image.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(noted["size"]) == model.image_size and json.loads(noted["mean"]) == image["mean"]
    assert noted["interpolation"] == "bicubic" and noted["crop"] == "center"
    opened = session(folder / "text.onnx")
    noted = opened.get_modelmeta().custom_metadata_map
    assert json.loads(noted["context_length"]) == model.context_length and noted["tokenizer"] == text["tokenizer"]
    assert opened.get_inputs()[0].shape == ["batch", model.context_length]
    assert "/" not in about["model"] + text["tokenizer"], "where it was made is nobody else's business"
    for file in folder.glob("*.onnx"):
        assert not re.search(rb"site-packages|\.py\b", file.read_bytes()), "no path of this machine goes along"

    captions = [*CAPTIONS, "It\u2019s a_CAT &amp; two  dogs!", "\uff21 o\ufb03ce"]
    rows = Tokenizer.from_file(str(folder / text["tokenizer_file"])).encode_batch(captions)
    assert [row.ids for row in rows] == model.tokenize(captions).tolist()


@pytest.mark.parametrize("kind", first(["vit"], KINDS))
def test_onnxruntime_gives_the_same_unit_embeddings(make, kind, tmp_path):
    model = make(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folder = export(model, tmp_path / "onnx", "onnx", temperature=0.05, bias=-3.0)
    for rows in (1, 2, 7):
        images, tokens = some_images(model.image_size, rows), model.tokenize((CAPTIONS * 2)[:rows])
        with torch.no_grad():
            wanted = model.encode_image(images), model.encode_text(tokens)
        got = embedded(folder / "image.onnx", images), embedded(folder / "text.onnx", tokens)
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.shape == (rows, model.width) and mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
            torch.testing.assert_close(mine.norm(dim=1), torch.ones(rows), atol=1e-5, rtol=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name}: the model itself stays as it was"
    check_notes(model, folder)
    if "lora" in kind:
        import onnx

        initializers = onnx.load(folder / "text.onnx").graph.initializer
        assert not [weight.name for weight in initializers if "lora" in weight.name]


@pytest.mark.slow
def test_an_encoder_of_two_views_has_its_features_too(tmp_path):
    model = stirred(build_model(Model(view_tower="resnet10t", projection=(32, 16))))
    folder = export(model, tmp_path / "onnx", "onnx", temperature=0.1, bias=None)
    assert not (folder / "text.onnx").exists() and "text" not in json.loads((folder / "preprocess.json").read_text())
    images = some_images(model.image_size, 3)
    embeddings, features = session(folder / "image.onnx").run(None, {"pixels": images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(embeddings, model.encode_image(images), atol=1e-4)
        np.testing.assert_allclose(features, model.features(images), atol=1e-3)
    with pytest.raises(ValueError, match="no text tower for --quantize"):
        quantize_text(model, folder)


@pytest.mark.slow
def test_large_weights_lie_beside_their_file(make, tmp_path, monkeypatch):
    model = make("vit")
    monkeypatch.setattr(onnx_towers, "_MOST_BYTES", 1_000_000)
    folder = export(model, tmp_path / "onnx", "onnx", temperature=0.05, bias=None)
    quantize_text(model, folder)
    names = {path.name for path in folder.glob("*.onnx*")}
    assert {"image.onnx", "text.onnx", "text.onnx.data", "text.int8.onnx"} <= names and "image.onnx.data" not in names
    elsewhere = folder.rename(tmp_path / "elsewhere")
    with torch.no_grad():
        wanted = model.encode_text(model.tokenize(CAPTIONS))
    torch.testing.assert_close(embedded(elsewhere / "text.onnx", model.tokenize(CAPTIONS)), wanted, atol=1e-4, rtol=0)
    assert (embedded(elsewhere / "text.int8.onnx", model.tokenize(CAPTIONS)) * wanted).sum(1).min() > 0.98
    export(model, elsewhere, "safetensors", temperature=0.05, bias=None, overwrite=True)
    assert not [*elsewhere.glob("*.onnx*")]


def test_towers_that_differ_are_refused_and_change_nothing(make, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_towers, "TOLERANCE", 1e-12)
    (tmp_path / "onnx").mkdir()
    for name in ("image.onnx", "preprocess.json", "fullbatch.safetensors"):
        (tmp_path / "onnx" / name).write_text("old")
    with pytest.raises(
        ValueError, match=r"image.onnx: onnxruntime's embeddings differ from torch's by up to \d.\de-0\d"
    ):
        export(make("vit"), tmp_path / "onnx", "onnx", temperature=0.05, bias=None, overwrite=True)
    assert {path.read_text() for path in (tmp_path / "onnx").iterdir()} == {"old"}
    assert len([*(tmp_path / "onnx").iterdir()]) == 3 and not [*tmp_path.glob(".onnx*")]


@pytest.mark.slow
def test_what_torch_cannot_record_is_one_sentence(make, tmp_path, monkeypatch):
    """A tower that decides by its numbers, which a graph cannot."""
    model = make("vit")
    backbone = type(model.backbone)
    encode = backbone.encode_image

    def encode_image(self, images):
        return encode(self, images) if images.mean() > 0.0 else -encode(self, images)

    monkeypatch.setattr(backbone, "encode_image", encode_image)
    with pytest.raises(ValueError, match=r"^image.onnx cannot be made of 'small.json' \(.*\); export it with --format"):
        export(model, tmp_path / "onnx", "onnx", temperature=0.05, bias=None)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_the_extra_is_named_where_it_is_missing(make, tmp_path, monkeypatch, package):
    from importlib import util

    there = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *more: None if name == package else there(name, *more))
    with pytest.raises(ValueError, match=rf"An export to ONNX needs the package {package};.*'fullbatch\[onnx\]'"):
        export(make("vit"), tmp_path / "onnx", "onnx", temperature=0.05, bias=None)


def test_only_a_folder_holds_them_and_another_export_gives_way(make, tmp_path):
    model = make("vit")
    with pytest.raises(ValueError, match="must be a folder"):
        export(model, tmp_path / "model.onnx", "onnx", temperature=0.05, bias=None)
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("image.onnx", "text.onnx", "text.onnx.data", "text.int8.onnx", "preprocess.json", "notes.txt"):
        (folder / name).write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        export(model, folder, "onnx", temperature=0.05, bias=None)
    export(model, folder, "safetensors", temperature=0.05, bias=None, overwrite=True)
    assert not [*folder.glob("*.onnx*"), *folder.glob("preprocess.json")] and (folder / "notes.txt").is_file()
