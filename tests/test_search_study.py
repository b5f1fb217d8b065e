"""The study of the search: its plans confound nothing, it goes on where it stopped, and its shares are known ones."""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import fullbatch as fb
from fullbatch.cli.train import train_config
from fullbatch.config.tree import to_dict
from fullbatch.trials.comparison_plan import plan_from
from fullbatch.trials.phases import slots_of
from fullbatch.trials.search_plan import search_from
from tests.data.making import captioned, write_shard
from tests.training.small import TOWERS

FOLDER = Path(__file__).parent.parent / "benchmarks"
for folder in ("icons", "search"):
    sys.path.insert(0, str(FOLDER / folder))

import redraw  # noqa: E402
import search_study  # noqa: E402
import search_tables  # noqa: E402
import towers  # noqa: E402
from icon_pack import Entry  # noqa: E402
from search_tables import Trial  # noqa: E402

SETTING = search_study.Setting(Path("icons"), Path("towers"), device="cpu")


def whole(values):
    """As `fullbatch search` reads it."""
    return search_from({**values, "base": to_dict(train_config([], values["base"])[0])})


# ---------------------------------------------------------------------------------------------------------------------
# plans


def test_every_loss_meets_every_optimizer_equally_often_at_one_temperature():
    plan = whole(search_study.losses_plan(SETTING))
    slots = slots_of("choices", plan, {})
    pairs = Counter((slot.params["method"], slot.params["optimizer"]) for slot in slots)
    assert len(pairs) == 24 and set(pairs.values()) == {search_study.TURNS}
    for method, optimizer in pairs:
        (rate,) = plan.dimensions("choices", method, optimizer).values()
        assert (rate.low, rate.high) == search_study.RATES[optimizer]
        config = plan.config("choices", {"method": method, "optimizer": optimizer}, None, "runs", "run")
        assert config.objective.build().temperature.temperature == search_study.TEMPERATURE
        assert config.optimizer.temperature_lr == (1e-6 if method == "openclip" else None), "it stays there"
        assert config.model.image_weights and config.model.text_weights and config.data.image_size == 96
        assert all("choose.tar" in task for task in config.evaluation.evaluate)


def test_the_temperature_is_searched_apart_with_what_moves_it():
    plan = whole(search_study.temperature_plan(SETTING))
    shared, own = {"temperature", "adamw.lr"}, {"settings.temperature_lr", "rho"}
    assert set(plan.dimensions("choices", "sogclr", "adamw")) == shared
    assert set(plan.dimensions("choices", "isogclr_new_v2", "adamw")) == shared | own
    assert plan.space["rho"].high < math.log(search_study.BATCH - 1), "more no softmax over a batch can use"
    assert Counter(slot.params["method"] for slot in slots_of("choices", plan, {})) == dict.fromkeys(
        search_study.LOSSES, search_study.TEMPERATURE_TRIALS
    )


@pytest.mark.parametrize("loss", ["isogclr_new", "isogclr_new_v2"])
def test_temperatures_of_single_samples_move_and_stay_off_their_bounds(loss):
    """In six visits, as many as a run has, of embeddings that are about half learned."""
    plan = whole(search_study.losses_plan(SETTING))
    settings = plan.config("choices", {"method": loss, "optimizer": "adamw"}, None, "", "").objective.settings
    rng = torch.Generator().manual_seed(0)
    image = torch.nn.functional.normalize(torch.randn(512, 64, generator=rng), dim=1)
    text = torch.nn.functional.normalize(image + 1.2 * torch.randn(512, 64, generator=rng) / 8.0, dim=1)
    ends = {}
    for name, given in (("repaired", dict(settings)), ("former", {})):
        objective = fb.make_objective(loss, num_samples=512, **given)
        for _ in range(6):
            for rows in torch.randperm(512, generator=rng).split(128):
                metrics = objective(image[rows], text[rows], rows).metrics
        ends[name] = metrics
    assert float(ends["repaired"]["tau_min"]) > 0.012 and float(ends["repaired"]["tau_max"]) < 0.15
    assert float(ends["repaired"]["tau_max"]) - float(ends["repaired"]["tau_min"]) > 0.002, "each has its own"
    former = float(ends["former"]["tau"])
    assert former == pytest.approx(0.01, rel=0.03) if loss == "isogclr_new" else 0.005 <= former < 0.0065


# ---------------------------------------------------------------------------------------------------------------------
# what is said of the trials


def trials_of(value, turns=4, seed=0):
    """An even design, with a little noise."""
    rng = np.random.default_rng(seed)
    found = []
    for loss in search_study.LOSSES:
        for optimizer, (low, high) in search_study.RATES.items():
            for turn in range(turns):
                place = (turn + rng.random()) / turns
                score = value(loss, optimizer, place) + 0.1 * rng.standard_normal()
                found.append(Trial(loss, optimizer, low * (high / low) ** place, None, score))
    return found


