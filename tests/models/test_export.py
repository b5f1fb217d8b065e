"""Exports: transformers' CLIPModel gives the same embeddings; what cannot be exported says why."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open

from fullbatch.config.model import Model
from fullbatch.models import saved
from fullbatch.models.build import build_model
from fullbatch.models.saved import export
from tests.models.conftest import CAPTIONS, some_images


def features(output):
    rows = output if isinstance(output, torch.Tensor) else output.pooler_output  # transformers 4 and 5
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.mark.parametrize("quick_gelu", [False, True])
@pytest.mark.parametrize("custom_text", [False, True])
def test_clip_model_has_the_same_embeddings(write_config, tmp_path, quick_gelu, custom_text):
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    model = build_model(Model(write_config(quick_gelu=quick_gelu, custom_text=custom_text))).eval()
    folder = export(model, tmp_path / "hf", "huggingface", temperature=0.04, bias=None)
    theirs = CLIPModel.from_pretrained(folder).eval()
    assert theirs.logit_scale.exp().item() == pytest.approx(25.0)

    images = some_images(32)
    processor = AutoImageProcessor.from_pretrained(folder)
    pixels = processor(images=[image.permute(1, 2, 0).numpy() for image in images], return_tensors="pt")
    tokens = AutoTokenizer.from_pretrained(folder)(
        CAPTIONS, padding="max_length", truncation=True, max_length=12, return_tensors="pt"
    )
    with torch.no_grad():
        image_BD, text_BD = model(images, model.tokenize(CAPTIONS))
        torch.testing.assert_close(features(theirs.get_image_features(**pixels)), image_BD, atol=1e-5, rtol=0)
        torch.testing.assert_close(features(theirs.get_text_features(**tokens)), text_BD, atol=1e-5, rtol=0)
        ids = theirs.get_text_features(input_ids=model.tokenize(CAPTIONS))
        torch.testing.assert_close(features(ids), text_BD, atol=1e-5, rtol=0)
        for files in ("open_clip", "transformers"):  # the folder has the files of both
            again = build_model(Model(pretrained=str(folder))).eval()
            for mine, wanted in zip(again(images, again.tokenize(CAPTIONS)), (image_BD, text_BD), strict=True):
                torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=0, msg=files)
            assert again.initial_temperature == pytest.approx(0.04)
            for file in folder.glob("open_clip_*"):
                file.unlink()


@pytest.mark.parametrize("custom_text", [False, True])
def test_open_clip_reads_a_hugging_face_folder(write_config, tmp_path, custom_text):
    import open_clip
    from PIL import Image

    model = build_model(Model(write_config(custom_text=custom_text))).eval()
    folder = export(model, tmp_path / "hf", "huggingface", temperature=0.04, bias=None)
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(CAPTIONS)
    assert torch.equal(tokens, model.tokenize(CAPTIONS))
    images = some_images(32)
    seen = torch.stack([preprocess(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])
    with torch.no_grad():
        image_BD, text_BD = model(images, tokens)
        torch.testing.assert_close(theirs.eval().encode_image(seen, normalize=True), image_BD, atol=1e-5, rtol=0)
        torch.testing.assert_close(theirs.encode_text(tokens, normalize=True), text_BD, atol=1e-5, rtol=0)
    assert theirs.logit_scale.exp().item() == pytest.approx(25.0)
    for file in folder.glob("*.json"):
        assert str(tmp_path) not in file.read_text(), "where it was written is nobody else's business"


def test_captions_are_cleaned_alike(tmp_path):
    """CLIP's tokenizer straightens quotes and the like before it looks at words; the exported one has to as well."""
    from transformers import AutoTokenizer, CLIPProcessor

    model = build_model(Model()).eval()
    folder = export(model, tmp_path / "hf", "huggingface", temperature=0.04, bias=None)
    captions = [
        "It\u2019s \u201cfine\u201d", "\u2018a\u2019 \u201eb\u201f", "o\ufb03ce", "\uff21\uff22\uff23\uff01 \u3000x",
        "salt &amp; pepper", "5 &lt; 6, &quot;so&quot; it&#39;s", "cafe\u0301", "  two   spaces ", "x\u2026y \u2014 z",
        "don't", "<b>x</b>", "\U0001f600",
    ]  # fmt: skip
    ours = model.tokenize(captions)
    for tokenizer in (AutoTokenizer.from_pretrained(folder), CLIPProcessor.from_pretrained(folder).tokenizer):
        length = {"max_length": model.tokenize.context_length, "truncation": True}
        theirs = tokenizer(captions, **length)["input_ids"]
        for caption, row, tokens in zip(captions, ours.tolist(), theirs, strict=True):
            assert row[: len(tokens)] == tokens and not any(row[len(tokens) :]), caption


