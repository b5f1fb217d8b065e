"""`fullbatch export`: the card beside the weights, int8 towers, and pushing, with a stand-in for the hub."""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

from fullbatch.cli import main
from fullbatch.config.model import Model
from fullbatch.loading import load_trained
from fullbatch.models import hub
from fullbatch.models.build import build_model
from fullbatch.models.onnx_towers import CAPTIONS, Session
from fullbatch.models.saved import export
from tests.cli.making import answer


class Hub:
    """Notes what it is asked; ``fails`` is raised in its place."""

    asked = None
    fails = None

    def create_repo(self, repository, *, private, exist_ok):
        Hub.asked.append(("create", repository, private, exist_ok))
        return f"https://hub/{repository}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if Hub.fails is not None:
            raise Hub.fails
        Hub.asked.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))


@pytest.fixture
def pushed(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [])
    return Hub


def test_a_folder_has_a_card_and_a_file_has_none(run_folder, tmp_path, capsys):
    assert answer(capsys, "export", str(run_folder), str(tmp_path / "folder"), "--format", "safetensors")[0] == 0
    assert "# license: choose one" in (tmp_path / "folder" / "README.md").read_text()
    model = str(tmp_path / "model.safetensors")
    assert answer(capsys, "export", str(run_folder), model, "--format", "safetensors")[0] == 0
    assert not (tmp_path / "README.md").exists()
    assert answer(capsys, "export", model, str(tmp_path / "again"), "--format", "open_clip", "--license", "mit")[0] == 0
    assert "exported from weights without their run" in (tmp_path / "again" / "README.md").read_text()


def test_a_card_of_the_user_stays(run_folder, tmp_path, capsys):
    command = ["export", str(run_folder), str(tmp_path / "folder"), "--overwrite"]
    assert answer(capsys, *command)[0] == 0
    assert answer(capsys, *command, "--license", "mit")[0] == 0
    card = tmp_path / "folder" / "README.md"
    assert "license: mit" in card.read_text()
    card.write_text("mine")
    status, _, err = answer(capsys, *command, "--license", "mit")
    assert status == 0 and err == f"note: {card} is not of fullbatch and stays as it is\n"
    assert card.read_text() == "mine"