@pytest.mark.slow
def test_importance_finds_what_decides_and_says_how_surely():
    trials = trials_of(lambda loss, optimizer, place: 20.0 - 40.0 * (place - 0.5) ** 2 + (loss == "sogclr"))
    shares = search_tables.importance(trials)
    assert shares["rate"] > 0.9 and shares["rate"] > shares["loss"] > shares["optimizer"]
    spread = search_tables.bootstrap(trials, search_tables.importance, 5)
    assert spread["rate"][0] <= shares["rate"] + 0.05 and spread["rate"][1] > 0.9
    assert all(0.0 <= low <= high <= 1.0 for low, high in spread.values())
    best = search_tables.sums_of_squares(search_tables.at_best_rates(trials))
    assert best["loss"] > best["optimizer"], "with its own rate every optimizer is as good"


def test_one_rate_for_all_is_an_optimizer_in_disguise():
    trials = trials_of(lambda loss, optimizer, place: 20.0 - 40.0 * (place - 0.5) ** 2 + (loss == "sogclr"), turns=8)
    one = search_tables.sums_of_squares(search_tables.at_one_rate(trials, search_tables.REPORTED_RATE))
    assert one["optimizer"] > 0.8


def test_sums_of_squares_add_up():
    by_loss = np.array([[1.0, 1.0], [3.0, 3.0]])
    assert search_tables.sums_of_squares(by_loss) == {"loss": 1.0, "optimizer": 0.0, "together": 0.0}
    assert search_tables.sums_of_squares(np.array([[1.0, 0.0], [0.0, 1.0]]))["together"] == 1.0
    assert sum(search_tables.sums_of_squares(np.random.default_rng(0).random((4, 6))).values()) == pytest.approx(1.0)


def test_a_rate_near_an_end_is_marked():
    inside, near = (Trial("openclip", "adamw", rate, None, 5.0) for rate in (3e-4, 2.9e-3))
    assert not search_tables.at_the_edge(inside) and search_tables.at_the_edge(near)
    assert "5.0 (0.003*)" in search_tables.best_table([near])


def test_finals_are_held_against_openclip_seed_by_seed():
    rows = {"openclip": {0: 10.0, 1: 11.0, 2: 12.0}, "sogclr": {0: 11.0, 1: 12.0, 2: 13.0}, "as reported": {0: 1.0}}
    text = search_tables.finals_table(rows)
    assert "| openclip | 11.00 ± 1.00 | 3 |  |" in text
    assert "| sogclr | 12.00 ± 1.00 | 3 | +1.00 (+1.00 … +1.00) |" in text
    assert "| as reported | 1.00 | 1 |  |" in text


def test_tables_and_the_plot_are_of_what_was_kept(tmp_path):
    """A score that rises with the temperature and falls away from the middle rate."""
    search_tables.write(tmp_path, draws=1)
    assert (tmp_path / "tables.md").read_text().strip() == "", "nothing was run yet"
    trials = trials_of(lambda loss, optimizer, place: 20.0 - 40.0 * (place - 0.5) ** 2, turns=2)
    searched = [trial for trial in trials_of(lambda *_: 0.0, turns=4) if trial.optimizer == "adamw"]
    params = {
        "losses": [(trial.score, {"lr": trial.rate}, trial) for trial in trials],
        "temperature": [
            (20.0 * t, {"lr": trial.rate, "temperature": t}, trial)
            for trial, t in zip(searched, np.geomspace(0.01, 0.2, len(searched)), strict=True)
        ],
    }
    for name, rows in params.items():
        (tmp_path / name).mkdir()
        found = [
            {"values": [score / 100.0], "params": {"method": trial.loss, "optimizer": trial.optimizer, **more}}
            for score, more, trial in rows
        ]
        (tmp_path / name / "search.json").write_text(json.dumps({"phases": [{"trials": found}]}))
    (tmp_path / "losses" / "temperatures.json").write_text(
        json.dumps([{"method": "isogclr_new", "tau": 0.04, "tau_min": 0.03, "tau_max": 0.06}])
    )
    search_tables.write(tmp_path, draws=1)
    text = (tmp_path / "tables.md").read_text()
    assert "all at 0.0002, as reported" in text and "| `isogclr_new` | 0.040 | 0.030 | 0.060 |" in text
    assert "over all rates and temperatures (fANOVA)" in text and (tmp_path / "search.svg").is_file()


# ---------------------------------------------------------------------------------------------------------------------
# towers and icons


