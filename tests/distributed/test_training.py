"""Whole runs on two gloo ranks: the same run as on one rank, copied (DDP) or sharded (FSDP2)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fullbatch as fb
import fullbatch.training_run
from fullbatch.assembly import assemble
from fullbatch.config.optimization import Recovery
from fullbatch.config.training import Evaluation
from fullbatch.training import checkpoint, run_folder
from fullbatch.training_run import train
from tests.data.making import captioned, write_shard
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
# torch 2.6 shards on GPUs only; tests run with the version in constraints.txt, which shards on CPUs too
sharding = pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FSDP2 of torch 2.6 needs a GPU")
METHODS = ("openclip", "siglip", "sogclr", "fastclip_v2", "tempnet", "amorlip", "neuclip")


def on_rank(rank, config, resume):
    return train(config, resume).results


def restored(rank, config, folder):
    """What a rank holds after it has loaded a checkpoint."""
    state = assemble(config, torch.device("cpu")).state
    state.restore(checkpoint.read(folder))
    return state.capture().parts


def curve(run: Path, name="loss"):
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([line[name] for line in lines if name in line], dtype=torch.float64)


def check_curves(one, two):
    assert len(curve(one)) == len(curve(two)) == 20
    largest = max(1.0, curve(one).abs().max().item())  # a loss may pass through zero
    torch.testing.assert_close(curve(two), curve(one), rtol=0.0, atol=1e-6 * largest)
    torch.testing.assert_close(curve(two, "gradient_norm"), curve(one, "gradient_norm"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [m if m in ("openclip", "sogclr", "neuclip") else pytest.param(m, marks=pytest.mark.slow) for m in METHODS],
)
def test_two_ranks_reproduce_one(tmp_path, two_ranks, method):
    config = small_config(tmp_path, method)
    one = train(config).folder
    two_ranks.run(on_rank, renamed(config, "two"), None)
    check_curves(one, tmp_path / "two")


@pytest.mark.parametrize(("method", "pairs"), [("tuneclip", 16), ("neuclip", 8)])
def test_a_recovery_before_it(tmp_path, two_ranks, method, pairs):
    recovery = Recovery(recovery_steps=6, recovery_batch=pairs)
    config = replace(small_config(tmp_path, method, steps=14), recovery=recovery)
    one = train(config).folder
    two_ranks.run(on_rank, renamed(config, "two"), None)
    check_curves(one, tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sogclr", "neuclip"])
def test_with_micro_batches_and_an_average(tmp_path, two_ranks, method):
    config = small_config(tmp_path, method, micro_batch=3, ema=0.9)
    one = train(config).folder
    two_ranks.run(on_rank, renamed(config, "two"), None)
    check_curves(one, tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("method", fb.METHODS)
def test_from_one_rank_to_two(tmp_path, two_ranks, method):
    config = small_config(tmp_path, method)
    one = train(config).folder
    two = tmp_path / "two"
    shutil.copytree(one, two)
    shutil.rmtree(checkpoint.folder_of(two / "checkpoints", 20))
    tenth = checkpoint.folder_of(two / "checkpoints", 10)
    for state in two_ranks.run(restored, config, tenth):
        assert differences(saved_state(one, 10), state) == []
    two_ranks.run(on_rank, renamed(config, "two"), two)
    check_curves(one, two)


@sharding
@pytest.mark.slow
@pytest.mark.parametrize("method", ["openclip", "neuclip"])
def test_sharded_towers(tmp_path, two_ranks, method):
    config = small_config(tmp_path, method, ema=0.9, micro_batch=3)
    one = train(config).folder
    sharded = replace(config, training=replace(config.training, parallel="fsdp"))
    two_ranks.run(on_rank, renamed(sharded, "two"), None)
    check_curves(one, tmp_path / "two")
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "two", again)
    shutil.rmtree(checkpoint.folder_of(again / "checkpoints", 20))
    two_ranks.run(on_rank, renamed(sharded, "again"), again)
    assert differences(saved_state(tmp_path / "two", 20), saved_state(again, 20)) == []


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=sharding)])
def test_four_ranks_go_on_to_the_bit(tmp_path, four_ranks, parallel):
    """The order in which they add up their gradients must not depend on where a run began."""
    config = small_config(tmp_path, "neuclip", parallel=parallel)
    four_ranks.run(on_rank, config, None)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(checkpoint.folder_of(copy / "checkpoints", 20))
    four_ranks.run(on_rank, renamed(config, "copy"), copy)
    assert differences(saved_state(tmp_path / "run", 20), saved_state(copy, 20)) == []


def test_evaluation_is_spread_over_the_ranks(tmp_path, two_ranks):
    config = small_config(tmp_path, "openclip")
    tasks = tuple(f"{kind}:{config.data.data[0]}" for kind in ("retrieval", "zero_shot"))
    config = replace(config, evaluation=Evaluation(evaluate=tasks, eval_batch=16))
    one = train(config).results
    for results in two_ranks.run(on_rank, renamed(config, "two"), None):
        assert [r["task"] for r in results["results"]] == list(tasks)
        for got, want in zip(results["results"], one["results"], strict=True):
            assert got["size"] == want["size"] == 40
            assert got[got["main"]] == pytest.approx(want[want["main"]], abs=0.03)


@sharding
@pytest.mark.slow
def test_evaluating_the_average_leaves_sharded_training_alone(tmp_path, two_ranks):
    config = small_config(tmp_path, "openclip", ema=0.9, parallel="fsdp")
    task = (f"retrieval:{config.data.data[0]}",)
    for every in (0, 1):
        evaluation = Evaluation(evaluate=task, evaluate_every=every)
        two_ranks.run(on_rank, replace(renamed(config, f"every{every}"), evaluation=evaluation), None)
    assert torch.equal(curve(tmp_path / "every0"), curve(tmp_path / "every1"))


def mistake(rank, config):
    try:
        train(config)
    except ValueError as error:
        return str(error)


def test_a_mistake_is_the_same_message_on_every_rank(tmp_path, two_ranks):
    config = small_config(tmp_path)
    missing = replace(config, data=replace(config.data, data=(str(tmp_path / "nothing.tar"),)))
    for message in two_ranks.run(mistake, missing):
        assert "nothing.tar" in message
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    for message in two_ranks.run(mistake, config):
        assert "exists already" in message


def mistake_where_one_goes_on(rank, config, run):
    try:
        train(config, run if rank == 0 else None)
    except ValueError as error:
        return str(error)


def test_ranks_that_do_not_see_the_same_run_are_refused(tmp_path, two_ranks):
    """As with --resume auto, where one machine does not see yet what another has just written."""
    config = small_config(tmp_path)
    run = two_ranks.run(on_rank, config, None) and tmp_path / "run"
    before = checkpoint.checkpoints(run / "checkpoints")
    for message in two_ranks.run(mistake_where_one_goes_on, config, run):
        assert message.startswith("Only some of the ranks (0) see the run that has begun; ")
    assert checkpoint.checkpoints(run / "checkpoints") == before


WRITTEN = {  # by the first rank alone, and by whom
    "config": (run_folder.Folder, "write_config"),
    "design": (fullbatch.training_run, "write_design"),
    "lines": (run_folder.Metrics, "__init__"),
    "a line": (run_folder.Metrics, "write"),
    "results": (fullbatch.training_run, "replace_text"),
}


def mistake_without_room(rank, config, what):
    def full(*given, **options):
        raise OSError("The disk is full")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(*WRITTEN[what], full)
        try:
            train(config)
        except (ValueError, OSError) as error:
            return str(error)


@pytest.mark.parametrize("what", WRITTEN)
def test_a_full_disk_of_the_first_rank_is_told_on_every_rank(tmp_path, two_ranks, what):
    """None waits for the first one, which is gone."""
    for message in two_ranks.run(mistake_without_room, small_config(tmp_path), what):
        assert message.startswith("The disk is full")


def mistake_with_own_data(rank, config, paths):
    return mistake(rank, replace(config, data=replace(config.data, data=(paths[rank],))))


def test_ranks_that_find_different_data_are_refused(tmp_path, two_ranks):
    """As where another shard appeared between their looks; a copy in another folder is the same data."""
    config = small_config(tmp_path)
    paths = [str(write_shard(tmp_path / f"{count}.tar", captioned(count, (20, 16)))) for count in (40, 41)]
    for message in two_ranks.run(mistake_with_own_data, config, paths):
        assert message.startswith("The ranks found different data, so that one id would name different samples; ")
        assert "samples an epoch: 40, 41." in message
    assert not (tmp_path / "run").exists()
    (tmp_path / "node-2").mkdir()
    copy = shutil.copy(paths[0], tmp_path / "node-2")
    assert two_ranks.run(mistake_with_own_data, config, [paths[0], str(copy)]) == [None, None]


def test_bad_samples_of_all_ranks_are_counted_and_named(tmp_path, two_ranks):
    samples = captioned(40)
    for number in (3, 17, 31):
        samples[number][1]["jpg"] = b"nothing"
    config = small_config(tmp_path)
    path = write_shard(tmp_path / "bad.tar", samples)
    config = replace(config, data=replace(config.data, data=(str(path),), max_bad=0.5))
    one = train(config).folder
    two_ranks.run(on_rank, renamed(config, "two"), None)
    counts = [saved_state(run, 20)["position"]["bad"] for run in (one, tmp_path / "two")]
    named = [(run / "log.txt").read_text().count("skipped a bad sample") for run in (one, tmp_path / "two")]
    assert counts[0] == counts[1] == named[0] == named[1] > 0
