"""Sharded runs: each rank saves and loads what it holds; any number of ranks, also one process, goes on from there."""

import errno
import json
import os
import pickle
import shutil
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fullbatch.assembly import assemble
from fullbatch.cli import main
from fullbatch.distributed import shards, towers
from fullbatch.loading import load_trained
from fullbatch.training import checkpoint
from fullbatch.training_run import train
from tests.killing import exit_code, started
from tests.resume.test_folder import resigned
from tests.resume.test_killed import die_in_call
from tests.resume.test_resume import go_on_from
from tests.tiers import first
from tests.training.small import differences, renamed, saved_state, small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:rho="),
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FSDP2 of torch 2.6 needs a GPU"),
]


def sharded_config(folder, method="neuclip", **settings):
    return small_config(folder, method, **{"parallel": "fsdp", "ema": 0.9, **settings})


def on_rank(rank, config, resume=None):
    torch.set_num_threads(1)
    return str(train(config, resume).folder)


def newest(run):
    return checkpoint.checkpoints(run / "checkpoints")[-1]


def curve(run):
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([line["loss"] for line in lines if "loss" in line], dtype=torch.float64)


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---------------------------------------------------------------------------------------------------------------------
# nobody holds it all


def restored_and_captured(rank, config, folder):
    """What a rank reads of a checkpoint, and what it copies to save it; both without a word to other ranks."""
    parts = assemble(config, torch.device("cpu"))
    read = []

    def empty(tensor):
        read.append(towers.empty_as_in(parts.model)(tensor))
        return read[-1]

    with CommDebugMode() as talk:
        parts.state.restore(checkpoint.read(folder, empty=empty))
        captured = parts.state.capture(keep=rank == 0)
    assert talk.get_total_counts() == 0
    held = [tensor.to_local() for tensor in captured.shards.values()]
    whole = size(captured.shards.values())
    return whole, size(held), size(tensor.to_local() for tensor in read), bool(captured.parts)


@pytest.mark.slow
def test_a_rank_saves_and_reads_its_own_share(tmp_path, two_ranks):
    config = sharded_config(tmp_path)
    two_ranks.run(on_rank, config)
    folder = newest(tmp_path / "run")
    (whole, *first), (_, *second) = two_ranks.run(restored_and_captured, config, folder)
    assert first[0] + second[0] == first[1] + second[1] == whole > 12e6  # weights, average and two moments
    assert max(first[0], second[0]) < 0.51 * whole
    assert (first[2], second[2]) == (True, False)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sorted(sizes) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "average.pt", "manifest.json", "model.pt", "objective.pt",
        "optimizer.pt", "position.pt", "scaler.pt", "temperature_optimizer.pt",
    ]  # fmt: skip
    assert max(sizes["__0_0.distcp"], sizes["__1_0.distcp"]) < 0.52 * whole
    assert sizes["model.pt"] + sizes["average.pt"] + sizes["optimizer.pt"] < 100_000


def largest_gathered(rank, config, resume):
    """By a whole training, apart from what each layer gathers for itself."""
    largest = [0]

    def noted(function):
        def wrapper(tensor, *args, **kwargs):
            largest[0] = max(largest[0], tensor.numel())
            return function(tensor, *args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DTensor, "full_tensor", noted(DTensor.full_tensor))
        patched.setattr(towers.state_dict, "get_model_state_dict", lambda *_, **__: pytest.fail("gathered"))
        train(config, resume)
    return largest[0]


@pytest.mark.slow
def test_a_run_gathers_no_more_than_a_norm(tmp_path, two_ranks):
    config = sharded_config(tmp_path, "openclip")
    assert two_ranks.run(largest_gathered, config, None) == [1, 1]
    copy = go_on_from(tmp_path / "run", tmp_path / "copy", step=10)
    assert two_ranks.run(largest_gathered, renamed(config, "copy"), copy) == [1, 1]


# ---------------------------------------------------------------------------------------------------------------------
# on as many ranks, on more, on fewer, copied instead of sharded


def captured_whole(rank, config, folder):
    state = assemble(config, torch.device("cpu")).state
    state.restore(checkpoint.read(folder, empty=towers.empty_as_in(state.model)))
    whole = {name: part.state_dict() for name, part in state._parts()}
    return shards.mapped(whole, lambda place, tensor: towers.whole(tensor).clone())


def check_loaded_and_continued(config, run, pool, other=None, rounding=1e-6):
    """The tenth step of ``run`` as the ranks of ``pool`` load it, and twenty of them."""
    other = other or config
    for state in pool.run(captured_whole, other, checkpoint.folder_of(run / "checkpoints", 10)):
        assert differences(saved_state(run, 10), state) == []
    copy = go_on_from(run, run.with_name("copy"), step=10)
    pool.run(on_rank, renamed(other, "copy"), copy)
    torch.testing.assert_close(curve(copy), curve(run), rtol=0.0, atol=rounding * curve(run).abs().max().item())
    return copy


