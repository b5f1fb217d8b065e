"""Evaluations in a run: when they are due, who looks on, and how a run ends early for what they say."""

import json
import shutil
from dataclasses import replace

import pytest

import fullbatch.training_run
from fullbatch.config.training import Evaluation
from fullbatch.evaluation.tasks import run_tasks
from fullbatch.finetuning.finetune import measuring
from fullbatch.loading import load_trained
from fullbatch.training import checkpoint
from fullbatch.training.interruption import Abandoned
from fullbatch.training.stages import Stages
from fullbatch.training_run import train
from tests.training.small import differences, renamed, saved_state, small_config


def watched(folder, evaluations=4, **settings):
    """20 steps, evaluated after 5, 10, 15 and 20."""
    config = small_config(folder, "openclip", **settings)
    task = f"retrieval:{config.data.data[0]}"
    return replace(config, evaluation=Evaluation(evaluate=(task,), evaluations=evaluations))


def evaluations_of(run):
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind") == "evaluation"]


class Watch:
    """Says to end at these steps."""

    def __init__(self, *ends):
        self.ends, self.seen = ends, []

    def __call__(self, seen):
        self.seen.append((seen.step, seen.seconds, seen.measured.as_dict()["results"][0]["mean_r1"]))
        return seen.step in self.ends

    @property
    def steps(self):
        return [step for step, _, _ in self.seen]


@pytest.mark.parametrize(
    ("count", "due"),
    [(1, [20]), (2, [10, 20]), (3, [7, 14, 20]), (6, [4, 7, 10, 14, 17, 20]), (20, list(range(1, 21)))],
)
@pytest.mark.parametrize("recovery", [0, 7])
def test_so_many_evaluations_evenly_spaced(count, due, recovery):
    settings, stages = Evaluation(evaluations=count), Stages(5, 20, recovery)
    found = [step for step in range(stages.total + 1) if stages.evaluation_due(step, settings)]
    assert found == [step + recovery for step in due], "none while the weights rest"


def test_more_evaluations_than_steps_are_one_a_step():
    assert [step for step in range(5) if Stages(5, 4).evaluation_due(step, Evaluation(evaluations=9))] == [1, 2, 3, 4]


def test_in_a_run(tmp_path):
    run = train(watched(tmp_path, 3)).folder
    assert [line["step"] for line in evaluations_of(run)] == [7, 14, 20]


def test_either_a_number_or_epochs():
    with pytest.raises(ValueError, match=r"evaluations must be left out with evaluate_every"):
        Evaluation(evaluations=3, evaluate_every=1)
    with pytest.raises(ValueError, match=r"evaluations must be a whole number"):
        Evaluation(evaluations=0)


def test_fine_tuning_takes_a_number_of_them_too(tmp_path):
    assert measuring(watched(tmp_path, None)).evaluation.evaluate_every == 1
    config = measuring(watched(tmp_path))
    assert (config.evaluation.evaluations, config.evaluation.evaluate_every) == (4, 0)


def test_a_watch_sees_every_evaluation(tmp_path):
    config, watch = watched(tmp_path), Watch()
    run = train(config, watch=watch).folder
    assert watch.steps == [5, 10, 15, 20]
    seconds = [seconds for _, seconds, _ in watch.seen]
    assert seconds == sorted(seconds) and seconds[0] > 0.0
    name = f"{config.evaluation.evaluate[0]} mean_r1"
    assert [line[name] for line in evaluations_of(run)] == [value for _, _, value in watch.seen]
    assert not any("ended" in line for line in evaluations_of(run))


def test_it_may_end_the_run(tmp_path):
    config, watch = watched(tmp_path), Watch(15)
    trained = train(config, watch=watch)
    run = trained.folder
    assert watch.steps == [5, 10, 15]
    assert trained.results["step"] == 15 and trained.results["cost"]["stages"]
    assert [line.get("ended") for line in evaluations_of(run)] == [None, None, True]
    assert saved_state(run, 15)["position"]["step"] == 15
    assert "the run ends early, at step 15 of 20" in (run / "log.txt").read_text()

    again = Watch()
    resumed = train(config, resume=run, watch=again)
    assert again.seen == [], "it has ended"
    assert {**resumed.results, "cost": None} == {**trained.results, "cost": None}
    without = replace(config, evaluation=Evaluation(evaluate=()))
    train(without, resume=run)
    assert checkpoint.last_good(run / "checkpoints").name == "step-000000015"
    assert "was ended early, at step 15 of 20" in (run / "log.txt").read_text()