@pytest.fixture(scope="module")
def onnx(run_folder, tmp_path_factory):
    """A folder with both towers and a small one, and what was printed."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("onnx") / "onnx"
    with redirect_stdout(StringIO()) as printed:
        assert main(["export", str(run_folder), str(folder), "--format", "onnx", "--quantize"]) == 0
    return folder, printed.getvalue()


def test_towers_for_onnxruntime_and_a_small_one(onnx, capsys):
    folder, printed = onnx
    said, written = printed.splitlines()
    cosines = json.loads((folder / "preprocess.json").read_text())["text"]["int8"]
    assert written == str(folder) and f"cosine to the float tower {cosines['mean_cosine']:.4f}" in said
    status, _, err = answer(capsys, "evaluate", str(folder), "--tasks", "retrieval:emoji")
    assert status == 1 and "is an export to ONNX, whose weights can only be run" in err


def test_a_small_text_tower_is_near_the_float_one(onnx, run_folder):
    folder, _ = onnx
    model = load_trained(run_folder).model
    tokens = model.tokenize(CAPTIONS)
    small = torch.from_numpy(Session(folder / "text.int8.onnx")(tokens.numpy())[0])
    with torch.no_grad():
        cosines = (small * model.encode_text(tokens)).sum(1)
    noted = json.loads((folder / "preprocess.json").read_text())["text"]["int8"]
    assert noted["mean_cosine"] == pytest.approx(cosines.mean().item(), abs=1e-4)
    assert noted["lowest_cosine"] == pytest.approx(cosines.min().item(), abs=1e-4)
    assert noted["lowest_cosine"] > 0.98
    assert (folder / "text.int8.onnx").stat().st_size < 0.3 * (folder / "text.onnx").stat().st_size
    assert noted["captions"] == len(CAPTIONS) == len(set(CAPTIONS))


def test_a_folder_is_pushed(run_folder, tmp_path, capsys, pushed):
    folder = tmp_path / "hf"
    command = ["export", str(run_folder), str(folder), "--format", "huggingface", "--license", "mit"]
    status, out, err = answer(capsys, *command, "--push", "me/my_model")
    assert status == 0, err
    assert out.splitlines() == [str(folder), "https://hub/me/my_model"]
    assert pushed.asked[0] == ("create", "me/my_model", True, True)
    assert {"README.md", "config.json", "open_clip_config.json", "tokenizer.json"} <= set(pushed.asked[1][2])
    card = (folder / "README.md").read_text()
    assert 'CLIPModel.from_pretrained("me/my_model")' in card and '"hf-hub:me/my_model"' in card
    assert 'fb.load(snapshot_download("me/my_model"))' in card and "FOLDER" not in card


def test_a_tokenizer_of_its_own_is_found_on_the_hub(tmp_path, pushed):
    text = {"hf_tokenizer_name": "tokenizer"}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"text_cfg": text}}))
    (tmp_path / "tokenizer.json").write_text("{}")
    hub.push_folder(tmp_path, "me/model")
    config = json.loads((tmp_path / "open_clip_config.json").read_text())
    assert config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] == "me/model"


def test_what_cannot_be_pushed_is_still_exported(run_folder, tmp_path, capsys, pushed, monkeypatch):
    monkeypatch.setattr(Hub, "fails", OSError("401 Client Error. Request id: 1"))
    folder = tmp_path / "out"
    status, out, err = answer(capsys, "export", str(run_folder), str(folder), "--push", "me/model")
    assert status == 1 and out == f"{folder}\n" and (folder / "README.md").is_file()
    assert f"{folder} is written, but could not be pushed to 'me/model' (401 Client Error)" in err
    assert f"`hf upload me/model {folder}`" in err and err.count("\n") == 1


WORDS = {
    "--quantize": "--quantize belongs to --format onnx, and the format is open_clip.",
    "--license MIT": "--license 'MIT' must be written as hubs do: mit, apache-2.0, cc-by-4.0, other.",
    "--push model": "--push 'model' must name the owner too, as OWNER/NAME.",
    "--push me/my/model": "--push 'me/my/model' is no name of a repository",
    "--push me/..": "--push 'me/..' is no name of a repository",
}


@pytest.mark.parametrize("typed", WORDS)
def test_mistakes_before_the_work(typed, run_folder, tmp_path, capsys, pushed):
    status, out, err = answer(capsys, "export", str(run_folder), str(tmp_path / "out"), *typed.split())
    assert (status, out) == (1, "") and WORDS[typed] in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists() and not pushed.asked


def test_no_text_tower_to_quantize_is_said_before_the_work(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    model = build_model(Model(view_tower="test_vit", projection=(8,)))
    views = export(model, tmp_path / "views.safetensors", "safetensors", temperature=0.1, bias=None)
    status, out, err = answer(capsys, "export", str(views), str(tmp_path / "out"), "--format", "onnx", "--quantize")
    assert (status, out) == (1, "") and "has no text tower for --quantize to make smaller; leave it out." in err
    assert [*tmp_path.iterdir()] == [views]


def test_only_what_was_exported_is_pushed(run_folder, tmp_path, capsys, pushed):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "diary.txt").write_text("secret")
    status, _, err = answer(capsys, "export", str(run_folder), str(mine), "--overwrite", "--push", "me/model")
    assert status == 1 and f"--push publishes all that a folder holds, and {mine} is not empty; name another." in err
    status, _, err = answer(capsys, "export", str(run_folder), str(tmp_path / "a.pt"), "--push", "me/model")
    assert status == 1 and "is a file; name a folder" in err
    assert not pushed.asked


def test_a_checkpoint_has_the_numbers_of_its_step(run_folder, tmp_path, capsys):
    copy = shutil.copytree(run_folder, tmp_path / "run")
    result = {"task": "imagenet:val", "main": "accuracy", "accuracy": 0.5, "chance": 0.001, "size": 1000}
    (copy / "evaluation-step-000000004.json").write_text(json.dumps({"step": 4, "results": [result]}))
    assert answer(capsys, "export", str(copy / "checkpoints" / "step-000000004"), str(tmp_path / "out"))[0] == 0
    assert "| `imagenet:val` | accuracy | 50.0% | 0.10% |" in (tmp_path / "out" / "README.md").read_text()
