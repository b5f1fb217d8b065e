"""Between base and tuned: the ends to the bit, the middle by hand, the best that lets no task fall."""

import json
import math

import pytest
import torch

from fullbatch.cli import main
from fullbatch.config.model import Model
from fullbatch.finetuning.finetune import finetune
from fullbatch.finetuning.interpolation import Between, Point, best_of, mix
from fullbatch.loading import Opened, open_model, write_model
from fullbatch.models.build import build_model
from tests.finetuning.making import tuning_config
from tests.training.small import differences


@pytest.fixture(scope="module")
def run(tmp_path_factory, base):
    return finetune(tuning_config(tmp_path_factory.mktemp("run"), base)).trained.folder


def state(folder):
    return build_model(Model(pretrained=str(folder))).state_dict()


def test_the_curve_of_a_run(run, capsys):
    assert main(["interpolate", str(run), "--alphas", "0.5", "1", "--workers", "0"]) == 0
    shown = capsys.readouterr().out
    said = json.loads((run / "interpolation.json").read_text())
    measured = json.loads((run / "finetune.json").read_text())
    assert [point["alpha"] for point in said["points"]] == [0.0, 0.5, 1.0]
    best = {epoch["step"]: epoch for epoch in measured["epochs"]}[measured["best_step"]]
    assert said["points"][0]["values"] == measured["epochs"][0]["values"]
    assert said["points"][2]["values"] == best["values"]
    assert said["metric"] == "mean" and said["tolerance"] == 0.01
    safe = [point for point in said["points"] if not point["regressed"]]
    assert said["best_alpha"] == max(safe, key=lambda point: (point["score"], -point["alpha"]))["alpha"] > 0.0
    assert said["written"] == "interpolated" and f"written to {run / 'interpolated'}" in shown
    alpha = said["best_alpha"]
    base, tuned, made = (state(run / name) for name in ("base", "tuned", "interpolated"))
    for name, value in made.items():
        torch.testing.assert_close(value, (1 - alpha) * base[name] + alpha * tuned[name], rtol=1e-6, atol=1e-7)


def test_two_models_by_name(run, tmp_path, capsys):
    words = ["interpolate", str(run / "base"), str(run / "tuned"), "--alphas", "0.5", "1", "--workers", "0"]
    task = json.loads((run / "finetune.json").read_text())["tasks"][0]["task"]
    assert main([*words, "--tasks", task]) == 0
    assert "--output FOLDER" in capsys.readouterr().out
    assert main([*words, "--tasks", task, "--output", str(tmp_path / "made")]) == 0
    said = json.loads((tmp_path / "made" / "interpolation.json").read_text())
    assert said["written"] == str(tmp_path / "made") and (tmp_path / "made" / "fullbatch.safetensors").is_file()


def test_nothing_is_overwritten(run, tmp_path, capsys):
    mine = tmp_path / "models"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for output in (mine, tmp_path / "file", "."):
        assert main(["interpolate", str(run), "--alphas", "1", "--output", str(output)]) == 1
        assert "exists already; name a new folder" in capsys.readouterr().err
    assert (mine / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    assert main(["interpolate", str(run), "--output", str(tmp_path / "model.pt")]) == 1
    assert "is to be a folder" in capsys.readouterr().err


def test_the_ends_are_theirs_to_the_bit(run):
    opened = [open_model(Model(str(run / name))) for name in ("base", "tuned")]
    whole = [{name: value.clone() for name, value in each.model.state_dict().items()} for each in opened]
    between = Between(*opened)
    for alpha, wanted, end in ((1.0, whole[1], opened[1]), (0.0, whole[0], opened[0]), (1.0, whole[1], opened[1])):
        at = between.at(alpha)
        weights = {name: value for name, value in at.model.state_dict().items() if name != "backbone.logit_scale"}
        wanted = {name: value for name, value in wanted.items() if name != "backbone.logit_scale"}
        assert differences(weights, wanted) == [] and at.temperature == end.temperature


def test_half_way(tmp_path, base):
    """Temperatures are mixed as logits' scales are learned, by their logs; a bias that only one has starts at 0."""
    one, other = open_model(Model(str(base))), open_model(Model(str(base)))
    for weight in other.model.parameters():
        weight.data += 0.25
    between = Between(Opened(one.model, 0.01, None), Opened(other.model, 0.04, -8.0))
    half = between.at(0.5)
    assert half.temperature == pytest.approx(0.02) and half.bias == -4.0
    write_model(half, tmp_path / "half")
    saved = build_model(Model(pretrained=str(tmp_path / "half")))
    assert math.isclose(saved.initial_temperature, 0.02, rel_tol=1e-6) and saved.initial_bias == -4.0


def test_half_precision_is_mixed_in_float32_and_counts_are_not_mixed():
    half = mix(torch.tensor([1.0], dtype=torch.float16), torch.tensor([1.0009765625], dtype=torch.float16), 0.5)
    assert half.dtype == torch.float32 and half.item() == 1.00048828125
    assert mix(torch.tensor(3), torch.tensor(9), 0.5).item() == 9
    assert mix(torch.tensor(3), torch.tensor(9), 0.0).item() == 3


def test_the_best_lets_no_task_fall():
    points = (
        Point(0.0, {"a x": 0.5}, 0.5, ()),
        Point(0.3, {"a x": 0.6}, 0.6, ()),
        Point(0.6, {"a x": 0.6}, 0.6, ()),
        Point(0.8, {"a x": 0.9}, 0.9, ("b",)),
        Point(1.0, {}, None, ()),
    )
    assert best_of(points).alpha == 0.3
    assert best_of((points[0], points[3])).alpha == 0.0


def test_another_architecture_has_nothing_in_between(tmp_path, base, run, capsys):
    from tests.training.small import TOWERS

    (tmp_path / "wide.json").write_text(json.dumps({**TOWERS, "embed_dim": 16}))
    other = build_model(Model(str(tmp_path / "wide.json")))
    write_model(Opened(other, 0.07, None), tmp_path / "wide")
    assert main(["interpolate", str(base), str(tmp_path / "wide"), "--workers", "0"]) == 1
    assert "different architectures" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{base}/../trained", "is not the folder of a `fullbatch finetune` run: there is no finetune.json in it."),
        ("{run}/nowhere", "is not the folder of a `fullbatch finetune` run"),
        ("{base} {base} {base}", "BASE TUNED; got 3"),
        ("{run} --alphas 0.5 1.5", "--alphas must lie in [0, 1], got 1.5"),
        ("{run} --tolerance -1", "--tolerance must lie in [0, 1], got -1.0"),
        ("{run} --metric accuracy", "--metric 'accuracy': none of the tasks gives it"),
        ("{run} --tolerance abc", "--tolerance must be a share such as 0.01, got 'abc'"),
        ("{base} {run}/nowhere", "There is no run folder, checkpoint or exported model at"),
    ],
)
def test_mistakes(run, base, capsys, words, message):
    assert main(["interpolate", *words.format(run=run, base=base).split()]) == 1
    assert message in capsys.readouterr().err
