"""A trial: a run that is watched, ended early, or fails, and which ends the same however often it is killed."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import torch

import fullbatch.training.trainer
import fullbatch.trials.trial
from fullbatch.config.optimization import Optimizer
from fullbatch.config.training import Evaluation
from fullbatch.evaluation.metric_names import parse_metrics
from fullbatch.training import checkpoint
from fullbatch.training.interruption import Abandoned, Interrupted
from fullbatch.training.run_folder import alone_in
from fullbatch.training_run import train
from fullbatch.trials.phases import Score
from fullbatch.trials.processes import OUTPUT
from fullbatch.trials.trial import FILE, CannotWork, Trial
from tests.killing import Fatal, exit_code, started
from tests.training.clock import Clock
from tests.training.small import renamed, small_config

MEAN = "mean(text_to_image_r1, image_to_text_r1)"


def run_trial(*given, **more):
    return Trial(*given, **more).run()


def small_trial(folder, name="trial", evaluations=4, metrics=(MEAN,), lr=5e-3):
    """20 steps, evaluated after 5, 10, 15 and 20, saved after 4, 8, ...: mostly between evaluations."""
    config = small_config(folder, "openclip", name=name)
    tasks = (f"retrieval:{config.data.data[0]}",)
    config = replace(
        config,
        optimizer=Optimizer(lr=lr),
        evaluation=Evaluation(evaluate=tasks, evaluations=evaluations),
        run=replace(config.run, save_every=4),
    )
    return config, parse_metrics(metrics, tasks)


def left(folder, name="trial"):
    return [path.name for path in (folder / name / "checkpoints").glob("*")]


def plain(score):
    """Without what depends on the clock."""
    return replace(score, seconds=0.0, device_hours=0.0)


class Told:
    """A report that notes what it is told, and prunes at this number."""

    def __init__(self, prune_at=None, action=lambda number: None):
        self.prune_at, self.action, self.said = prune_at, action, []

    def __call__(self, number, value):
        self.said.append((number, value))
        self.action(number)
        return number == self.prune_at


# ---------------------------------------------------------------------------------------------------------------------
# how it ends


def test_done(tmp_path, monkeypatch):
    Clock(monkeypatch)
    config, metrics = small_trial(tmp_path)
    told = Told(prune_at=4)  # too late: the run has ended
    score = run_trial(config, metrics, told)
    assert score.status == "done" and not score.error
    assert [(number, (value,)) for number, value in told.said] == list(score.evaluations)
    assert [number for number, _ in score.evaluations] == [1, 2, 3, 4]
    assert score.values == max(values for _, values in score.evaluations)
    results = json.loads((tmp_path / "trial" / "results.json").read_text())
    assert results["step"] == 20
    assert score.evaluations[-1][1] == (metrics[0].of(results, 0.0),)
    lines = [json.loads(text) for text in (tmp_path / "trial" / "metrics.jsonl").read_text().splitlines()]
    assert score.seconds == pytest.approx([line for line in lines if "kind" not in line][-1]["seconds"], abs=0.5)
    assert score.device_hours == pytest.approx(sum(stage["device_hours"] for stage in results["cost"]["stages"]))
    best = next(number for number, values in score.evaluations if values == score.values)
    assert left(tmp_path) == [f"step-{5 * best:09d}"], "the checkpoint of the evaluation that counts"


def test_its_last_evaluation(tmp_path):
    config, metrics = small_trial(tmp_path)
    score = run_trial(config, metrics, take="last")
    assert score.values == score.evaluations[-1][1]
    assert left(tmp_path) == ["step-000000020"]


def test_the_checkpoint_of_the_best_evaluation_stays(tmp_path, monkeypatch):
    config, metrics = small_trial(tmp_path)
    values = iter([0.1, 0.3, 0.2, 0.25])
    monkeypatch.setattr(fullbatch.trials.trial.Metric, "of", lambda self, results, seconds: next(values))
    assert run_trial(config, metrics).values == (0.3,)
    assert left(tmp_path) == ["step-000000010"]


def test_the_numbers_are_those_of_a_plain_run(tmp_path):
    config, metrics = small_trial(tmp_path)
    score = run_trial(config, metrics)
    assert score.evaluations[-1][1] == (metrics[0].of(train(renamed(config, "plain")).results, 0.0),)


def test_several_metrics_are_not_reported(tmp_path):
    config, metrics = small_trial(tmp_path, metrics=("seconds", "text_to_image_r1"))
    told = Told(prune_at=1)
    score = run_trial(config, metrics, told)
    assert told.said == [] and score.status == "done"
    seen = [values for _, values in score.evaluations]
    assert [seconds for seconds, _ in seen] == sorted(seconds for seconds, _ in seen)
    assert score.values == max(seen, key=lambda values: (values[1], -values[0])), (
        "the first of the best, by the measured"
    )


def test_pruned(tmp_path):
    config, metrics = small_trial(tmp_path)
    score = run_trial(config, metrics, Told(prune_at=2))
    assert score.status == "pruned" and len(score.evaluations) == 2
    assert score.values == score.evaluations[-1][1], "the last one, whichever was best"
    assert left(tmp_path) == []


def test_ended_for_want_of_improvement(tmp_path, monkeypatch):
    config, metrics = small_trial(tmp_path, evaluations=10)
    values = iter([0.1, 0.3, 0.2, 0.3, 0.25, 0.9])
    monkeypatch.setattr(fullbatch.trials.trial.Metric, "of", lambda self, results, seconds: next(values))
    score = run_trial(config, metrics, patience=3)
    assert score.status == "stopped" and score.values == (0.3,)
    assert [value for _, (value,) in score.evaluations] == [0.1, 0.3, 0.2, 0.3, 0.25]
    assert left(tmp_path) == ["step-000000004"], "of the first 0.3"


def test_diverged_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(fullbatch.training.trainer, "DIVERGED", -0.9)  # a tenth of the first loss is too much
    config, metrics = small_trial(tmp_path)
    score = run_trial(config, metrics)
    assert score.status == "diverged" and score.values == (0.0,) and "ran away" in score.error
    assert left(tmp_path) == []
    config, metrics = small_trial(tmp_path, "other", metrics=("seconds",))
    assert run_trial(config, metrics).values is None, "no number of seconds is the worst"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "CUDA out of memory; .*--micro-batch"),
        pytest.param(MemoryError("no room"), "no room; .*--micro-batch", marks=pytest.mark.slow),
        pytest.param(ValueError("that does not fit"), "that does not fit", marks=pytest.mark.slow),
        (RuntimeError("shapes\n differ"), "RuntimeError: shapes differ"),
    ],
)
def test_failed_is_a_result_too(tmp_path, monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    config, metrics = small_trial(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(fullbatch.trials.trial, "train", fail)
        score = run_trial(config, metrics)
    assert score.status == "failed" and score.values is None
    assert re.search(message, score.error)
    assert run_trial(config, metrics).status == "done", "another try may end otherwise"


def test_a_broken_device_ends_the_process(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    config, metrics = small_trial(tmp_path)
    monkeypatch.setattr(fullbatch.trials.trial, "train", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_trial(config, metrics)


def test_settings_that_do_not_fit_the_data(tmp_path):
    config, metrics = small_trial(tmp_path)
    config = replace(config, training=replace(config.training, batch_size=41))
    score = run_trial(config, metrics)
    assert score.status == "failed" and "--batch-size 41 is more than the 40 samples" in score.error


# ---------------------------------------------------------------------------------------------------------------------
# what is this machine's fault, and ends no trial


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", "here")


@pytest.mark.slow
@pytest.mark.parametrize("at", ["train", "Trial._write", "Trial.close"])
def test_a_full_disk_is_the_machines_fault(tmp_path, monkeypatch, at):
    config, metrics = small_trial(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(f"fullbatch.trials.trial.{at}", full_disk)
        with pytest.raises((CannotWork, OSError), match="No space left"):
            run_trial(config, metrics)
    assert plain(run_trial(config, metrics)) == plain(run_trial(*small_trial(tmp_path, "whole")))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["data", "tasks"])
def test_data_that_cannot_be_seen_from_here(tmp_path, which):
    """Gone after the second evaluation; what was opened before that may still be read."""
    config, metrics = small_trial(tmp_path)
    own = tmp_path / "own.tar"
    own.write_bytes(Path(config.data.data[0]).read_bytes())
    if which == "data":
        config = replace(config, data=replace(config.data, data=(str(own),)))
    else:
        config = replace(config, evaluation=replace(config.evaluation, evaluate=(f"retrieval:{own}",)))
        metrics = parse_metrics((MEAN,), config.evaluation.evaluate)

    def lose(number):
        if number == 2:
            own.rename(tmp_path / "away.tar")
            if which == "data":
                raise KeyError

    with pytest.raises(KeyError if which == "data" else CannotWork):
        run_trial(config, metrics, Told(action=lose))
    with pytest.raises(CannotWork, match=r"There is no '.*own\.tar'"):
        run_trial(config, metrics)
    (tmp_path / "away.tar").rename(own)
    assert [number for number, _ in run_trial(config, metrics).evaluations] == [1, 2, 3, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_device_for_it_here(tmp_path):
    config, metrics = small_trial(tmp_path)
    with pytest.raises(CannotWork, match="sees no GPU"):
        run_trial(replace(config, training=replace(config.training, device="cuda")), metrics)


def test_a_folder_in_which_another_is_at_work(tmp_path):
    """It may be stopped, and never end."""
    config, metrics = small_trial(tmp_path)
    asked = []

    def stopping():
        asked.append(True)
        return len(asked) > 2

    with alone_in(tmp_path / "trial"), pytest.raises(Abandoned, match="still at work"):
        run_trial(config, metrics, stopping=stopping)
    assert len(asked) == 3
    assert run_trial(config, metrics).status == "done"


# ---------------------------------------------------------------------------------------------------------------------
# who else has a word


@pytest.mark.slow
def test_asha_prunes_the_worse_trials(tmp_path):
    """Rates that do not learn, after one that does; by the second evaluation that shows."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=4)
    study = optuna.create_study(direction="maximize", pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0))
    scores = []
    for number, lr in enumerate((5e-3, 1e-7, 1e-8, 1e-9)):
        config, metrics = small_trial(tmp_path, f"trial-{number}", lr=lr)
        config = replace(config, training=replace(config.training, samples=8 * 60))
        trial = study.ask()

        def report(number, value, trial=trial):
            trial.report(value, number)
            return trial.should_prune()

        score = run_trial(config, metrics, report)
        state = optuna.trial.TrialState.PRUNED if score.status == "pruned" else None
        study.tell(trial, None if state else score.values[0], state=state)
        scores.append(score)
    assert [score.status for score in scores] == ["done", "pruned", "pruned", "pruned"]
    assert [len(score.evaluations) for score in scores] == [4, 2, 2, 2]
    for score, trial in zip(scores, study.trials, strict=True):
        assert trial.intermediate_values == {number: value for number, (value,) in score.evaluations}


