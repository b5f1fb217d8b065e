"""The card of an exported model: what a hub reads, what a reader sees, and that its code runs."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fullbatch.cli import main
from fullbatch.config.messages import local_name
from fullbatch.config.model import Model as ModelConfig
from fullbatch.encoder import load
from fullbatch.loading import Opened
from fullbatch.models.build import build_model
from fullbatch.report.model_card import TaskValue, check_license, model_card, origin_of, origin_of_tuned
from fullbatch.report.wording import NOTHING, TIMES
from tests.cli.making import MODEL, answer, small
from tests.data.making import captioned, picture, write_shard
from tests.models.conftest import text_folder  # noqa: F401

HOSTILE = "</td><script>alert(1)</script>[x](javascript:y) `|| **b** ![i](http://evil/i.png)\n# big"
RESULTS = [
    {"task": "retrieval:/srv/secret/held out.csv", "main": "mean_r1", "mean_r1": 0.25, "chance": 0.01, "size": 100},
    {"task": "imagenet:/srv/secret/val", "main": "accuracy", "accuracy": 0.125, "chance": 0.001, "size": 1000},
    {"task": f"zero_shot:{HOSTILE}", "main": "accuracy", "accuracy": 0.5, "chance": 0.5, "size": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps of training, and results of the last."""
    place = tmp_path_factory.mktemp("card")
    (place / "model.json").write_text(json.dumps(MODEL))
    write_shard(place / "shard.tar", captioned(24, (20, 20)))
    assert main(["train", *small(place), "--name", "run"]) == 0
    folder = (place / "runs" / "run").rename(place / "__a <b>run [x](y)__")
    (folder / "results.json").write_text(json.dumps({"step": 4, "results": RESULTS}))
    return folder


@pytest.fixture(scope="module")
def opened(run):
    from fullbatch.loading import load_trained

    return load_trained(run)


@pytest.fixture(scope="module")
def origin(run):
    return origin_of(run, 4, True)


def front_matter(card):
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def rendered(card):
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": True}).enable("table").render(front_matter(card)[1])


def rows_of(page):
    return re.findall(r"<tr>\n(.*?)</tr>", page, re.DOTALL)


def test_a_hub_finds_its_fields(origin, opened):
    from huggingface_hub import ModelCard

    card = model_card(opened, "huggingface", origin, "mit")
    data = ModelCard(card).data
    assert (data.license, data.library_name) == ("mit", "transformers")
    assert data.pipeline_tag == "zero-shot-image-classification" and {"clip", "fullbatch"} <= set(data.tags)
    assert data.metrics == ["accuracy", "recall"]
    numbers = [(score.dataset_name, score.metric_type, score.metric_value) for score in data.eval_results]
    assert numbers[:2] == [("held out.csv", "mean_r1", 0.25), ("val", "accuracy", 0.125)]
    assert [score.dataset_type for score in data.eval_results][:2] == ["held-out.csv", "val"]


def test_a_reader_sees_tables_and_nobody_elses_markup(run, origin, opened):
    card = model_card(opened, "huggingface", origin)
    page = rendered(card)
    allowed = {"h1", "h2", "p", "code", "pre", "table", "thead", "tbody", "tr", "th", "td", "strong"}
    shown = page.replace("<!-- written by fullbatch export -->", "")
    assert set(re.findall(r"<(\w+)", shown)) == allowed and "<h1>__a b run x y __</h1>" in page
    rows = rows_of(page)
    assert {row.count("<td>") for row in rows} == {0, 2, 6}
    assert any("held out.csv" in row and "25.0%" in row and f"25.0{TIMES}" in row for row in rows)
    assert any("method" in row and "neuclip" in row for row in rows)
    assert any("<td>data</td>" in row and "<code>shard.tar</code>" in row for row in rows)
    assert "/srv" not in card and str(run.parent) not in card


def test_a_licence_is_chosen_by_the_user(origin, opened):
    card = model_card(opened, "huggingface", origin)
    fields, body = front_matter(card)
    assert "license" not in fields and card.startswith("---\n# license: choose one before you publish")
    assert "**Not chosen yet.**" in body
    fields, body = front_matter(model_card(opened, "huggingface", origin, "cc-by-4.0"))
    assert fields["license"] == "cc-by-4.0" and "Not chosen" not in body
    for wrong in ("", "MIT License", "mit\ntags: x", "--- "):
        with pytest.raises(ValueError, match="as hubs do: mit"):
            check_license(wrong)


