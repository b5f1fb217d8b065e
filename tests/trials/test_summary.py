"""What a search says of itself: files that can be read at any time, and a winner that claims no more than was seen."""

import csv
import io
import json
import math
from dataclasses import replace

import pytest

from fullbatch.config.run import RunConfig
from fullbatch.config.tree import from_dict, read_yaml
from fullbatch.trials.phases import Ended, Slot
from fullbatch.trials.search_summary import label_of, summarize, trial_name, write_files
from tests.trials.made_up import Running, all_owed, plan_of, played


def final(label, seed, value, params=None, status="done"):
    known = {"method": label} if params is None else params
    values = None if value is None else (value,)
    return Ended(Slot(0, known, seed, label), status, known, values)


FINE = {"method": "sogclr", "optimizer": "radam", "lr": 3e-3}
OTHER = {"method": "sogclr", "optimizer": "radam", "lr": 2e-3}


def finals_of(rows, **values):
    """The summary of a search whose finals have these values by seed."""
    plan = plan_of(**values)
    ended = [
        final(label, seed, value, {"fine 1": FINE, "fine 2": OTHER}.get(label), "diverged" if value == 0.0 else "done")
        for label, by_seed in rows.items()
        for seed, value in enumerate(by_seed)
    ]
    owed = {**all_owed(plan), "finals": len(ended)}
    before = played(plan, ("choices", "grid", "fine"))
    return summarize(plan, {**before, "finals": ended}, {}, owed, importance=False)


def test_a_clear_winner_is_called_so():
    found = finals_of({"fine 1": (0.30, 0.31, 0.32), "fine 2": (0.20, 0.21, 0.22), "openclip": (0.10, 0.11, 0.121)})
    winner = found["winner"]
    assert (winner["label"], winner["phase"], winner["slot"], winner["seeds"]) == ("fine 1", "fine", 1, [0, 1, 2])
    assert winner["mean"] == pytest.approx([0.31]) and winner["sd"] == pytest.approx([0.01])
    assert "fine 1 (radam + sogclr) is best with 31.00 ± 1.00 % mean_r1 over 3 seeds" in winner["said"]
    assert "+19.97 ± 0.06 points against openclip" in winner["said"]
    assert "separates it from the second and from every baseline" in winner["said"]
    assert "best of 19 trials on the same evaluation sets" in winner["said"]
    pairs = {row["against"]: row for row in winner["paired"]}
    assert pairs["openclip"]["values"] == pytest.approx([0.2, 0.2, 0.199]) and pairs["openclip"]["seen"]


def test_what_the_spread_does_not_separate_is_named():
    found = finals_of({"fine 1": (0.30, 0.35, 0.31), "fine 2": (0.31, 0.30, 0.32), "openclip": (0.10, 0.11, 0.12)})
    assert "does not separate it from fine 2 (the second)" in found["winner"]["said"]
    assert "openclip (the second)" not in found["winner"]["said"]
    found = finals_of({"fine 1": (0.30, 0.35, 0.31), "openclip": (0.31, 0.30, 0.32)})
    assert "does not separate it from openclip (the second)" in found["winner"]["said"]


def test_few_seeds_say_so():
    said = finals_of({"fine 1": (0.3,), "openclip": (0.1,)})["winner"]["said"]
    assert "over one seed" in said and "nothing is known of how sure this is" in said and "±" not in said
    said = finals_of({"fine 1": (0.3, 0.31), "openclip": (0.1, 0.11)})["winner"]["said"]
    assert "2 seeds are too few to separate it from openclip" in said
    said = finals_of({"fine 1": (0.3, 0.31, 0.32), "openclip": (0.1, 0.11, 0.12)})["winner"]["said"]
    assert "the spread separates it from every baseline;" in said
    said = finals_of({"fine 1": (0.3, 0.31, 0.32)})["winner"]["said"]
    assert "no other finalist" in said


def test_finals_on_other_sets_are_not_called_optimistic():
    finals = {
        "best": 1,
        "seeds": [0, 1, 2],
        "baselines": ["openclip"],
        "changes": {"evaluate": ["retrieval:other.tar"]},
    }
    plan = plan_of(finals=finals)
    winner = summarize(plan, played(plan), {}, all_owed(plan), importance=False)["winner"]
    assert winner["elsewhere"] and "on sets that nothing was picked by" in winner["said"]
    assert "optimistic" not in winner["said"]