OPTIMIZERS = ("adamw", "lars", "novograd", "lamb", "lion", "muon", "adopt", "rmsprop", "sgd", "radam")


@pytest.mark.parametrize("optimizer", first(["adamw"], of=OPTIMIZERS))
def test_on_as_many_ranks_to_the_bit(tmp_path, two_ranks, optimizer):
    config = sharded_config(tmp_path, "neuclip" if optimizer == "adamw" else "sogclr", micro_batch=2)
    config = replace(config, optimizer=replace(config.optimizer, optimizer=optimizer))
    two_ranks.run(on_rank, config)
    copy = check_loaded_and_continued(config, tmp_path / "run", two_ranks)
    assert differences(saved_state(tmp_path / "run", 20), saved_state(copy, 20)) == []


def refusal(rank, config):
    try:
        train(config)
    except ValueError as error:
        return str(error)


def test_an_optimizer_that_cannot_step_sharded_weights(tmp_path, two_ranks):
    config = sharded_config(tmp_path, "openclip", steps=2)
    config = replace(config, optimizer=replace(config.optimizer, optimizer="nvnovograd"))
    said = "--optimizer nvnovograd cannot step what --parallel fsdp shards; take novograd."
    assert two_ranks.run(refusal, config) == [said, said]
    assert not (tmp_path / "run").exists()
    train(config)  # one rank shards nothing


class OneRank:
    def run(self, function, *args):
        return [function(0, *args)]


@pytest.mark.slow
def test_on_one_rank(tmp_path, two_ranks):
    config = sharded_config(tmp_path)
    two_ranks.run(on_rank, config)
    copy = check_loaded_and_continued(config, tmp_path / "run", OneRank())
    assert not list(newest(copy).glob("*.distcp")), "one rank has nothing to share out"


@pytest.mark.parametrize("optimizer", first(["adamw"], of=OPTIMIZERS))
def test_from_one_rank(tmp_path, two_ranks, optimizer):
    config = sharded_config(tmp_path, "openclip")
    config = replace(config, optimizer=replace(config.optimizer, optimizer=optimizer))
    train(config)
    rounding = 1e-4 if optimizer == "muon" else 1e-6  # it works in 16 bits; copied towers differ as much
    check_loaded_and_continued(config, tmp_path / "run", two_ranks, rounding=rounding)


@pytest.mark.slow
def test_on_four_ranks_and_back(tmp_path, two_ranks, four_ranks):
    config = sharded_config(tmp_path)
    two_ranks.run(on_rank, config)
    more = check_loaded_and_continued(config, tmp_path / "run", four_ranks)
    assert len(list(newest(more).glob("*.distcp"))) == 4
    for state in two_ranks.run(captured_whole, config, newest(more)):
        assert differences(saved_state(more, 20), state) == []


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_copied_or_sharded_may_change(tmp_path, two_ranks, before, after):
    config = sharded_config(tmp_path, "openclip", parallel=before)
    two_ranks.run(on_rank, config)
    other = replace(config, training=replace(config.training, parallel=after))
    check_loaded_and_continued(config, tmp_path / "run", two_ranks, other)


