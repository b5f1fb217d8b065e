"""Two gloo ranks fine-tune as one does, copied or sharded: the same curve, the same verdict, whole weights."""

import json

import pytest
import torch

from fullbatch.cli import main
from fullbatch.config.model import Model
from fullbatch.finetuning.finetune import finetune
from fullbatch.finetuning.record import Record, write_record
from fullbatch.models.build import build_model
from tests.finetuning.making import said, tuning_config
from tests.training.small import renamed

sharding = pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FSDP2 of torch 2.6 needs a GPU")


def on_rank(rank, config):
    tuned = finetune(config)
    return tuned.verdict.outcome, tuned.record.best_step


def mistake(rank, config, metric):
    try:
        finetune(config, metric)
    except ValueError as error:
        return str(error)


def mistake_where_one_goes_on(rank, config, run):
    try:
        finetune(config, resume=run if rank == 0 else None)
    except ValueError as error:
        return str(error)


def interpolated(rank, run):
    return main(["interpolate", str(run), "--alphas", "0.5", "1", "--workers", "0", "--device", "cpu"])


def losses(run):
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([line["loss"] for line in lines if "loss" in line], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "ema"), [("ddp", None), pytest.param("fsdp", 0.5, marks=sharding)])
def test_two_ranks_are_one(tmp_path, base, two_ranks, parallel, ema):
    config = tuning_config(tmp_path, base, parallel=parallel, ema=ema)
    one = finetune(config).trained.folder
    answers = two_ranks.run(on_rank, renamed(config, "two"))
    two = tmp_path / "two"
    wanted = said(one)
    assert answers == [(wanted["outcome"], wanted["best_step"])] * 2
    torch.testing.assert_close(losses(two), losses(one), rtol=0.0, atol=1e-6)
    found = said(two)
    for mine, theirs in zip(found["epochs"], wanted["epochs"], strict=True):
        assert (mine["step"], mine["epoch"]) == (theirs["step"], theirs["epoch"])
        assert mine["score"] == pytest.approx(theirs["score"], abs=0.026)  # a picture of forty
    for name in ("base", "tuned"):
        one_model, two_model = (build_model(Model(pretrained=str(run / name))) for run in (one, two))
        for key, value in one_model.state_dict().items():
            torch.testing.assert_close(two_model.state_dict()[key], value, rtol=1e-4, atol=1e-4)


def test_a_curve_on_two_ranks(tmp_path, base, two_ranks):
    run = finetune(tuning_config(tmp_path, base)).trained.folder
    curves = []
    for statuses in ([interpolated(0, run)], two_ranks.run(interpolated, run)):
        assert set(statuses) == {0}
        curves.append(json.loads((run / "interpolation.json").read_text()))
    assert [point["alpha"] for point in curves[1]["points"]] == [0.0, 0.5, 1.0]
    for one, two in zip(curves[0]["points"], curves[1]["points"], strict=True):
        assert two["score"] == pytest.approx(one["score"], abs=0.026)


def test_a_mistake_is_one_message_on_every_rank(tmp_path, base, two_ranks):
    config = tuning_config(tmp_path, tmp_path / "nowhere")
    for message in two_ranks.run(mistake, config, None):
        assert "There is no run folder, checkpoint or exported model" in message
    task = config.evaluation.evaluate[0]
    for message in two_ranks.run(mistake, tuning_config(tmp_path, base), f"{task} accuracy"):
        assert "none of the tasks gives it" in message and "text_to_image_r10" in message


def test_ranks_that_do_not_see_the_same_run_are_refused(tmp_path, base, two_ranks):
    run = tmp_path / "run"
    run.mkdir()
    write_record(run, Record("base", "mean", 0.01))
    for message in two_ranks.run(mistake_where_one_goes_on, tuning_config(tmp_path, base), run):
        assert message.startswith("Only some of the ranks (0) see the run that has begun; ")
    assert [path.name for path in run.iterdir()] == ["finetune.json"]