def test_a_baseline_may_win():
    winner = finals_of({"fine 1": (0.1, 0.11, 0.12), "openclip": (0.2, 0.21, 0.22)})["winner"]
    assert winner["kind"] == "baseline" and winner["params"] == {"method": "openclip"}
    assert "a baseline that no candidate beats" in winner["said"] and "optimistic" not in winner["said"]


def test_lost_and_diverged_seeds_are_said_and_do_not_win():
    rows = {"fine 1": (0.5, 0.5, None), "fine 2": (0.3, 0.31, 0.32), "openclip": (0.1, 0.1, 0.0)}
    found = finals_of(rows)
    assert [one["label"] for one in found["finalists"]] == ["fine 2", "openclip", "fine 1"], "whole ones first"
    assert found["finalists"][2]["missing"] == 1 and found["finalists"][2]["seeds"] == [0, 1]
    assert found["finalists"][1]["diverged"] == 1 and found["finalists"][1]["mean"] == pytest.approx([0.2 / 3])
    alone = finals_of({"fine 1": (0.5, 0.0, None)})["winner"]["said"]
    assert "1 of its seeds diverged" in alone and "1 of its seeds ended without a value" in alone


def test_who_ran_away_with_every_seed_does_not_win():
    found = finals_of({"fine 1": (0.0, 0.0, 0.0), "openclip": (0.0, 0.0, 0.0)})
    assert found["winner"]["measured"] == "fine" and "all finals failed or diverged" in found["winner"]["said"]
    found = finals_of({"fine 1": (0.0, 0.0, 0.0), "openclip": (None, 0.1, 0.1)})
    assert found["winner"]["label"] == "openclip"
    plan = plan_of()
    away = [Ended(Slot(0), "diverged", {"method": "sogclr", "optimizer": "sgd"}, (0.0,))]
    assert summarize(plan, {"choices": away}, {}, all_owed(plan))["winner"] is None


def test_nobody_wins_where_nothing_has_a_value():
    plan = plan_of()
    assert summarize(plan, {}, {}, all_owed(plan))["winner"] is None
    lost = [Ended(Slot(0), "failed", {"method": "sogclr", "optimizer": "sgd"}, None, error="no memory")]
    found = summarize(plan, {"choices": lost}, {}, all_owed(plan))
    assert found["winner"] is None and found["phases"][0]["trials"][0]["rank"] is None


def test_before_and_without_finals_the_spread_is_not_known():
    plan = plan_of()
    said = summarize(plan, played(plan, ("choices",)), {}, all_owed(plan))["winner"]["said"]
    assert "is best so far" in said and "no final has ended yet" in said and "spread is not known" in said
    plan = plan_of(finals=None)
    winner = summarize(plan, played(plan), {}, all_owed(plan))["winner"]
    assert "the plan has no finals" in winner["said"] and winner["final"] and winner["measured"] == "fine"


def test_less_may_be_better():
    found = finals_of({"fine 1": (9.0, 9.5, 10.0), "openclip": (3.0, 3.0, 3.1)}, metrics=["seconds"])
    assert found["metrics"] == [{"name": "seconds", "short": "seconds", "maximise": False, "share": False}]
    winner = found["winner"]
    assert winner["label"] == "openclip" and "3.033 ± 0.05774 seconds" in winner["said"]
    assert winner["paired"][0]["mean"] == pytest.approx(-6.4666667), "in the metric's own sign"


def test_several_metrics_have_a_front():
    plan = plan_of(metrics=["mean_r1", "seconds"])
    found = summarize(plan, played(plan), {}, all_owed(plan))
    assert "(the first of 2 metrics)" in found["winner"]["said"]
    front = found["pareto"]
    assert front and front[0]["label"] == found["winner"]["name"]
    for one in front:
        for other in front:
            assert not (other["values"][0] > one["values"][0] and other["values"][1] < one["values"][1])
    early = summarize(plan, played(plan, ("choices",)), {}, all_owed(plan))["pareto"]
    assert early and {one["phase"] for one in early} == {"choices"}


# ---------------------------------------------------------------------------------------------------------------------
# trials