def test_until_it_ends_a_watched_run_is_as_any_other(tmp_path):
    config = watched(tmp_path)
    whole, part = train(config).folder, train(renamed(config, "part"), watch=Watch(10)).folder
    assert differences(saved_state(whole, 10), saved_state(part, 10)) == []


def test_at_the_last_step_there_is_nothing_to_end(tmp_path):
    run = train(watched(tmp_path), watch=Watch(20)).folder
    assert not any("ended" in line for line in evaluations_of(run))


def test_killed_before_the_answer_was_noted_it_is_asked_again(tmp_path):
    config = watched(tmp_path)
    run = train(config, watch=Watch(10)).folder
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    watch = Watch(10)
    train(config, resume=run, watch=watch)
    assert watch.steps == [10]
    assert evaluations_of(run)[-1]["ended"]


def test_killed_before_the_checkpoint_it_comes_there_again(tmp_path):
    config = watched(tmp_path)
    run = train(config, watch=Watch(15)).folder
    shutil.rmtree(checkpoint.folder_of(run / "checkpoints", 15))
    watch = Watch(15)
    train(config, resume=run, watch=watch)
    assert watch.steps == [15]
    assert saved_state(run, 15)["position"]["step"] == 15


def test_a_run_that_is_given_away_is_left_at_once(tmp_path):
    config, asked = small_config(tmp_path, "openclip"), []

    def abandoned():
        asked.append(True)
        return len(asked) == 10

    with pytest.raises(Abandoned, match="is left at step 10"):
        train(config, abandoned=abandoned)
    assert checkpoint.checkpoints(tmp_path / "run" / "checkpoints") == [], "not even what was due"


def on_rank(rank, config, ends):
    watch = Watch(*ends[rank])
    results = train(config, watch=watch).results
    return results["step"], watch.steps


@pytest.mark.slow
def test_the_first_rank_decides_for_all(tmp_path, two_ranks):
    config = watched(tmp_path)
    assert two_ranks.run(on_rank, renamed(config, "first"), [(10,), ()]) == [(10, [5, 10])] * 2
    assert two_ranks.run(on_rank, renamed(config, "other"), [(), (10,)]) == [(20, [5, 10, 15, 20])] * 2
    assert saved_state(tmp_path / "first", 10)["position"]["step"] == 10


# ---------------------------------------------------------------------------------------------------------------------
# the best checkpoint, and patience


def scored(config, monkeypatch, *values, keep=1, **evaluation):
    """Evaluated after 5, 10, 15 and 20 steps with these values of mean_r1; one checkpoint is kept, and the best."""
    given = dict(zip((5, 10, 15, 20), values, strict=False))

    def measured(tasks, embedder, templates):
        found = run_tasks(tasks, embedder, templates)
        (result,) = found.results
        step = int(min(set(given) - measured.seen, default=20))
        measured.seen.add(step)
        return replace(found, results=(replace(result, metrics={**result.metrics, "mean_r1": given[step]}),))

    measured.seen = set()
    monkeypatch.setattr(fullbatch.training_run, "run_tasks", measured)
    evaluation = replace(config.evaluation, **evaluation)
    return measured, replace(config, evaluation=evaluation, run=replace(config.run, keep=keep, save_every=5))


def kept(run):
    return [checkpoint.step_of(path) for path in checkpoint.checkpoints(run / "checkpoints")]


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, monkeypatch):
    _, config = scored(watched(tmp_path), monkeypatch, 0.1, 0.4, 0.3, 0.4, keep_best="mean_r1")
    trained = train(config)
    assert kept(trained.folder) == [10, 20], "the first of equals"
    task = config.evaluation.evaluate[0]
    best = {"metric": f"{task} mean_r1", "step": 10, "value": 0.4, "said": "40.0%"}
    best["checkpoint"] = "checkpoints/step-000000010"
    assert trained.results["best"] == best
    assert load_trained(trained.folder / best["checkpoint"]).step == 10
    _, plain = scored(renamed(watched(tmp_path), "plain"), monkeypatch, 0.1, 0.4, 0.3, 0.4)
    assert kept(train(plain).folder) == [20]