@pytest.mark.slow
def test_optimizers_saved_by_names_as_version_0_6_did(tmp_path, two_ranks):
    config = sharded_config(tmp_path, "openclip")
    two_ranks.run(on_rank, config)
    run, folder = tmp_path / "run", checkpoint.folder_of(tmp_path / "run" / "checkpoints", 10)
    expected, parts = saved_state(run, 20), saved_state(run, 10)
    state = parts["optimizer"]
    state["state"] = {f"layer{place}": moments for place, moments in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [f"layer{place}" for place in group["params"]]
    shutil.rmtree(run / "checkpoints")
    checkpoint.write(folder.parent, 10, checkpoint.Captured(parts), keep=2)
    two_ranks.run(on_rank, config, run)
    assert differences(expected, saved_state(run, 20)) == []


# ---------------------------------------------------------------------------------------------------------------------
# in one process, which wants the whole


@pytest.mark.slow
def test_one_process_exports_and_evaluates(tmp_path, two_ranks, capsys):
    config = sharded_config(tmp_path, "openclip")
    two_ranks.run(on_rank, config)
    run = tmp_path / "run"
    weights = load_trained(run).model.state_dict()
    assert differences(dict(weights), saved_state(run, 20)["model"] | saved_state(run, 20)["average"]) == []
    assert main(["export", str(run), str(tmp_path / "model.safetensors"), "--format", "safetensors"]) == 0
    assert main(["evaluate", str(run), "--tasks", f"retrieval:{config.data.data[0]}"]) == 0
    assert main(["audit", str(run), "--anchors", "8"]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# damaged files


def flip_a_bit(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def lose(path):
    path.unlink()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, two_ranks):
    place = tmp_path_factory.mktemp("sharded")
    two_ranks.run(on_rank, sharded_config(place, "openclip"))
    return place


@pytest.mark.parametrize("spoil", [flip_a_bit, cut, lose])
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_damaged_shard_is_named(trained, tmp_path, caplog, capsys, spoil, name):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    spoil(newest(run) / name)
    assert main(["export", str(newest(run)), str(tmp_path / "out.pt")]) == 1
    assert f"fullbatch: {newest(run) / name} is missing or differs from what was saved." in capsys.readouterr().err
    assert checkpoint.last_good(run / "checkpoints") == checkpoint.folder_of(run / "checkpoints", 10)
    assert f"step-000000020 is damaged ({name}); taking the one before it" in caplog.text


@pytest.mark.slow
def test_past_a_damaged_shard_to_the_bit(trained, tmp_path, two_ranks):
    run, whole = shutil.copytree(trained / "run", tmp_path / "run"), saved_state(trained / "run", 20)
    flip_a_bit(newest(run) / "__1_0.distcp")
    config = sharded_config(trained, "openclip")
    two_ranks.run(on_rank, replace(config, run=replace(config.run, runs=str(tmp_path))), run)
    assert differences(whole, saved_state(run, 20)) == []


class Shout:
    def __reduce__(self):
        return os.system, ("touch shouted",)


CONTENTS = {
    "noise": lambda folder: (folder / ".metadata").write_bytes(b"no pickle"),
    "nothing": lambda folder: (folder / ".metadata").write_bytes(b""),
    "code": lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Shout())),
    "a list": lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])),
    "other shards": lambda folder: (folder / "__0_0.distcp").write_bytes((folder / "__1_0.distcp").read_bytes()),
    "empty shards": lambda folder: (folder / "__0_0.distcp").write_bytes(b""),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_the_right_sums_of_something_else(trained, tmp_path, capsys, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(trained / "run", tmp_path / "run")
    CONTENTS[content](newest(run))
    resigned(newest(run))
    assert main(["export", str(run), str(tmp_path / "out.pt")]) == 1
    assert f"fullbatch: {newest(run)}" in capsys.readouterr().err
    assert not (tmp_path / "shouted").exists()


# ---------------------------------------------------------------------------------------------------------------------
# what happens while it is written


def without_room(rank, config, syncs):
    """The second rank's disk is full at its third save, in which its file is synced for the fifth and sixth time."""
    written = []
    sync = os.fsync

    def full(descriptor):
        written.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if rank == 1 and sum(".distcp" in path for path in written) == syncs:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sync(descriptor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", full)
        try:
            train(config)
        except (OSError, ValueError) as error:  # its own failure, or the other's: whichever is known first
            return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("syncs", [5, 6])
def test_a_full_disk_on_one_rank_stops_all_of_them(tmp_path, two_ranks, syncs):
    config = sharded_config(tmp_path, "openclip")
    config = replace(config, run=replace(config.run, save_every=5))
    for message in two_ranks.run(without_room, config, syncs):
        assert "step-000000015 could not be written" in message
        assert "The disk is full" in message or "No space left" in message  # as another rank tells it
        assert "the last good checkpoint is" in message and "step-000000010" in message
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-000000005", "step-000000010"
    ]  # fmt: skip
    two_ranks.run(on_rank, config, tmp_path / "run")


def go(rank, size, meeting, config, resume, fatal_call):
    """A rank in a process of its own; with ``fatal_call``, killed by itself in that part of saving."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    die_in_call(fatal_call)
    on_rank(rank, config, resume)
    dist.destroy_process_group()


def run_and_die(config, resume, meeting, rank, fatal_call):
    """Whether that rank died of it; the other ends too, by itself."""
    fatal = [fatal_call if number == rank else 0 for number in range(2)]
    ranks = [started(go, number, 2, meeting, config, resume, fatal[number]) for number in range(2)]
    return [exit_code(process) for process in ranks][rank] == -signal.SIGKILL


# Which rank, and in which call.  A save has about 178 on the first rank (148 tensors of its shards, checksums, parts,
# syncs, the rename before the last one; from the third save on, an old checkpoint that goes) and 149 on the second.
MOMENTS = [(0, 60), (1, 40), (0, 1), (0, 150), (1, 149), (0, 158), (0, 170), (0, 178), (1, 300), (0, 535)]


@pytest.mark.slow
def test_killed_while_it_saves(tmp_path, two_ranks):
    config = sharded_config(tmp_path, "neuclip", steps=40)
    config = replace(config, run=replace(config.run, save_every=4, keep=2))
    two_ranks.run(on_rank, config)
    run, killed = tmp_path / "killed", 0
    for number, (rank, call) in enumerate(MOMENTS):
        resume = run if (run / "config.yaml").exists() else None
        killed += run_and_die(renamed(config, "killed"), resume, tmp_path / f"meeting{number}", rank, call)
    assert killed >= 0.8 * len(MOMENTS), "most must have been under way"
    two_ranks.run(on_rank, renamed(config, "killed"), run)
    assert differences(saved_state(tmp_path / "run", 40), saved_state(run, 40)) == []
    assert not list((run / "checkpoints").glob(".writing-*"))