def test_trials_have_ranks_labels_and_plain_names():
    plan = plan_of(choices={"trials": 24, "over": None})
    ended = played(plan)
    found = summarize(plan, ended, {}, all_owed(plan), importance=False)
    choices, _, fine, finals = found["phases"]
    assert [phase["name"] for phase in found["phases"]] == ["choices", "grid", "fine", "finals"]
    by_rank = {trial["rank"]: trial for trial in choices["trials"]}
    assert by_rank[1]["status"] == "done" and by_rank[max(rank for rank in by_rank if rank)]["status"] == "diverged"
    assert next(trial for trial in choices["trials"] if trial["status"] == "failed")["rank"] is None
    of_sgd = [trial for trial in choices["trials"] if trial["params"]["optimizer"] == "sgd"]
    assert of_sgd and all("lr" in trial["params"] and "sgd.lr" not in trial["params"] for trial in of_sgd)
    assert all(trial["label"] == f"{trial['params']['optimizer']} + {trial['params']['method']}" for trial in of_sgd)
    assert all(list(trial["params"])[:2] == ["method", "optimizer"] for trial in choices["trials"])
    assert fine["trials"][7]["label"] == "fine 7" and fine["trials"][7]["folder"] == f"trials/{trial_name('fine', 7)}"
    assert {trial["label"] for trial in finals["trials"]} == {one["label"] for one in found["finalists"]}
    assert [trial["seed"] for trial in finals["trials"]] == [seed for seed in (0, 1, 2) for _ in range(5)]
    assert found["log_scaled"] == ["lr", "weight_decay"]


def test_labels():
    assert label_of("grid", Slot(3), {"method": "sogclr", "optimizer": "radam"}) == "radam + sogclr"
    assert label_of("choices", Slot(3), {"lr": 1.0}) == "choices 3"
    assert label_of("fine", Slot(17), {"method": "sogclr", "optimizer": "radam"}) == "fine 17"
    assert label_of("finals", Slot(1, label="openclip"), {"method": "openclip"}) == "openclip"


def test_the_cost_and_what_is_left():
    plan = plan_of()
    ended = played(plan, ("choices",))
    ended = {
        "choices": [
            replace(one, seconds=2.0, ended="2026-01-01T00:00:10", device_hours=0.5) for one in ended["choices"]
        ]
    }
    running = {"grid": [Running(Slot(n), {"method": "sogclr", "optimizer": "sgd"}) for n in range(2)]}
    found = summarize(plan, ended, running, all_owed(plan), importance=False)
    cost = found["cost"]
    assert (cost["trials_done"], cost["trials_owed"]) == (24, 24 + 4 + 20 + 15)
    assert cost["seconds"] == pytest.approx(48.0) and cost["device_hours"] == pytest.approx(12.0)
    # 2 epochs of a fifth took 10 s, so 3 epochs of all take 75 s and 4 take 100 s; two work side by side
    assert cost["left_seconds"] == pytest.approx((4 * 75 + 20 * 100 + 15 * 100) / 2)
    many = summarize(plan, ended, running, all_owed(plan), importance=False, jobs=5)["cost"]
    assert many["left_seconds"] == pytest.approx(75 + 20 * 100 / 5 + 15 * 100 / 5), "four grid trials take one's time"
    again = replace(ended["choices"][0], seconds=0.0, started="", ended="", error="as slot 1", same_as=1)
    with_more = {"choices": [*ended["choices"], again, replace(again, status="failed", error="no memory")]}
    owed = {**all_owed(plan), "choices": 26}
    assert summarize(plan, with_more, running, owed, importance=False)["cost"]["left_seconds"] == cost["left_seconds"]
    resumed = {"choices": [replace(one, seconds=10.0, started=one.ended) for one in ended["choices"]]}
    left = summarize(plan, resumed, running, all_owed(plan), importance=False)["cost"]["left_seconds"]
    assert left == cost["left_seconds"], "what was trained before it was taken up again counts"
    assert [one["label"] for one in found["phases"][1]["running"]] == ["sgd + sogclr"] * 2
    assert summarize(plan, {}, {}, all_owed(plan))["cost"]["left_seconds"] is None
    assert summarize(plan, played(plan), {}, all_owed(plan), importance=False)["cost"]["left_seconds"] == 0.0
    other = plan_of(fine={"trials": 20, "changes": {"samples": 1000}})
    assert summarize(other, ended, {}, all_owed(other))["cost"]["left_seconds"] is None, "samples and epochs differ"


