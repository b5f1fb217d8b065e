"""Runs with planned batches go on to the bit after a kill, and are the same on two ranks."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import fullbatch as fb
from fullbatch.config.optimization import Recovery
from fullbatch.config.training import Selection
from fullbatch.data.loader import LoadedBatch
from fullbatch.data.order import Order
from fullbatch.selection.periods import Periods, Plans, numbered
from fullbatch.selection.selector import Selector
from fullbatch.training import checkpoint
from fullbatch.training.gradient import GradientRule
from fullbatch.training.run_folder import Folder
from fullbatch.training.trainer import Trainer
from fullbatch.training_run import train
from tests.distributed.test_training import check_curves, on_rank
from tests.resume.test_resume import go_on_from
from tests.selection.planned import (
    AVERAGED,
    SELECTIONS,
    SPECTRAL,
    check_plans,
    config_for,
    lines,
    loss_lines,
    plans_of,
    simulated,
)
from tests.tiers import first
from tests.training.linear import LinearBatches, LinearTowers
from tests.training.small import differences, renamed, saved_state

pytestmark = pytest.mark.filterwarnings("ignore:rho=")


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
    check_plans(copy, whole)


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
    kept = sorted(plans_of(train(config).folder))
    # the last period began at step 35, with the checkpoint of 30, or that of 35 where its writer, a thread, was fast
    assert kept in ([30, 35], [35])


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
    check_plans(tmp_path / "two", one)
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
