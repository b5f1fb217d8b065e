"""Runs with planned batches: partitions, to the bit after a kill, the same on two ranks."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullbatch as fb
from fullbatch.assembly import assemble, periods_of
from fullbatch.config.methods import METHODS
from fullbatch.config.optimization import Recovery
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Selection
from fullbatch.data.loader import LoadedBatch, SamplePool, TrainingBatches
from fullbatch.data.order import Order
from fullbatch.data.sample import BadSample
from fullbatch.distributed import World
from fullbatch.selection.periods import Periods, Plans, numbered
from fullbatch.selection.planning import Planners
from fullbatch.selection.selector import EmbeddingTable, Seen, Selector, text_keys
from fullbatch.training import checkpoint
from fullbatch.training.gradient import GradientRule
from fullbatch.training.run_folder import Folder
from fullbatch.training.trainer import Trainer
from fullbatch.training_run import train
from tests.distributed.test_training import check_curves, on_rank
from tests.resume.test_resume import go_on_from
from tests.tiers import first
from tests.training.linear import LinearBatches, LinearTowers
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
COSTS = ("seconds", "samples_per_second", "waiting", "selection_stall", "selection_seconds")

SPECTRAL = Selection(batches="spectral", planners=0)
ORDERED = Selection(batches="ordered", drawn_batches=9, kept_batches=3, planners=0)
AVERAGED = replace(ORDERED, drawn_batches=5, reading="averaged")
SELECTIONS = {
    "spectral": SPECTRAL,
    "spectral, waiting": replace(SPECTRAL, plan_ahead=False),
    "spectral, forward": replace(SPECTRAL, embeddings="forward"),
    "spectral, two steps a plan, blocks of two": replace(SPECTRAL, period_steps=2, block_batches=2),
    "spectral, blocks of two": replace(SPECTRAL, block_batches=2),
    "spectral, blocks of two, waiting": replace(SPECTRAL, block_batches=2, plan_ahead=False),
    "spectral in the last epoch": replace(SPECTRAL, uniform_epochs=3),
    "ordered": ORDERED,
    "ordered, forward and waiting": replace(ORDERED, embeddings="forward", plan_ahead=False),
    "averaged": AVERAGED,
}


def config_for(folder: Path, selection: Selection, method: str = "sogclr", **training: object) -> RunConfig:
    """40 samples in batches of 8, 20 batches."""
    config = small_config(folder, method, **training)
    steps = 20 // selection.batches_a_step
    samples = 8 * steps * selection.batches_a_step
    saved = replace(config.run, save_every=10 if selection.batches_a_step == 1 else 3)
    return replace(config, selection=selection, training=replace(config.training, samples=samples), run=saved)


def seen(rows):
    return Seen(rows, torch.zeros(len(rows), dtype=torch.int64))


def lines(run):
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in COSTS} for line in found]


def plans_of(run):
    return {first: np.load(path)["place"] for first, path in numbered(run / "batches", "plan").items()}


def loss_lines(run):
    return [json.loads(text) for text in (run / "batches" / "losses.jsonl").read_text().splitlines()]


# -- what is shown ----------------------------------------------------------------------------------------------------


@given(
    whole=st.integers(1, 9),
    batch=st.sampled_from([2, 4]),
    rest=st.integers(0, 1),
    steps=st.none() | st.integers(1, 12),
    block=st.integers(1, 4),
    unseen=st.integers(0, 8),
    ranks=st.sampled_from([1, 2]),
)
@settings(max_examples=40, deadline=None)
def test_a_spectral_epoch_is_a_partition(tmp_path_factory, whole, batch, rest, steps, block, unseen, ranks):
    """Each place of the uniform epoch once, whatever divides what, on any number of ranks."""
    folder = tmp_path_factory.mktemp("plans")
    selection = replace(SPECTRAL, period_steps=steps, block_batches=block, plan_ahead=False, embeddings="forward")
    order = Order((whole * batch + rest,), (1.0,), 3)
    plans = Plans(folder / "batches", Periods(selection, whole), batch)
    rows = torch.nn.functional.normalize(torch.randn(order.num_samples, 2, 4), dim=-1)
    rows[:unseen] = torch.nan
    selector = Selector(plans, order, Planners(0), lambda: seen(rows), lambda rows: 0.1, lambda: None)
    shown = []
    for numbers in selector.ranges(range(2 * whole)):
        for number in numbers:
            assert len({epoch for epoch, _ in on_ranks(plans, order, number, ranks)}) == 1
            shown += on_ranks(plans, order, number, ranks)
            assert on_ranks(plans, order, number, 1) == on_ranks(plans, order, number, ranks)
    assert sorted(shown) == [(epoch, place) for epoch in (0, 1) for place in range(whole * batch)]
    assert not numbered(folder / "batches", "snapshot")


def on_ranks(plans, order, number, ranks):
    """The epoch and the place of each row of a batch, rank after rank."""
    found = []
    for rank in range(ranks):
        world = World(rank, ranks)
        batches = TrainingBatches(None, order, plans.batch_size, None, None, world, plans)
        epoch, places = batches.places(number)
        found += [(epoch, place) for place in places.tolist()]
    return found


def simulated(plans, order, batches, table, stop):
    """The places of these batches, each of which leaves rows in the table as a training step would; up to ``stop``."""
    selector = Selector(plans, order, Planners(0), lambda: seen(table), lambda rows: 0.2, lambda: None)
    shown = {}
    with closing(selector):
        for numbers in selector.ranges(batches):
            for number in numbers:
                if number == stop:
                    return shown, table
                plan = plans.of(number)
                epoch, places = shown[number] = plan.epoch, plan.places(number)
                drawn = torch.Generator().manual_seed(number)
                rows = torch.randn(len(places), 2, 4, generator=drawn)
                table[torch.from_numpy(order.ids(epoch, places))] = torch.nn.functional.normalize(rows, dim=-1)
    return shown, table


@given(
    selection=st.sampled_from([*SELECTIONS.values()]).filter(lambda selection: selection.embeddings == "passes"),
    ahead=st.booleans(),
    saved=st.integers(0, 25),
    more=st.integers(0, 12),
    end=st.integers(26, 30),
)
@settings(max_examples=40, deadline=None)
@pytest.mark.slow
def test_a_run_goes_on_as_it_would_have(tmp_path_factory, selection, ahead, saved, more, end):
    """Saved after any batch, struck down at any later one: the batches that follow are the undisturbed run's, and what
    is told of them is, too."""
    order, batch = Order((23,), (1.0,), 5), 4
    periods = Periods(replace(selection, plan_ahead=ahead), order.epoch_size // batch)
    plans = [Plans(tmp_path_factory.mktemp("run") / "batches", periods, batch) for _ in range(2)]

    def fresh():
        return torch.full((23, 2, 4), torch.nan)

    whole, last = simulated(plans[0], order, range(end), fresh(), end)
    first, _ = simulated(plans[1], order, range(end), fresh(), saved + more)
    _, table = simulated(
        Plans(tmp_path_factory.mktemp("aside") / "batches", periods, batch), order, range(end), fresh(), saved
    )
    rest, again = simulated(Plans(plans[1].folder, periods, batch), order, range(saved, end), table, end)
    assert torch.equal(last.nan_to_num(), again.nan_to_num())
    for number, (epoch, places) in whole.items():
        for found in (first, rest):
            if number in found:
                assert found[number][0] == epoch and np.array_equal(found[number][1], places)
    assert rest.keys() == set(range(saved, end))
    told = [(each.folder / "losses.jsonl") for each in plans]
    assert told[0].exists() == told[1].exists() and (not told[0].exists() or told[0].read_text() == told[1].read_text())
    assert not numbered(plans[1].folder, "snapshot")


@pytest.mark.parametrize("end", [26, 29, 30])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_that_is_prolonged_shows_each_place_once(tmp_path, ahead, end):
    order, selection = Order((32,), (1.0,), 5), replace(SPECTRAL, block_batches=2, plan_ahead=ahead)
    plans = Plans(tmp_path / "batches", Periods(selection, 8), 4)
    table = torch.full((32, 2, 4), torch.nan)
    first, table = simulated(plans, order, range(end), table, end)
    rest, _ = simulated(Plans(plans.folder, plans.periods, 4), order, range(end, 40), table, 40)
    shown = sorted((epoch, place) for epoch, places in (first | rest).values() for place in places.tolist())
    assert shown == [(epoch, place) for epoch in range(5) for place in range(32)]
    assert [line["period"] for line in loss_lines(tmp_path)] == list(range(2 if ahead else 1, 5))


@given(whole=st.integers(1, 12), drawn=st.integers(1, 30), kept=st.integers(1, 30), averaged=st.booleans())
@settings(max_examples=60, deadline=None)
def test_periods_follow_each_other(whole, drawn, kept, averaged):
    kept = min(kept, drawn, whole) if averaged else min(kept, drawn)
    reading = "averaged" if averaged else "sequential"
    for selection in (
        Selection(batches="ordered", drawn_batches=drawn, kept_batches=kept, reading=reading),
        Selection(batches="spectral", period_steps=kept),
        Selection(batches="spectral"),
    ):
        periods, batch = Periods(selection, whole), 0
        for number in range(8):
            period = periods[number]
            assert period.number == number and period.batches.start == batch and len(period.batches)
            assert all(periods.of(each) == period for each in period.batches)
            batch = period.batches.stop


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_samples_and_crops_of_an_epoch_are_the_uniform_ones(tmp_path, monkeypatch, in_memory):
    """Only the company changes."""
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    config = config_for(tmp_path, SPECTRAL)
    config = replace(config, data=replace(config.data, in_memory=in_memory, crop=(0.3, 1.0), flip=True))
    run = train(config).folder
    batches = assemble(config, torch.device("cpu")).batches
    chosen = replace(batches, plans=Plans(run / "batches", periods_of(config, batches), 8, METHODS["sogclr"]))
    ours, theirs = ([source[number] for number in range(15, 20)] for source in (chosen, batches))
    in_order = [torch.cat([batch.ids for batch in found]).argsort() for found in (ours, theirs)]
    for name in ("ids", "images", "tokens"):
        one, other = (torch.cat([getattr(batch, name) for batch in found]) for found in (ours, theirs))
        assert torch.equal(one[in_order[0]], other[in_order[1]])
    assert {frozenset(b.ids.tolist()) for b in ours} != {frozenset(b.ids.tolist()) for b in theirs}
    planned = [torch.from_numpy(chosen.plans.of(number).log_c(number)) for number in range(15, 20)]
    assert all(torch.equal(batch.log_correction, log_c) for batch, log_c in zip(ours, planned, strict=True))
    assert torch.cat(planned).abs().min() > 0.0 and (chosen[0].log_correction == 0.0).all(), "nothing is known at first"


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_sample_that_stands_in_for_another_has_no_correction(tmp_path, monkeypatch, in_memory):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    config = config_for(tmp_path, SPECTRAL)
    config = replace(config, data=replace(config.data, in_memory=in_memory))
    run = train(config).folder
    read, bad = SamplePool.read, 11

    def cannot_read(self, index):
        if index == bad:
            raise BadSample("11", "broken")
        return read(self, index)

    monkeypatch.setattr(SamplePool, "read", cannot_read)
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr("fullbatch.data.in_memory._kept", {})
    batches = assemble(config, torch.device("cpu")).batches
    chosen = replace(batches, plans=Plans(run / "batches", periods_of(config, batches), 8, METHODS["sogclr"]))
    found = [chosen[number] for number in range(15, 20)]
    planned = [batches.order.ids(plan.epoch, plan.places(n)) for n in range(15, 20) if (plan := chosen.plans.of(n))]
    log_c = torch.cat([batch.log_correction for batch in found])
    assert torch.equal((log_c == 0).all(1), torch.from_numpy(np.concatenate(planned) == bad))
    assert bad not in torch.cat([batch.ids for batch in found])


@pytest.mark.parametrize(("method", "correction"), [("openclip", "normalizers"), ("sogclr", "none")])
def test_where_there_is_nothing_to_correct(tmp_path, monkeypatch, method, correction):
    given = []
    forward = fb.Objective.forward
    monkeypatch.setattr(fb.Objective, "forward", lambda self, *args: given.append(args[3]) or forward(self, *args))
    train(config_for(tmp_path, replace(SPECTRAL, correction=correction), method))
    assert len(given) == 20 and all(log_c is None for log_c in given)


def test_corrected_weights_are_another_run(tmp_path):
    """And the first two epochs, which are uniform, are the same."""
    runs = [
        train(renamed(config_for(tmp_path, replace(SPECTRAL, correction=kind)), kind)).folder
        for kind in ("normalizers", "weights", "none")
    ]
    losses = [[line["loss"] for line in lines(run)] for run in runs]
    assert losses[0][:10] == losses[1][:10] == losses[2][:10]
    assert losses[0][-1] != losses[1][-1] != losses[2][-1] != losses[0][-1]


class Slow(Planners):
    """Has made those pieces that were waited for, and no other."""

    def __init__(self):
        super().__init__(0)
        self.waited_for = []

    def finish(self, making):
        if not making.done():
            self.waited_for.append(making.task.batches)
        return super().finish(making)


def test_training_waits_for_a_piece_and_not_for_the_plan(tmp_path):
    order = Order((56,), (1.0,), 3)
    selection = replace(SPECTRAL, block_batches=3, embeddings="forward")
    plans, planners = Plans(tmp_path / "batches", Periods(selection, 14), 4), Slow()
    rows = torch.nn.functional.normalize(torch.randn(56, 2, 4), dim=-1)
    selector = Selector(plans, order, planners, lambda: seen(rows), lambda rows: 0.1, lambda: None)
    found = []
    for numbers in selector.ranges(range(35)):
        found.append(numbers)
        assert [piece.start for piece in planners.waited_for] == [earlier.start for earlier in found[1:]]
    assert found == [range(14), *(range(n, n + 3) for n in (14, 17, 20, 23)), range(26, 28),
                     *(range(n, n + 3) for n in (28, 31)), range(34, 35)]  # fmt: skip
    assert planners.waited_for[-1] == range(34, 37), "and what lies beyond the run's end is not planned"
    lines_of_losses = [json.loads(text) for text in (tmp_path / "batches" / "losses.jsonl").read_text().splitlines()]
    assert [line["period"] for line in lines_of_losses] == [1, 2]
    assert not numbered(tmp_path / "batches", "snapshot")


@pytest.mark.parametrize("ahead", [False, True])
def test_the_first_epochs_may_stay_uniform(tmp_path, ahead):
    run = train(config_for(tmp_path, replace(SPECTRAL, uniform_epochs=3, plan_ahead=ahead))).folder
    assert [line["period"] for line in loss_lines(run)] == [3] and sorted(plans_of(run)) == [15]


@pytest.mark.parametrize(("selection", "epochs"), [(ORDERED, 10), (AVERAGED, 2), (SPECTRAL, 3)])
@pytest.mark.parametrize("whole", [5, 100, 200])
def test_so_many_epochs_stay_uniform(selection, epochs, whole):
    selection = replace(selection, uniform_epochs=epochs)
    periods = Periods(selection, whole)
    start = periods[periods.first_planned].batches.start
    assert 0 <= start - epochs * periods.trained_batches < periods.length


def test_ordered_batches_have_the_largest_losses(tmp_path):
    run = train(config_for(tmp_path, ORDERED)).folder
    for plan in plans_of(run).values():
        assert plan.shape == (3, 8) and all(len(set(row)) == 8 for row in plan.tolist())
    found = loss_lines(run)
    assert [line["period"] for line in found] == list(range(2, 7))
    for line in found:
        assert sum(line["counts"]) <= 3 and len(line["edges"]) == len(line["counts"]) + 1
        assert line["mean"] >= line["uniform_mean"]


def test_the_table_holds_what_the_steps_embedded():
    table = EmbeddingTable(6, 3, torch.device("cpu"))
    image, text = torch.rand(2, 3, requires_grad=True), torch.rand(2, 3)
    tokens = torch.tensor([[5, 6, 0], [6, 5, 0]])
    table.put(torch.tensor([4, 1]), image, text, tokens)
    rows, texts = table.seen
    assert torch.equal(rows[4], torch.stack([image[0], text[0]]))
    assert rows[[0, 2, 3, 5]].isnan().all() and not rows.requires_grad
    assert texts[4] != texts[1] and (texts[[4, 1]] > 0).all() and (texts[[0, 2, 3, 5]] == 0).all()
    assert torch.equal(text_keys(tokens.int()), texts[[4, 1]]) and (text_keys(torch.rand(2, 3, 4, 4)) == 0).all()


# -- to the bit -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTIONS)
def test_twenty_batches_are_ten_and_ten(tmp_path, name):
    config = config_for(tmp_path, SELECTIONS[name])
    whole = train(config).folder
    half, end = (checkpoint.step_of(path) for path in checkpoint.checkpoints(whole / "checkpoints")[:2])
    copy = go_on_from(whole, tmp_path / "copy", half)
    train(renamed(config, "copy"), resume=copy)
    assert differences(saved_state(whole, end), saved_state(copy, end)) == []
    assert lines(whole) == lines(copy)
    assert loss_lines(whole) == loss_lines(copy)
    ours, theirs = plans_of(copy), plans_of(whole)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[number], theirs[number]) for number in ours)


def check_goes_on(whole, run, config, end=20):
    train(renamed(config, run.name), resume=run)
    assert differences(saved_state(whole, end), saved_state(run, end)) == []
    assert lines(whole) == lines(run)
    assert loss_lines(whole) == loss_lines(run)
    assert not list((run / "batches").glob(".*")) and not numbered(run / "batches", "snapshot")


class Struck(Exception):
    """Where a run is struck down; no code of the run looks out for it."""


def struck(monkeypatch, owner, name, calls, after):
    """The call number ``calls`` of a function strikes, before or after it has done its work."""
    function, made = getattr(owner, name), 0

    def wrapper(*args, **kwargs):
        nonlocal made
        made += 1
        if made == calls and not after:
            raise Struck
        result = function(*args, **kwargs)
        if made == calls and after:
            raise Struck
        return result

    monkeypatch.setattr(owner, name, wrapper)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["_write_down", "_add_line", "_end_plan"])
@pytest.mark.parametrize("name", ["spectral, two steps a plan, blocks of two", "ordered, forward and waiting"])
def test_struck_down_while_it_plans(tmp_path, name, where, after):
    config = config_for(tmp_path, SELECTIONS[name])
    config = replace(config, run=replace(config.run, save_every=3))
    whole = train(config).folder
    config = renamed(config, "struck")
    with pytest.MonkeyPatch.context() as patch:
        struck(patch, Selector, where, 2, after)
        with pytest.raises(Struck):
            train(config)
    check_goes_on(whole, tmp_path / "struck", config)


@pytest.mark.parametrize("step", first([9, 14], of=[5, 9, 11, 14]))
def test_struck_down_in_a_step(tmp_path, step):
    """With the checkpoint some steps back, in the period before or in the same one."""
    config = config_for(tmp_path, SPECTRAL)
    config = replace(config, run=replace(config.run, save_every=4))
    whole = train(config).folder
    config = renamed(config, "struck")
    with pytest.MonkeyPatch.context() as patch:
        struck(patch, Trainer, "train_step", step, after=True)
        with pytest.raises(Struck):
            train(config)
    check_goes_on(whole, tmp_path / "struck", config)


def test_a_run_from_before_corrections_goes_on_without_them(tmp_path):
    config = config_for(tmp_path, SPECTRAL)
    run = go_on_from(train(config).folder, tmp_path / "copy", 10)
    values = (run / "config.yaml").read_text()
    assert "correction: normalizers" in values
    (run / "config.yaml").write_text(values.replace("  correction: normalizers\n", ""))
    assert Folder(run).read_config().selection.correction == "none"
    with pytest.raises(ValueError, match="--resume cannot change --correction"):
        train(renamed(config, "copy"), resume=run)


def test_a_snapshot_from_before_texts_were_kept(tmp_path):
    config = config_for(tmp_path, SPECTRAL)
    whole = train(config).folder
    config = renamed(config, "struck")
    with pytest.MonkeyPatch.context() as patch:
        struck(patch, Trainer, "train_step", 13, after=True)
        with pytest.raises(Struck):
            train(config)
    run = tmp_path / "struck"
    snapshot = next((run / "batches").glob("snapshot-*.npy"))
    snapshot.with_suffix(".texts").unlink()
    np.save(run / "batches" / "period-000001.npy", np.zeros(3))
    train(config, resume=run)
    assert saved_state(run, 20)["position"] == saved_state(whole, 20)["position"]
    assert not numbered(run / "batches", "period")


def stopped_at(batch, tmp_path):
    """A selection of blocks of two in epochs of five, with the table as it is then."""
    order, plans = Order((22,), (1.0,), 5), Plans(tmp_path / "batches", Periods(SELECTIONS[BLOCKS], 5), 4)
    shown, table = simulated(plans, order, range(30), torch.full((22, 2, 4), torch.nan), batch)
    return order, Plans(plans.folder, plans.periods, 4), shown, table


BLOCKS = "spectral, blocks of two, waiting"


@pytest.mark.parametrize("odd", ['{"step": 16}', '{"step": 16, "period": null}', '{"step": 16, "period": "x"}', "[1]"])
def test_an_odd_line_of_losses_is_left_out(tmp_path, odd, caplog):
    order, plans, _, table = stopped_at(12, tmp_path)
    losses = tmp_path / "batches" / "losses.jsonl"
    before = losses.read_text()
    losses.write_text(odd + "\n" + before)
    simulated(plans, order, range(12, 30), table, 13)
    assert losses.read_text() == before and "1 of 2 lines cannot be read" in caplog.text


@pytest.mark.parametrize("damage", [False, True])
def test_a_plan_of_an_earlier_version_is_gone_on_with(tmp_path, damage, caplog):
    """It had no corrections, and lay in one file a period."""
    order, plans, shown, table = stopped_at(11, tmp_path)
    shutil.rmtree(plans.folder)
    plans.folder.mkdir()
    pieces = numbered(stopped_at(15, tmp_path / "later")[1].folder, "plan")  # all of that period, by then
    whole = np.concatenate([np.load(pieces[first])["place"] for first in (10, 12, 14)])
    np.save(plans.folder / "period-000002.npy", whole[:-1] if damage else whole)
    np.save(plans.folder / "period-000004.npy", whole)  # later than the checkpoint
    rest, _ = simulated(plans, order, range(11, 30), table, 30)
    assert ("is damaged; it is made again" in caplog.text) == damage and not numbered(plans.folder, "period")
    if not damage:
        assert np.array_equal([(shown | rest)[number][1] for number in range(10, 15)], whole)
    for epoch in (3, 4, 5):
        assert sorted(np.concatenate([places for each, places in rest.values() if each == epoch])) == list(range(20))


def test_a_plan_that_was_lost_is_made_anew(tmp_path, caplog):
    config = config_for(tmp_path, SPECTRAL)
    whole = train(config).folder
    copy = go_on_from(whole, tmp_path / "copy", 10)
    shutil.rmtree(copy / "batches")
    train(renamed(config, "copy"), resume=copy)
    assert "period 2 is planned by the embeddings of this checkpoint" in caplog.text
    assert saved_state(copy, 20)["position"]["step"] == 20
    shown = np.sort(plans_of(copy)[10].reshape(-1))
    assert np.array_equal(shown, np.arange(40))


def test_plans_are_kept_as_long_as_a_checkpoint_needs_them(tmp_path):
    config = config_for(tmp_path, SPECTRAL)
    config = replace(config, run=replace(config.run, keep=1, save_every=5))
    config = replace(config, training=replace(config.training, samples=8 * 40))
    # the last period began at step 35, with the checkpoint of 30
    assert sorted(plans_of(train(config).folder)) == [30, 35]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spectral", "ordered"])
def test_other_processes_change_nothing(tmp_path, name):
    """Planners and data workers of their own, and everything else switched on."""
    config = config_for(tmp_path, SELECTIONS[name], "fastclip_v3", ema=0.9, micro_batch=3)
    alone = train(config).folder
    helped = replace(config, selection=replace(config.selection, planners=2), data=replace(config.data, workers=2))
    run = train(renamed(helped, "helped")).folder
    assert differences(saved_state(alone, 20), saved_state(run, 20)) == []
    assert lines(alone) == lines(run)
    spent = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("selection_seconds", 0.0) > 0.0 for line in spent)
    assert all("selection_stall" not in line for line in spent[1:3])  # within a period


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spectral", "ordered", "averaged"])
def test_with_the_data_in_memory(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    config = config_for(tmp_path, SELECTIONS[name])
    config = replace(config, data=replace(config.data, in_memory=True, flip=True, crop=(0.5, 1.0)))
    whole = train(config).folder
    half, end = (checkpoint.step_of(path) for path in checkpoint.checkpoints(whole / "checkpoints")[:2])
    check_goes_on(whole, go_on_from(whole, tmp_path / "copy", half), config, end)


def test_with_a_recovery_before_it(tmp_path):
    config = replace(config_for(tmp_path, SPECTRAL, "tuneclip"), recovery=Recovery(recovery_steps=6, recovery_batch=16))
    config = replace(config, training=replace(config.training, samples=8 * 14))
    whole = train(config).folder
    check_goes_on(whole, go_on_from(whole, tmp_path / "copy", 10), config)


def test_joined_batches_of_a_recovery_are_uniform(tmp_path):
    """A correction is for a batch as it was planned: without one, u would settle at what hard batches show."""
    config = replace(config_for(tmp_path, SPECTRAL, "tuneclip"), recovery=Recovery(recovery_steps=7, recovery_batch=16))
    config = replace(config, training=replace(config.training, samples=8 * 14), run=replace(config.run, save_every=7))
    run = train(config).folder
    uniform = train(renamed(replace(config, selection=Selection()), "uniform")).folder
    assert differences(saved_state(run, 7)["objective"], saved_state(uniform, 7)["objective"]) == []
    assert [line["period"] for line in loss_lines(run)] == [4, 5, 6]  # period 3 has the last of the recovery
    single = replace(config, recovery=Recovery(recovery_steps=17))
    assert [line["period"] for line in loss_lines(train(renamed(single, "single")).folder)] == [2, 3, 4, 5, 6]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["spectral", "ordered"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_replayed_step_fills_the_table_as_a_plain_one(tmp_path, monkeypatch, name, in_memory):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    config = config_for(tmp_path, SELECTIONS[name])
    config = replace(config, training=replace(config.training, device="cuda", samples=8 * 30))
    config = replace(config, run=replace(config.run, save_every=5), data=replace(config.data, in_memory=in_memory))
    plain = train(config).folder
    graphs = train(renamed(replace(config, training=replace(config.training, graphs=True)), "graphs")).folder
    for step in (5, 15):
        ours, theirs = (saved_state(run, step)["table"]["rows"] for run in (graphs, plain))
        assert torch.allclose(ours, theirs, atol=2e-2, equal_nan=True), step
    assert [line["step"] for line in lines(graphs)] == list(range(1, 31))
    copy = go_on_from(graphs, tmp_path / "copy", 15)
    train(renamed(replace(config, training=replace(config.training, graphs=True)), "copy"), resume=copy)
    assert saved_state(copy, 30)["position"]["step"] == 30


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spectral", "ordered", "spectral, forward"])
def test_two_ranks_reproduce_one(tmp_path, two_ranks, name):
    # Half a batch is rounded otherwise (2e-7), and of a hundred plans that turns one or two; with this seed, none here.
    config = config_for(tmp_path, SELECTIONS[name], seed=1)
    one = train(config).folder
    two_ranks.run(on_rank, renamed(config, "two"), None)
    ours, theirs = plans_of(tmp_path / "two"), plans_of(one)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[number], theirs[number]) for number in ours)
    check_curves(one, tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallel"), [("spectral", "ddp"), ("spectral", "fsdp"), ("averaged", "ddp")])
def test_two_ranks_go_on(tmp_path, two_ranks, name, parallel):
    config = config_for(tmp_path, SELECTIONS[name], parallel=parallel)
    two_ranks.run(on_rank, config, None)
    whole = tmp_path / "run"
    half, end = (checkpoint.step_of(path) for path in checkpoint.checkpoints(whole / "checkpoints")[:2])
    copy = go_on_from(whole, tmp_path / "copy", half)
    two_ranks.run(on_rank, renamed(config, "copy"), copy)
    assert differences(saved_state(whole, end), saved_state(copy, end)) == []
    assert lines(whole) == lines(copy)


def test_averaged_batches_on_two_ranks(tmp_path, two_ranks):
    config = config_for(tmp_path, AVERAGED, micro_batch=2)
    one = train(config).folder
    two_ranks.run(on_rank, renamed(config, "two"), None)
    for ours, theirs in zip(lines(tmp_path / "two"), lines(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)


def test_the_gradient_of_batches_apart_is_the_mean_of_theirs():
    """Of a linear model in float64: as if each batch had a step's gradient of its own."""
    batches, towers = LinearBatches(12, 4), LinearTowers()
    objective = fb.make_objective("openclip").double()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    means = [torch.zeros_like(weight) for weight in towers.parameters()]
    for number in range(3):
        GradientRule()(towers, objective, batches.batch(number), 0, scaler)
        for mean, weight in zip(means, towers.parameters(), strict=True):
            mean += weight.grad / 3
        towers.zero_grad()
    for micro in (None, 2):
        rule = GradientRule(micro_batch=micro, apart=3)
        output = rule(towers, objective, LoadedBatch.joined([batches.batch(number) for number in range(3)]), 0, scaler)
        assert output.loss.ndim == 0
        for mean, weight in zip(means, towers.parameters(), strict=True):
            torch.testing.assert_close(weight.grad, mean, rtol=1e-12, atol=1e-12)
        towers.zero_grad()