def test_a_smaller_tokenizer_splits_what_it_was_made_for_as_before():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##a", "##b", "ab", "##ab", "aba", "bell"]
    special = {
        name: {"id": name, "ids": [2 if name == "[CLS]" else 3], "tokens": [name]} for name in ("[CLS]", "[SEP]")
    }
    tokenizer = {
        "added_tokens": [{"id": row, "content": words[row]} for row in range(4)],
        "post_processor": {"special_tokens": special},
        "padding": {"pad_id": 0, "pad_token": "[PAD]"},
        "model": {"vocab": {word: row for row, word in enumerate(words)}},
    }
    tokens = towers.kept_tokens(tokenizer, ["ab", "##a"])
    assert tokens == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##a", "##b", "ab"]
    smaller = towers.smaller_tokenizer(tokenizer, tokens)
    assert smaller["model"]["vocab"]["ab"] == 8 and tokenizer["model"]["vocab"]["ab"] == 8
    assert smaller["post_processor"]["special_tokens"]["[SEP]"]["ids"] == [3]


def test_halves_are_of_numbers_that_learn():
    halves = towers.halved({"weight": torch.ones(2, 2).T, "count": torch.tensor(3)})
    assert halves["weight"].dtype == torch.float16 and halves["count"].dtype == torch.int64


def test_test_pairs_have_words_that_are_still_taught():
    def entry(caption, split):
        return Entry("made", caption.replace(" ", "-"), split, "", "", (caption,))

    known = [entry(f"bell {word}", "train") for word in ("on", "off", "up", "down")]
    entries = [*known, entry("bell", "test"), entry("bell zebra", "test")]
    found = redraw.chosen(entries, train=3, test=5)
    assert [one.split for one in found] == ["train"] * 3 + ["test"] and found[-1].captions == ("bell",)


# ---------------------------------------------------------------------------------------------------------------------
# a rehearsal


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Two losses, two optimizers, towers of one layer."""
    monkeypatch.setattr(search_study, "RATES", {name: search_study.RATES[name] for name in ("adamw", "sgd")})
    monkeypatch.setattr(search_study, "LOSSES", ("openclip", "isogclr_new"))
    monkeypatch.setattr(search_study, "SEEDS", (0, 1))
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(20):
        write_shard(data / f"train-{shard:05d}.tar", captioned(2, (20, 16), shard))
    write_shard(data / "test-00000.tar", captioned(12, (20, 16), 30))
    (tmp_path / "model.json").write_text(json.dumps(TOWERS))
    search_study.split(data)
    return search_study.Setting(Path("data"), None, "model.json", samples=32, batch=8, device="cpu")


@pytest.mark.slow
def test_the_study_goes_on_where_it_stopped(small, tmp_path):
    out, none_begun, more = tmp_path / "out", ["--stop-after", "0.000001"], ["--jobs", "1"]
    losses = search_study.losses_plan(small, turns=2)
    with pytest.raises(SystemExit, match="trials of 'losses' have not ended: go on"):
        search_study.search(losses, out, none_begun)
    assert len(search_study.search(losses, out, more)["phases"][0]["trials"]) == 8
    ends = {path: path.stat().st_mtime_ns for path in (out / "losses" / "trials").glob("*/trial.json")}
    summaries = {"losses": search_study.search(losses, out, more)}
    assert ends == {path: path.stat().st_mtime_ns for path in ends} and len(ends) == 8, "nothing is trained twice"
    summaries["temperature"] = search_study.search(search_study.temperature_plan(small, trials=2), out, more)

    finals = search_study.finals_plan(small, out, summaries)
    plan = plan_from({**finals, "base": to_dict(train_config([], finals["base"])[0])})
    assert [row.name for row in plan.methods] == [
        *("openclip", "isogclr_new", "openclip, own temperature", "isogclr_new, own temperature", "as reported"),
    ]
    best = search_study.best_trials(summaries["losses"])
    of_search = search_from(yaml.safe_load((out / "losses" / "search.yaml").read_text()))
    for run in plan.planned:
        config = plan.config(run, "runs")
        assert all("final.tar" in task for task in config.evaluation.evaluate)
        if run.row.name in best:
            trial = of_search.config("choices", best[run.row.name]["params"], run.seed, "runs", run.name)
            assert config.objective == trial.objective and config.optimizer == trial.optimizer, "what was chosen is run"
    with pytest.raises(SystemExit, match="have not ended"):
        search_study.compare(finals, out, none_begun)
    assert all(run["status"] == "done" for run in search_study.compare(finals, out, more)["runs"])

    search_study.gather(out, tmp_path / "kept")
    kept = tmp_path / "kept"
    assert len(search_tables.read_trials(kept / "losses")) == 8
    ends = json.loads((kept / "losses" / "temperatures.json").read_text())
    assert all(row["tau"] == pytest.approx(0.05, abs=1e-4) for row in ends if row["method"] == "openclip"), "it stays"
    assert len(ends) == 8 and "`isogclr_new` | 0.0" in search_tables.temperatures_table(kept)
    assert len(search_tables.read_finals(kept)) == 5
    search_tables.write(kept, draws=2)
    assert "as reported" in (kept / "tables.md").read_text()