def test_what_the_report_raises_goes_through(tmp_path):
    def fail(number):
        if number == 2:
            raise KeyError("the storage is gone")

    config, metrics = small_trial(tmp_path)
    with pytest.raises(KeyError, match="the storage is gone"):
        run_trial(config, metrics, Told(action=fail))
    told = Told()
    score = run_trial(config, metrics, told)
    assert [number for number, _ in told.said] == [1, 2, 3, 4], "first what the folder had, then what came"
    whole = run_trial(*small_trial(tmp_path, "whole"))
    assert plain(score) == plain(whole)
    with pytest.raises(KeyError):
        run_trial(config, metrics, Told(action=fail))
    assert plain(run_trial(config, metrics)) == plain(whole)


def test_told_to_stop_when_it_is_over_it_has_ended(tmp_path):
    config, metrics = small_trial(tmp_path)
    told = Told()
    score = run_trial(config, metrics, told, stopping=lambda: len(told.said) == 4)
    assert score.status == "done"


@pytest.mark.slow
def test_a_signal_goes_through(tmp_path):
    config, metrics = small_trial(tmp_path)
    told = Told(action=lambda number: number == 2 and os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted):
        run_trial(config, metrics, told)
    assert plain(run_trial(config, metrics)) == plain(run_trial(*small_trial(tmp_path, "whole")))