def test_numbers_of_other_weights_do_not_count(run, opened, tmp_path):
    assert len(origin_of(run, 4, True).scores) == 3
    assert not origin_of(run, 3, True).scores
    assert "These weights were not measured." in model_card(opened, "open_clip", origin_of(run, 3, True))
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace("ema: null", "ema: 0.9"))
    assert len(origin_of(copy, 4, True).scores) == 3 and not origin_of(copy, 4, False).scores
    plain = {"task": RESULTS[1]["task"], "main": "accuracy", "accuracy": 0.75, "chance": 0.001}
    of_step = {"step": 4, "results": [plain]}
    (copy / "evaluation.json").write_text(json.dumps({**of_step, "average": False}))
    (copy / "evaluation-of-old.json").write_text(json.dumps(of_step))  # of which weights, nobody wrote down
    assert [score.value for score in origin_of(copy, 4, True).scores] == [0.25, 0.125, 0.5]
    assert [score.value for score in origin_of(copy, 4, False).scores] == [0.75]


def test_of_two_measurements_the_later_counts(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")

    def write(name, value, time=None, step=4):
        task = RESULTS[1]["task"]
        times = {} if time is None else {"times": {task: time}}
        result = {"task": task, "main": "accuracy", "accuracy": value}
        (copy / name).write_text(json.dumps({"step": step, "results": [result], **times}))

    def values():
        return {score.value for score in origin_of(copy / "checkpoints" / "step-000000004", 4, True).scores}

    os.utime(copy / "results.json", (50.0, 50.0))
    write("evaluation-step-000000002.json", 0.875, 300.0, step=2)
    write("evaluation-step-000000004.json", 0.625, 100.0)
    assert values() == {0.25, 0.625, 0.5}
    write("evaluation.json", 0.75, 200.0)
    assert values() == {0.25, 0.75, 0.5}
    write("evaluation.json", 0.75)
    os.utime(copy / "evaluation.json", (80.0, 80.0))
    assert values() == {0.25, 0.625, 0.5}
    (copy / "results.json").write_text("{")
    assert values() == {0.625}


def test_a_model_without_its_run_says_so(opened):
    fields, body = front_matter(model_card(opened, "safetensors", None))
    assert "model-index" not in fields and fields["library_name"] == "fullbatch"
    assert "exported from weights without their run" in body and body.strip().startswith("# model")


def test_what_a_fine_tuning_kept(run, opened, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "tuned").mkdir()
    task = "retrieval:/srv/pairs.csv mean_r1"
    (copy / "finetune.json").write_text(json.dumps({"model": "/srv/base/model.pt", "chances": {task: 0.01}}))
    (copy / "tuned" / "measured.json").write_text(json.dumps({"step": 3, "epoch": 1, "values": {task: 0.5}}))
    origin = origin_of_tuned(copy / "tuned")
    assert origin is not None and origin.step == 3
    card = model_card(opened, "huggingface", origin)
    assert f"| `retrieval:pairs.csv` | mean R@1 | 50.0% | 1.0% | 50.0{TIMES} | {NOTHING} |" in card
    assert "| started from | `model.pt` |" in card
    assert origin_of_tuned(copy / "base") is None and origin_of_tuned(run) is None


@settings(max_examples=50)
@given(task=st.text(), name=st.text())
def test_no_name_breaks_the_card(origin, opened, task, name):
    named = replace(origin, run=replace(origin.run, name=name), scores=(TaskValue(task, "accuracy", 0.5, 0.1, 10),))
    card = model_card(opened, "huggingface", named)
    fields, _ = front_matter(card)
    assert fields["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.5
    page = rendered(card)
    assert [row.count("<td>") for row in rows_of(page)][-2:] == [0, 6]
    assert not re.search(r"<(script|img|a|em|b)\b", page) and page.count("<h1>") == 1


def test_what_the_weights_were_before_the_first_step(origin, opened):
    def started(**changed):
        settings = {**origin.run.settings, "model": {**origin.run.settings["model"], **changed}}
        card = model_card(opened, "huggingface", replace(origin, run=replace(origin.run, settings=settings)))
        return re.search(r"\| started from \| (.*) \|", card)[1]

    assert started() == "`random weights`"
    assert started(pretrained="/srv/models/base.pt") == "`base.pt`"
    towers = {"image_weights": "/srv/vit.safetensors", "text_weights": True}
    assert started(**towers) == "`image tower: vit.safetensors`, `text tower: its own weights`"


PLACES = {
    "/pictures/a b.csv?captions=title": "a b.csv?captions=title",
    "/data/me + you, here/pairs.csv": "pairs.csv",
    "/data/{00000..00331}.tar?weight=2::/more/*.tar": "{00000..00331}.tar?weight=2::*.tar",
    "knn:/data/train|~/data/test/": "knn:train|test",
    "C:\\Users\\me\\a.csv": "a.csv",
    "file:///srv/a.tar": "a.tar",
    "../up/a.tar": "a.tar",
    "resnet18 + /models/bert": "resnet18 + bert",
    "coco.json?images=/data/images/val": "coco.json?images=val",
    "https://me:secret@host/a.tar": "https://me:***@host/a.tar",
    "openai/clip-vit-base-patch32": "openai/clip-vit-base-patch32",
    "zero_shot:emoji?split=new_style": "zero_shot:emoji?split=new_style",
    "data/pairs.csv": "data/pairs.csv",
}


@pytest.mark.parametrize("given", PLACES)
def test_where_things_lie_is_not_told(given):
    assert local_name(given) == PLACES[given]


CODE = re.compile(r"^With (\w+):\n\n```python\n(.*?)\n```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("format", "libraries"),
    [
        ("huggingface", ["transformers", "open_clip", "fullbatch"]),
        ("open_clip", ["open_clip", "fullbatch"]),
        ("safetensors", ["fullbatch"]),
        pytest.param("onnx", ["onnxruntime"], marks=pytest.mark.slow),
    ],
)
def test_its_code_runs(run, opened, tmp_path, monkeypatch, capsys, format, libraries):
    """As a reader copies it; every program gives the same similarities."""
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    folder = tmp_path / "out"
    status, _, err = answer(capsys, "export", str(run), str(folder), "--format", format, "--license", "mit")
    assert status == 0, err
    card = (folder / "README.md").read_text()
    blocks = CODE.findall(card)
    assert [library for library, _ in blocks] == libraries
    monkeypatch.chdir(tmp_path)
    seen = picture((16, 16))  # of the model's size, for resizing differs by a grey level
    if format == "onnx":
        assert json.loads((folder / "preprocess.json").read_text())["image"]["transparency"] == "white"
        seen.putalpha(Image.linear_gradient("L").resize(seen.size))
    seen.save("picture.jpg", format="PNG" if format == "onnx" else "JPEG")
    model = load(run)
    for library, code in blocks:
        names = {}
        exec(compile(code.replace("FOLDER", str(folder)), library, "exec"), names)
        texts = ["a cat", "a dog"] if library == "fullbatch" else ["a photo of a cat", "a photo of a dog"]
        wanted = model.similarity(model.encode_image("picture.jpg"), model.encode_text(texts))
        got = names.get("similarities")
        if library == "transformers":
            got, wanted = names["probabilities"], (wanted / opened.temperature).softmax(-1)
        torch.testing.assert_close(torch.as_tensor(got).detach().reshape(-1), wanted, atol=2e-4, rtol=0)
        if format == "onnx":
            embedding = torch.from_numpy(names["image"])[0]
            torch.testing.assert_close(embedding, model.encode_image("picture.jpg"), atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SimpleTokenizer", "HFTokenizer"])
def test_its_code_runs_without_a_tokenizer_json(tmp_path, monkeypatch, request, kind):
    """With tokenizers that do what the file cannot say: cut a caption elsewhere, blank its end."""
    pytest.importorskip("onnxruntime")
    own = kind == "SimpleTokenizer"
    options = {"reduction_mask": "simple"} if own else {"strip_sep_token": True}
    text = {**MODEL["text_cfg"], "pool_type": "argmax" if own else "last", "tokenizer_kwargs": options}
    (tmp_path / "model.json").write_text(json.dumps({**MODEL, "text_cfg": text}))
    tokenizer = None if own else request.getfixturevalue("text_folder")
    model = build_model(ModelConfig(str(tmp_path / "model.json"), tokenizer=tokenizer)).eval()
    opened = Opened(model, 0.05, None)
    folder = opened.export(tmp_path / "onnx", "onnx")
    assert json.loads((folder / "preprocess.json").read_text())["text"]["tokenizer_file"] is None
    ((_, code),) = CODE.findall(model_card(opened, "onnx", None, folder=folder))
    assert f"tokenizer = {kind}(" in code
    monkeypatch.chdir(tmp_path)
    picture((16, 16)).save("picture.jpg")
    names = {}
    exec(compile(code.replace("FOLDER", str(folder)), "card", "exec"), names)
    with torch.no_grad():
        wanted = model.encode_text(model.tokenize(["a photo of a cat", "a photo of a dog"]))
    torch.testing.assert_close(torch.from_numpy(names["texts"]), wanted, atol=2e-4, rtol=0)


def test_a_hubs_widget_runs_it(run, tmp_path, capsys):
    """The pipeline that the card names, by transformers alone."""
    from transformers import pipeline

    folder = tmp_path / "out"
    assert answer(capsys, "export", str(run), str(folder), "--format", "huggingface")[0] == 0
    task = front_matter((folder / "README.md").read_text())[0]["pipeline_tag"]
    answers = pipeline(task, model=str(folder), device="cpu")(
        picture((40, 20)), candidate_labels=["cat", "dog"], hypothesis_template="{}"
    )
    assert {answer["label"] for answer in answers} == {"cat", "dog"}
    assert sum(answer["score"] for answer in answers) == pytest.approx(1.0, abs=1e-4)