def test_it_is_saved_though_no_save_is_due(tmp_path, monkeypatch):
    _, config = scored(watched(tmp_path), monkeypatch, 0.1, 0.4, 0.3, 0.2, keep_best="mean_r1")
    run = train(replace(config, run=replace(config.run, save_every=None))).folder
    assert kept(run) == [10, 20]


def test_of_ranks_the_least_is_the_best(tmp_path):
    name = "text_to_image_median_rank"
    config = watched(tmp_path)
    trained = train(replace(config, evaluation=replace(config.evaluation, keep_best=name)))
    ranks = [line["score"] for line in evaluations_of(trained.folder)]
    assert trained.results["best"]["value"] == min(ranks)
    assert trained.results["best"]["said"] == f"{min(ranks):g}", "a rank is no share"


def test_patience_ends_a_training(tmp_path, monkeypatch):
    _, config = scored(watched(tmp_path), monkeypatch, 0.4, 0.3, 0.4, 0.9, keep_best="mean_r1", patience=2)
    trained = train(config)
    assert trained.results["step"] == 15 and kept(trained.folder) == [5, 15]
    assert [line.get("ended") for line in evaluations_of(trained.folder)] == [None, None, True]
    train(config, resume=trained.folder)
    assert kept(trained.folder) == [5, 15], "it has ended"
    other = replace(config, evaluation=replace(config.evaluation, keep_best="image_to_text_r1"))
    with pytest.raises(ValueError, match="cannot change"):
        train(other, resume=trained.folder)
    more = replace(config, evaluation=replace(config.evaluation, patience=5))
    assert train(more, resume=trained.folder).results["step"] == 20, "with more patience it goes on"
    _, config = scored(renamed(watched(tmp_path), "alone"), monkeypatch, 0.4, 0.3, 0.4, 0.9, patience=2)
    assert train(config).results["step"] == 15, "by the main number, where none is named"


@pytest.mark.parametrize("at", [10, 15])
def test_both_go_on_after_a_kill(tmp_path, monkeypatch, at):
    """Killed after the evaluation at this step, with or without its checkpoint: as if nothing had happened."""
    values = (0.4, 0.3, 0.2, 0.9)
    _, whole = scored(watched(tmp_path), monkeypatch, *values, keep_best="mean_r1", patience=3)
    measured, part = scored(renamed(whole, "part"), monkeypatch, *values)

    def killed(seen):
        if seen.step == at:
            raise RuntimeError("killed")
        return False

    with pytest.raises(RuntimeError, match="killed"):
        train(part, watch=killed)
    measured.seen.discard(at)
    resumed = train(part, resume=tmp_path / "part")
    _, again = scored(whole, monkeypatch, *values)
    one = train(again)
    assert resumed.results["best"] == one.results["best"] and kept(resumed.folder) == kept(one.folder) == [20]
    marks = [
        [(line["step"], line["score"], line.get("best")) for line in evaluations_of(run.folder)]
        for run in (one, resumed)
    ]
    assert marks[0] == marks[1] == [(5, 0.4, True), (10, 0.3, None), (15, 0.2, None), (20, 0.9, True)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": "mean_r2"}, "--keep-best 'mean_r2': none of the tasks gives it; did you mean 'mean_r1'"),
        ({"keep_best": "seconds"}, "--keep-best must name something measured"),
        ({"keep_best": "mean_r1", "evaluate": ()}, "needs something to measure"),
        ({"patience": 0}, "patience must be a whole number of at least 1"),
        ({"patience": 2, "evaluations": None}, "patience must be left out without evaluations during training"),
    ],
)
def test_mistakes_are_said_before_the_first_step(tmp_path, settings, message):
    config = watched(tmp_path)
    with pytest.raises(ValueError, match=message):
        train(replace(config, evaluation=replace(config.evaluation, **settings)))
    assert not (tmp_path / "run").exists()


def judged_on_rank(rank, config):
    return train(config).results["best"]


@pytest.mark.slow
def test_two_ranks_keep_the_same_best(tmp_path, two_ranks):
    config = watched(tmp_path)
    judged = replace(config.evaluation, keep_best="mean_r1", patience=4)
    config = replace(config, evaluation=judged, run=replace(config.run, keep=1))
    one, other = two_ranks.run(judged_on_rank, config)
    assert one == other and one["step"] in kept(tmp_path / "run") and 20 in kept(tmp_path / "run")