@pytest.mark.slow
def test_a_trial_that_was_given_away_is_left(tmp_path):
    config, metrics = small_trial(tmp_path)
    told = Told()
    with pytest.raises(Abandoned, match="is left at step 11"):
        run_trial(config, metrics, told, lost=lambda: len(told.said) == 2)
    told = Told()
    with pytest.raises(Abandoned, match="is left to another process"):
        run_trial(config, metrics, told, lost=lambda: len(told.said) == 4)
    assert plain(run_trial(config, metrics)) == plain(run_trial(*small_trial(tmp_path, "whole")))


@pytest.mark.slow
def test_given_away_during_an_evaluation_it_is_evaluated_again(tmp_path):
    """That evaluation's step has a checkpoint, so nothing but the evaluation is left to do there."""
    config, metrics = small_trial(tmp_path)
    config = replace(config, run=replace(config.run, save_every=5))
    asked, told = [], Told()

    def lost():
        asked.append(True)
        return len(asked) > 6  # at the start, and after each of five steps

    with pytest.raises(Abandoned, match="is left to another process"):
        run_trial(config, metrics, told, lost=lost)
    assert told.said == [] and left(tmp_path) == ["step-000000005"]
    assert plain(run_trial(config, metrics)) == plain(run_trial(*small_trial(tmp_path, "whole")))


