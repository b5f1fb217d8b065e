"""Runs with planned batches: what is shown, and when; mistakes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullbatch as fb
from fullbatch.assembly import assemble, periods_of
from fullbatch.config.methods import METHODS
from fullbatch.config.run import RunConfig
from fullbatch.config.training import Selection
from fullbatch.data.loader import SamplePool, TrainingBatches
from fullbatch.data.order import Order
from fullbatch.data.sample import BadSample
from fullbatch.distributed import World
from fullbatch.selection.periods import Periods, Plans, numbered
from fullbatch.selection.planning import Planners
from fullbatch.selection.selector import EmbeddingTable, Selector, text_keys
from fullbatch.training_run import train
from tests.selection.planned import (
    AVERAGED,
    ORDERED,
    SELECTIONS,
    SPECTRAL,
    config_for,
    lines,
    loss_lines,
    plans_of,
    seen,
    simulated,
)
from tests.training.small import renamed

pytestmark = pytest.mark.filterwarnings("ignore:rho=")


@given(
    whole=st.integers(1, 9),
    batch=st.sampled_from([2, 4]),
    rest=st.integers(0, 1),
    steps=st.none() | st.integers(1, 12),
    block=st.integers(1, 4),
    unseen=st.integers(0, 8),
    ranks=st.sampled_from([1, 2]),
)
@settings(max_examples=40)
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


@given(
    selection=st.sampled_from([*SELECTIONS.values()]).filter(lambda selection: selection.embeddings == "passes"),
    ahead=st.booleans(),
    saved=st.integers(0, 25),
    more=st.integers(0, 12),
    end=st.integers(26, 30),
)
@settings(max_examples=40)
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
@settings(max_examples=60)
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


@pytest.mark.parametrize(("selection", "uniform"), [(replace(SPECTRAL, uniform_epochs=4), 20), (SPECTRAL, 10)])
def test_a_run_too_short_for_its_selection_is_told(selection, uniform, tmp_path, caplog):
    """It would be a uniform run, silently."""
    config = config_for(tmp_path, selection)
    train(replace(config, training=replace(config.training, samples=8 * 20)))
    told = f"the first {uniform} batches are uniform and the run reads 20, so none is selected"
    assert (told in caplog.text) == (uniform >= 20)


@pytest.mark.parametrize(("selection", "epochs"), [(ORDERED, 10), (AVERAGED, 2), (SPECTRAL, 3)])
@pytest.mark.parametrize("whole", [5, 100, 200])
def test_so_many_epochs_stay_uniform(selection, epochs, whole):
    selection = replace(selection, uniform_epochs=epochs)
    periods = Periods(selection, whole)
    start = periods[periods.first_planned].batches.start
    assert 0 <= start - epochs * periods.trained_batches < periods.length


@pytest.mark.parametrize(("whole", "kept"), [(20, 150), (7, 3)])
def test_uniform_epochs_before_ordered_batches_show_each_place_once(tmp_path, whole, kept):
    """A period is shorter than an epoch, or as long as several: it neither leaves samples out nor repeats batches."""
    selection = replace(ORDERED, drawn_batches=200, kept_batches=kept, uniform_epochs=3)
    plans = Plans(tmp_path, Periods(selection, whole), 4)
    found = [plans.of(batch) for batch in range(3 * whole)]
    assert all(batch in plan.batches for batch, plan in enumerate(found))
    shown = [(plan.epoch, place) for batch, plan in enumerate(found) for place in plan.places(batch).tolist()]
    assert shown == [(epoch, place) for epoch in range(3) for place in range(4 * whole)]


def test_ordered_batches_have_the_largest_losses(tmp_path):
    run = train(config_for(tmp_path, ORDERED)).folder
    for plan in plans_of(run).values():
        assert plan.shape == (3, 8) and all(len(set(row)) == 8 for row in plan.tolist())
    found = loss_lines(run)
    assert [line["period"] for line in found] == list(range(2, 7))
    for line in found:
        assert sum(line["counts"]) <= 3 and len(line["edges"]) == len(line["counts"]) + 1
        assert line["mean"] >= line["uniform_mean"]


def test_a_sample_that_comes_twice_does_not_meet_itself(tmp_path):
    """Of a source that counts twice: its two showings are as alike as can be, and would be each other's negatives."""
    order, selection = Order((16, 8), (2.0, 1.0), 3), replace(SPECTRAL, plan_ahead=False, embeddings="forward")
    plans = Plans(tmp_path / "batches", Periods(selection, 5), 8)
    rows = torch.nn.functional.normalize(torch.randn(24, 2, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    shown, _ = simulated(plans, order, range(5), rows, 5)
    assert all(len(set(order.ids(epoch, places).tolist())) == 8 for epoch, places in shown.values())


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


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": "hard"}, "batches must be one of"),
        ({"batches": "ordered", "kept_batches": 20, "drawn_batches": 10}, "at most drawn_batches"),
        ({"batches": "ordered", "period_steps": 5}, "period_steps must be left out"),
        ({"batches": "ordered", "reading": "averaged", "graphs": True}, "sequential.* with graphs"),
        ({"batches": "ordered", "reading": "averaged", "recovery_steps": 2}, "sequential.* with a recovery"),
        ({"batches": "spectral", "reading": "averaged"}, 'reading must be left out but with batches="ordered"'),
        ({"uniform_epochs": 2}, 'uniform_epochs must be left out with batches="uniform", got 2'),
        ({"correction": "weights"}, 'correction must be left out with batches="uniform"'),
        (
            {"batches": "spectral", "correction": "weights", "method": "openclip"},
            'correction must not be "weights" for openclip: it keeps no normalizers',
        ),
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