def test_importance_is_looked_at_where_it_is_asked_for():
    plan = plan_of()
    ended = played(plan, ("choices", "grid"))
    first = summarize(plan, ended, {}, all_owed(plan))
    assert first["phases"][0]["importance"]["trials"] == 20 and "fewer than 8" in first["phases"][1]["why_none"]
    quick = summarize(plan, ended, {}, all_owed(plan), importance=False)
    assert quick["phases"][0]["importance"] is None and quick["phases"][0]["why_none"] == "not looked at yet"


# ---------------------------------------------------------------------------------------------------------------------
# files


def test_the_files(tmp_path):
    plan = plan_of(name="with spaces")
    ended = played(plan)
    summary = summarize(plan, ended, {}, all_owed(plan), importance=False)
    for _ in range(2):
        write_files(plan, summary, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.yaml", "search.csv", "search.json"]
    assert json.loads((tmp_path / "search.json").read_text()) == json.loads(json.dumps(summary))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "search.csv").read_text())))
    assert len(rows) == 63 and rows[0]["phase"] == "finals" and rows[-1]["phase"] == "choices"
    ranks = [int(row["rank"]) for row in rows if row["phase"] == "fine" and row["rank"]]
    assert ranks == list(range(1, 20))
    best = max(
        (row for row in rows if row["phase"] == "fine" and row["status"] == "done"), key=lambda r: float(r["mean_r1"])
    )
    assert best["rank"] == "1" and float(best["lr"]) > 0


def test_the_best_config_is_the_winners(tmp_path):
    plan = plan_of()
    ended = played(plan)
    summary = summarize(plan, ended, {}, all_owed(plan), importance=False)
    write_files(plan, summary, tmp_path)
    text = (tmp_path / "best.yaml").read_text()
    assert summary["winner"]["said"].split(";")[0] in " ".join(text.replace("\n# ", " ").split())
    config = from_dict(RunConfig, read_yaml(tmp_path / "best.yaml"))
    winner = next(one for one in ended["fine"] if one.slot.number == summary["winner"]["slot"])
    assert config == plan.config("finals", winner.params, 0, "runs", "")
    assert config.optimizer.lr == winner.params["lr"] and config.training.epochs == 4


def test_the_best_config_keeps_the_best_checkpoint(tmp_path):
    plan = plan_of(patience=2)
    plan = replace(plan, base={**plan.base, "evaluation": {**plan.base.get("evaluation", {}), "evaluations": 4}})
    for take, kept in (("best", plan.metrics[0]), ("last", None)):
        taken = replace(plan, take=take)
        write_files(taken, summarize(taken, played(taken), {}, all_owed(taken), importance=False), tmp_path)
        evaluation = from_dict(RunConfig, read_yaml(tmp_path / "best.yaml")).evaluation
        assert (evaluation.keep_best, evaluation.patience) == (kept, 2)


def test_a_dotted_name_gives_the_same_config(tmp_path):
    space = {key: {"low": low, "high": 1.0, "log": True} for key, low in (("lr", 1e-4), ("sgd.lr", 1e-2))}
    plan = plan_of(optimizers=["sgd"], grid=None, space=space, finals={"best": 1, "seeds": [0, 1]})
    ended = played(plan)
    summary = summarize(plan, ended, {}, all_owed(plan), importance=False)
    write_files(plan, summary, tmp_path)
    winner = next(one for one in ended["fine"] if one.slot.number == summary["winner"]["slot"])
    assert "sgd.lr" in winner.params and "lr" in summary["winner"]["params"]
    config = from_dict(RunConfig, read_yaml(tmp_path / "best.yaml"))
    assert config == plan.config("finals", winner.params, 0, "runs", "")


def test_infinite_values_do_not_break_the_file(tmp_path):
    plan = plan_of(metrics=["seconds"], finals=None)
    wild = [
        Ended(Slot(0), "done", {"method": "sogclr", "optimizer": "sgd"}, (math.inf,), evaluations=((1, (math.nan,)),)),
        Ended(Slot(1), "diverged", {"method": "sogclr", "optimizer": "sgd"}, None, error="=cmd()"),
    ]
    summary = summarize(plan, {"choices": wild}, {}, all_owed(plan))
    write_files(plan, summary, tmp_path)
    assert json.loads((tmp_path / "search.json").read_text())["phases"][0]["trials"][0]["values"] == [None]
    assert "'=cmd()" in (tmp_path / "search.csv").read_text(), "no formula for a spreadsheet"