def test_a_rehearsal_takes_no_more_rows_than_a_step_does_at_once(monkeypatch):
    batches, towers = LinearBatches(12, 4), LinearTowers()
    monkeypatch.setattr("fullbatch.distributed.towers.lays_out_gradients", lambda model: True)
    rows = []
    towers.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    joined = LoadedBatch.joined([batches.batch(number) for number in range(3)])
    for micro, most in ((None, 4), (2, 2)):
        GradientRule(micro_batch=micro, apart=3).rehearse(towers, joined, 0)
        assert rows == [most] and all(weight.grad is None for weight in towers.parameters())
        rows.clear()


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": "hard"}, "batches must be one of"),
        ({"batches": "ordered", "kept_batches": 20, "drawn_batches": 10}, "at most drawn_batches"),
        ({"batches": "ordered", "period_steps": 5}, "period_steps must be left out"),
        ({"batches": "ordered", "reading": "averaged", "graphs": True}, "sequential.* with graphs"),
        ({"batches": "ordered", "reading": "averaged", "recovery_steps": 2}, "sequential.* with a recovery"),
        ({"planners": -1}, "planners must be a whole number"),
        *(
            ({name: 0}, f"{name} must be")
            for name in ("block_batches", "drawn_batches", "kept_batches", "period_steps")
        ),
    ],
)
def test_what_does_not_go_together(change, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.of(**change)


def test_keeping_more_than_there_is(tmp_path):
    with pytest.raises(ValueError, match="--kept-batches 6 is more than the 5 batches of an epoch"):
        train(config_for(tmp_path, replace(AVERAGED, kept_batches=6, drawn_batches=6)))


def test_a_run_does_not_change_its_selection(tmp_path):
    config = config_for(tmp_path, SPECTRAL)
    run = train(config).folder
    with pytest.raises(ValueError, match="cannot change --batches"):
        train(replace(config, selection=Selection()), resume=run)