def test_an_ended_trial_is_not_trained_again(tmp_path, monkeypatch):
    found = {}
    for name, prune_at in (("done", None), ("pruned", 2)):
        found[name] = run_trial(*small_trial(tmp_path, name), Told(prune_at))
    monkeypatch.setattr(fullbatch.trials.trial, "train", None)
    for name, score in found.items():
        told = Told()
        assert run_trial(*small_trial(tmp_path, name), told) == score
        assert [(number, (value,)) for number, value in told.said] == list(score.evaluations)


@pytest.mark.slow
def test_a_folder_of_another_trial_is_cleared(tmp_path, caplog):
    run_trial(*small_trial(tmp_path))
    config, metrics = small_trial(tmp_path, lr=1e-3)
    output = (tmp_path / "trial" / OUTPUT).open("x")
    score = run_trial(config, metrics)
    output.close()
    assert (tmp_path / "trial" / OUTPUT).is_file(), "a process writes to it"
    assert "is trained anew: it is of another trial (optimizer.lr was 0.005 and is now 0.001)" in caplog.text
    assert plain(score) == plain(run_trial(renamed(config, "other"), metrics))


# ---------------------------------------------------------------------------------------------------------------------
# killed


def go(config, metrics, prune_at, die_in, output):
    """Killed in this call of that function."""
    what, number = die_in
    report, fatal = Told(prune_at), Fatal(number)
    match what:
        case "report":
            report = fatal(report)
        case "write":
            fatal.among(Trial, "_write")
        case "step":
            fatal.among(fullbatch.training.trainer.Trainer, "train_step")
        case "metrics":
            fatal.among(fullbatch.training.trainer.Metrics, "write")
        case "rmtree":
            fatal.among(fullbatch.trials.trial.shutil, "rmtree")
    torch.save(run_trial(config, metrics, report), output)


def is_killed(*args):
    return exit_code(started(go, *args)) == -signal.SIGKILL


MOMENTS = [
    *(("step", number) for number in (1, 7, 19)),
    *(("report", number) for number in (1, 3)),
    *(("write", number) for number in (2, 3)),
    *(("metrics", number) for number in (6, 13, 18)),
    ("rmtree", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("prune_at", [None, 3])
def test_killed_at_any_moment_it_ends_the_same(tmp_path, prune_at):
    whole, metrics = small_trial(tmp_path, "whole")
    want = run_trial(whole, metrics, Told(prune_at))
    for place, die_in in enumerate(MOMENTS):
        config, name = renamed(whole, f"killed-{place}"), f"killed-{place}"
        killed = is_killed(config, metrics, prune_at, die_in, tmp_path / "score")
        late = die_in in (("step", 19), ("metrics", 18)) and prune_at == 3
        assert killed or late or die_in[0] == "rmtree", die_in
        told = Told(prune_at)
        score = run_trial(config, metrics, told)
        assert plain(score) == plain(want), die_in
        assert [(number, (value,)) for number, value in told.said] == list(want.evaluations), die_in
        assert left(tmp_path, name) == left(tmp_path, "whole"), die_in


@pytest.mark.slow
def test_killed_in_the_middle_it_ends_the_same(tmp_path):
    config, metrics = small_trial(tmp_path)
    assert is_killed(config, metrics, None, ("report", 3), tmp_path / "score")
    assert len(json.loads((tmp_path / "trial" / FILE).read_text())["evaluations"]) == 2
    assert plain(run_trial(config, metrics)) == plain(run_trial(*small_trial(tmp_path, "whole")))


@pytest.mark.slow
def test_training_needs_neither_optuna_nor_scipy():
    code = "import sys, fullbatch.training_run, fullbatch.cli; print({'optuna', 'scipy.ndimage'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_a_score_is_written_and_read(tmp_path):
    score = Score("stopped", (0.5, 2.0), 3.0, 0.1, "", ((1, (0.5, 2.0)),))
    config, metrics = small_trial(tmp_path)
    run_trial(config, metrics)
    path = tmp_path / "trial" / FILE
    path.write_text(json.dumps({"evaluations": [], "score": fullbatch.trials.trial.asdict(score)}))
    assert run_trial(config, metrics) == score
    assert checkpoint.checkpoints(tmp_path / "trial" / "checkpoints")