def test_tiny_as_clip_model(tmp_path):
    from transformers import CLIPModel, CLIPProcessor

    model = build_model(Model()).eval()
    with pytest.warns(UserWarning, match="has no bias"):
        folder = export(model, tmp_path / "hf", "huggingface", temperature=0.04, bias=-2.0)
    theirs = CLIPModel.from_pretrained(folder).eval()
    CLIPProcessor.from_pretrained(folder)
    with torch.no_grad():
        text_BD = features(theirs.get_text_features(input_ids=model.tokenize(CAPTIONS)))
        torch.testing.assert_close(text_BD, model.encode_text(model.tokenize(CAPTIONS)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("vision", "text", "reason"),
    [
        ({"layers": [1, 1, 1, 1], "width": 8, "head_width": 8}, {}, "a ResNet"),
        ({"timm_model_name": "test_vit", "timm_proj": "linear", "image_size": 160}, {}, "timm model test_vit"),
        ({"pool_type": "avg"}, {}, "vision_cfg.pool_type"),
        ({}, {"no_causal_mask": True}, "text_cfg.no_causal_mask"),
    ],
)
def test_other_architectures_are_refused_with_the_reason(write_config, tmp_path, vision, text, reason):
    model = build_model(Model(write_config(vision, text)))
    with pytest.raises(ValueError, match=reason):
        export(model, tmp_path / "hf", "huggingface", temperature=0.07, bias=None)
    assert not (tmp_path / "hf").exists()


def test_pair_is_no_open_clip_model(tmp_path, text_folder):
    model = build_model(Model(image_tower="test_vit", text_tower=text_folder, context_length=8))
    for format in ("open_clip", "huggingface"):
        with pytest.raises(ValueError, match=r"timm and Hugging Face.*safetensors"):
            export(model, tmp_path / "out", format, temperature=0.07, bias=None)


def test_safetensors_carry_their_config(write_config, tmp_path):
    model = build_model(Model(write_config(), context_length=9))
    file = export(model, tmp_path / "model.safetensors", "safetensors", temperature=0.05, bias=None)
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["fullbatch"])
    assert header["kind"] == "open_clip" and header["temperature"] == 0.05
    again = build_model(Model(pretrained=str(file)))
    assert again.context_length == 9 and again.initial_temperature == pytest.approx(0.05)
    with torch.no_grad():
        tokens = model.tokenize(CAPTIONS)
        assert torch.equal(model.eval().encode_text(tokens), again.eval().encode_text(tokens))


def test_export_refuses_what_makes_no_sense(write_config, tmp_path):
    model = build_model(Model(write_config()))
    with pytest.raises(ValueError, match="positive temperature"):
        export(model, tmp_path / "a", "open_clip", temperature=0.0, bias=None)
    with pytest.raises(ValueError, match="must be a folder"):
        export(model, tmp_path / "a.safetensors", "open_clip", temperature=0.1, bias=None)
    with pytest.raises(ValueError, match="give a folder"):
        export(model, tmp_path / "a.pt", "open_clip", temperature=0.1, bias=None)


@pytest.mark.parametrize("format", ["open_clip", "huggingface", "safetensors"])
def test_what_is_there_already_is_not_overwritten(write_config, tmp_path, format):
    model = build_model(Model(write_config()))
    folder = tmp_path / "folder"
    folder.mkdir()
    export(model, folder, format, temperature=0.1, bias=None)  # an empty one is no loss
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=f"{folder} is not empty; name another file or folder, or give --overwrite"):
        export(model, folder, format, temperature=0.2, bias=None)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    export(model, folder, format, temperature=0.2, bias=None, overwrite=True)
    assert build_model(Model(pretrained=str(folder))).initial_temperature == pytest.approx(0.2)


def test_an_export_that_fails_takes_nothing_away(write_config, tmp_path, monkeypatch):
    model, folder = build_model(Model(write_config())), tmp_path / "folder"
    export(model, folder, "safetensors", temperature=0.1, bias=None)
    folder.chmod(0o700)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(saved, "_with_tokenizer", Mock(side_effect=OSError("the disk is full")))  # after the weights
        with pytest.raises(OSError, match="full"):
            export(model, folder, "open_clip", temperature=0.2, bias=None, overwrite=True)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.chdir(folder)
    export(model, Path("."), "open_clip", temperature=0.2, bias=None, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {"open_clip_config.json", "open_clip_model.safetensors"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "small.json"}


def test_a_file_is_not_overwritten_and_an_old_format_gives_way(write_config, tmp_path):
    model = build_model(Model(write_config()))
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    with pytest.raises(ValueError, match=f"{file} exists already"):
        export(model, file, "safetensors", temperature=0.1, bias=None)
    assert file.read_text() == "mine"
    export(model, file, "safetensors", temperature=0.1, bias=None, overwrite=True)
    (tmp_path / "notes.txt").write_text("mine")
    folder = export(model, tmp_path / "folder", "safetensors", temperature=0.1, bias=None)
    (folder / "notes.txt").write_text("mine")
    export(model, folder, "open_clip", temperature=0.2, bias=None, overwrite=True)
    assert build_model(Model(pretrained=str(folder))).initial_temperature == pytest.approx(0.2)
    assert (folder / "notes.txt").read_text() == "mine"
