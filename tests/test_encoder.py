"""A model in a few lines: the embeddings are those that evaluation measures, whatever a picture comes as."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import fullbatch as fb
from fullbatch.assembly import make_embedder
from fullbatch.config.data import Source
from fullbatch.config.run import RunConfig
from fullbatch.loading import load_trained
from tests.training.small import small_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return fb.train(small_config(folder, steps=4)).folder


@pytest.fixture(scope="module")
def model(run):
    return fb.load(run, device="cpu", batch_size=4)


def picture(seed, size=(40, 30)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image, path):
    image.save(path)
    return path


def test_the_embeddings_are_those_that_evaluation_measures(run, model, tmp_path):
    files = [png(picture(seed), tmp_path / f"{seed}.png") for seed in range(6)]
    lines = ["filepath\ttitle", *(f"{file.name}\tcaption {place}" for place, file in enumerate(files))]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    towers = load_trained(run).model
    embedder = make_embedder(RunConfig.of(workers=0), towers, towers, torch.device("cpu"))
    rows = embedder.images(Source(str(tmp_path / "pairs.tsv")))
    torch.testing.assert_close(model.encode_image(files), rows.image_ND, rtol=1e-5, atol=1e-6)
    captions = [f"caption {place}" for place in range(6)]
    torch.testing.assert_close(model.encode_text(captions), embedder.captions(captions), rtol=1e-5, atol=1e-6)


def test_a_picture_may_come_in_any_form(model, tmp_path):
    image = picture(1)
    path, array = png(image, tmp_path / "a.png"), np.asarray(image)
    forms = [path, str(path), image, array, torch.from_numpy(array.copy()).permute(2, 0, 1)]
    rows = model.encode_image(forms)
    assert rows.shape == (5, model.width) and rows.dtype == torch.float32
    torch.testing.assert_close(rows, rows[:1].expand(5, -1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.encode_image(path), rows[0], rtol=1e-5, atol=1e-6)
    grey = np.asarray(image.convert("L"))
    torch.testing.assert_close(model.encode_image(grey), model.encode_image(image.convert("L")), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(5))


def test_one_and_none(model):
    assert model.encode_text("a cat").shape == (model.width,)
    assert model.encode_text([]).shape == (0, model.width) == model.encode_image([]).shape
    image, text = model.encode_image([picture(1), picture(2)]), model.encode_text(["a", "b", "c"])
    assert model.similarity(image, text).shape == (2, 3) and model.similarity(image, text[0]).shape == (2,)
    assert 0 < model.temperature < 1 and model.bias is None


def test_many_go_in_batches_and_stay_in_order(model, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    pictures = [picture(seed) for seed in range(23)]
    together = model.encode_image(pictures, progress=True)
    told = capsys.readouterr()
    assert "pictures" in told.err and told.out == ""
    one_by_one = torch.stack([model.encode_image(each) for each in pictures])
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)


def test_an_export_and_its_run_are_one_model(run, model, tmp_path):
    load_trained(run).export(tmp_path / "model.safetensors")
    other = fb.load(tmp_path / "model.safetensors", device="cpu")
    torch.testing.assert_close(other.encode_text("a cat"), model.encode_text("a cat"), rtol=1e-5, atol=1e-6)
    assert other.temperature == pytest.approx(model.temperature)


def cut_png():
    raw = io.BytesIO()
    picture(1).save(raw, "png")
    return raw.getvalue()[:200]


def test_what_is_no_picture_is_named(model, tmp_path):
    (tmp_path / "note.txt").write_text("hello, this is no picture")
    (tmp_path / "cut.png").write_bytes(cut_png())
    cases = {
        "missing.png: cannot read .*No such file": tmp_path / "missing.png",
        "note.txt.*not a JPEG": tmp_path / "note.txt",
        "cut.png.*cannot be decoded": tmp_path / "cut.png",
        r"picture 0 has float64 of shape \(4, 4, 3\); give a uint8 array": np.zeros((4, 4, 3)),
        r"picture 0 has torch.uint8 of shape \(4, 4, 3\); give a uint8 tensor": torch.zeros(4, 4, 3, dtype=torch.uint8),
    }
    for message, given in cases.items():
        with pytest.raises(ValueError, match=message):
            model.encode_image(given)
    with pytest.raises(TypeError, match="picture 1 is a int; encode_image takes paths"):
        model.encode_image([picture(1), 5])
    with pytest.raises(TypeError, match="encode_text takes strings, got int at place 1"):
        model.encode_text(["a", 5])


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="'ViT-B-32' has no weights"):
        fb.load("ViT-B-32")
    with pytest.raises(ValueError, match="no run folder, checkpoint or exported model at 'runs/none'"):
        fb.load("runs/none")


def test_an_apple_gpu_that_is_not_there_is_refused(run, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no Apple GPU here, so device mps cannot be used; take cpu"):
        fb.load(run, device="mps")


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_has_a_size(run, size):
    with pytest.raises(ValueError, match=f"batch_size must be a whole number of at least 1, got {size}"):
        fb.load(run, batch_size=size)
