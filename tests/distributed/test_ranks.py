"""Two real gloo ranks give the gradient, tables and metrics of one rank with the concatenated batch."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

import fullbatch as fb
from fullbatch import distributed
from tests.combinations import COMBINATIONS, SAMPLES, WIDTH, make, tiered
from tests.conftest import unit_rows
from tests.waiting import HANG

pytestmark = pytest.mark.filterwarnings("ignore:rho=")
BATCH, STEPS = 8, 4
EVERYTHING = [*COMBINATIONS, *fb.METHODS]


def train(rank, size, name, changes):
    """Four steps on this rank's share of each batch; all that came of them."""
    objective = make(name, **changes).double()
    share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    record = []
    for step in range(STEPS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH]
        if step == 3:
            order[1] = order[6]  # the same sample twice in a batch, on different ranks
        image, text = (unit_rows(SAMPLES, WIDTH, seed + step)[order][share].requires_grad_() for seed in (1, 2))
        log_c = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(step))[share] if step > 1 else None
        out = objective(image, text, order[share], log_c)
        parameters = list(objective.parameters())
        found = torch.autograd.grad(out.loss, (image, text, *parameters), allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, found[2:], strict=True):
                if gradient is not None:
                    parameter -= 0.01 * gradient
        metrics = {key: torch.as_tensor(value, dtype=torch.float64) for key, value in out.metrics.items()}
        record.append({"loss": out.loss.detach(), "rows": found[:2], "own": found[2:], "metrics": metrics})
    return record, objective.state_dict()


def assert_close(got, want, what):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda text: f"{what}: {text}")


def check_same(two_ranks, name, changes):
    one, one_state = train(0, 1, name, changes)
    ranks = two_ranks.run(train, 2, name, changes)
    for step in range(STEPS):
        mean = torch.stack([record[step]["loss"] for record, _ in ranks]).mean()
        assert_close(mean, one[step]["loss"], f"loss of step {step}")
        for side in range(2):
            joined = torch.cat([record[step]["rows"][side] for record, _ in ranks]) / 2  # DDP averages over ranks
            assert_close(joined, one[step]["rows"][side], f"gradient {side} of step {step}")
        for record, _ in ranks:
            for a, b in zip(record[step]["own"], one[step]["own"], strict=True):
                if b is not None:
                    assert_close(a, b, f"own gradient of step {step}")
            for key, value in one[step]["metrics"].items():
                assert_close(record[step]["metrics"][key], value, f"{key} of step {step}")
    for _, state in ranks:
        assert state.keys() == one_state.keys()
        for key, value in one_state.items():
            assert_close(state[key], value, key)


@pytest.mark.parametrize("name", tiered(EVERYTHING))
def test_two_ranks_equal_one(two_ranks, name):
    check_same(two_ranks, name, {})


@pytest.mark.parametrize("name", ["openclip", "siglip", "fastclip_v3", "neuclip", "tuneclip"])
def test_two_ranks_equal_one_in_chunks(two_ranks, name):
    check_same(two_ranks, name, {"chunk": 3})


@pytest.mark.parametrize("storage", ["node", "folder"])
@pytest.mark.parametrize("name", ["fastclip_v3", "fastclip_v2"])
def test_tables_shared_by_a_node(two_ranks, name, storage, tmp_path):
    place = "node" if storage == "node" else str(tmp_path / "tables")
    check_same(two_ranks, name, {"table_storage": place, "table_dtype": torch.float64})


def test_stochastic_rounding_is_the_same_on_any_number_of_ranks(two_ranks):
    """In the node's table, which .double() leaves as it is."""
    one = train(0, 1, "fastclip_v3", {"table_dtype": torch.float16, "table_storage": "node"})[1]
    for _, state in two_ranks.run(train, 2, "fastclip_v3", {"table_dtype": torch.float16, "table_storage": "node"}):
        for key, value in one.items():
            if "log_u" in key:
                assert value.dtype == torch.float16
                assert_close(state[key], value, key)


def one_row_a_rank(rank, size, name):
    """The smallest batch there is: two pairs, one on each rank."""
    objective = make(name).double()
    rows = slice(rank, rank + 1) if size == 2 else slice(0, 2)
    image, text = (unit_rows(2, WIDTH, seed)[rows].requires_grad_() for seed in (1, 2))
    out = objective(image, text, torch.arange(2)[rows])
    return torch.autograd.grad(out.loss, (image, text)), objective.state_dict()


@pytest.mark.parametrize("name", ["openclip", "isogclr", "fastclip_v2", "neuclip"])
def test_one_row_a_rank(two_ranks, name):
    (image, text), state = one_row_a_rank(0, 1, name)
    ranks = two_ranks.run(one_row_a_rank, 2, name)
    assert_close(torch.cat([found[0] for found, _ in ranks]) / 2, image, "image gradient")
    assert_close(torch.cat([found[1] for found, _ in ranks]) / 2, text, "text gradient")
    for _, other in ranks:
        for key, value in state.items():
            assert_close(other[key], value, key)


def table_of_other_ranks(rank):
    """A table mapped before the ranks knew of each other must not be used by them."""
    objective = fb.make_objective("sogclr", num_samples=8, table_storage="node")
    table = objective.normalizers["image"].log_u
    table.world = type(table.world)(0, 1)
    with pytest.raises(ValueError, match=r"made for 1 rank\(s\) and there are 2 now.*init_process_group"):
        objective(unit_rows(4, 3, 1), unit_rows(4, 3, 2), torch.arange(4))
    return True


def test_a_table_of_other_ranks_is_refused(two_ranks):
    assert two_ranks.run(table_of_other_ranks) == [True, True]


def uneven_batch(rank):
    with pytest.raises(ValueError, match=r"they brought \[4, 5\]; use drop_last=True"):
        fb.make_objective("openclip")(unit_rows(4 + rank, 3, 1), unit_rows(4 + rank, 3, 2))
    return True


def test_uneven_batches_are_refused_on_every_rank(two_ranks):
    assert two_ranks.run(uneven_batch) == [True, True]


def open_clip_losses(rank, size, name):
    """Gradients of open_clip's class and of ours on the same rows."""
    from open_clip.loss import ClipLoss, SigLipLoss

    rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    image, text = (unit_rows(BATCH, WIDTH, seed)[rows].requires_grad_() for seed in (1, 2))
    objective = fb.make_objective(name).double()
    log_tau = objective.temperatures["both"].log_temperature
    scale = torch.exp(-log_tau)
    if name == "openclip":
        theirs = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=size)
        expected = theirs(image, text, scale)
    else:
        theirs = SigLipLoss(rank=rank, world_size=size)
        expected = theirs(image, text, scale, objective.bias)
    own = [log_tau] if name == "openclip" else [log_tau, objective.bias]
    want = torch.autograd.grad(expected, (image, text, *own))
    loss = objective(image, text).loss
    got = torch.autograd.grad(loss, (image, text, *own))
    return loss.detach(), expected.detach(), got, want


@pytest.mark.parametrize("name", ["openclip", "siglip"])
@pytest.mark.parametrize("size", [1, 2])
def test_equal_to_open_clip(two_ranks, name, size):
    answers = [open_clip_losses(0, 1, name)] if size == 1 else two_ranks.run(open_clip_losses, 2, name)
    for loss, expected, got, want in answers:
        assert_close(loss, expected, "loss")
        assert_close(got[0], want[0], "image gradient")
        assert_close(got[1], want[1], "text gradient")
    # ours is already averaged over ranks, theirs is what DDP would average
    for index in range(2, len(answers[0][2])):
        mean = torch.stack([want[index] for _, _, _, want in answers]).mean()
        for _, _, got, _ in answers:
            assert_close(got[index], mean, "scale and bias")


def names_of_start(store, size, ranks):
    """What each of these ranks is told, or why it is not."""

    def name(rank):
        try:
            return distributed._name_of_start(store, rank, size)
        except TimeoutError as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(name, ranks))


def test_ranks_that_start_wait_for_each_other_but_not_for_ever():
    """Whether the store is fresh, or still has what a dead rank wrote."""
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=1))  # of those whose others never come
    one, other = names_of_start(store, 2, [0]), names_of_start(store, 2, [1])
    assert "Rank 0 has not heard from rank 1 for 1 seconds; see in its output" in str(one[0])
    assert "Rank 1 has not heard from rank 0 for 1 seconds" in str(other[0])
    store.set_timeout(timedelta(seconds=HANG))
    names = [names_of_start(store, 4, range(4)) for _ in range(2)]
    assert all(len({*each}) == 1 and isinstance(each[0], str) for each in names) and names[0] != names[1]
    store.set_timeout(timedelta(seconds=5))
    first, _ = names_of_start(store, 4, [0, 1])
    assert "Rank 0 has not heard from rank 2, 3 for 5 seconds" in str(first)
    assert names_of_start(store, 1, [0])


RESTARTED = """
import os, signal, time, torch
from fullbatch import distributed

again, first = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0", os.environ["RANK"] == "0"
if again and first:
    time.sleep(2)  # the other rank is there before it, and must not find where the dead one listened
with distributed.ranks(torch.device("cpu")):
    if not again and not first:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()
"""


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_find_each_other(tmp_path):
    (tmp_path / "restarted.py").write_text(RESTARTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", str(tmp_path / "restarted.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
