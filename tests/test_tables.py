"""The per-sample table: duplicates, precision, where it lies, whose it is."""

import copy
import gc
import math

import pytest
import torch

import fullbatch as fb
from fullbatch.objective.per_sample import (
    PerSampleTable,
    TableOptions,
    log_mean_within,
    mean_within,
    round_stochastically,
)
from fullbatch.objective.step import Ids, Progress
from tests.conftest import unit_rows

PROGRESS = Progress(step=0, epoch=0, seed=0, training=True, clock=torch.tensor(0, dtype=torch.int32))


def put(table, ids, values, step=0):
    table.put(Ids(ids), values, Progress(step, 0, 0, True, torch.tensor(step, dtype=torch.int32)))


@pytest.mark.parametrize("storage", ["rank", "node", "folder"])
def test_rows_come_back_and_unseen_rows_are_marked(storage, tmp_path):
    place = str(tmp_path / "tables") if storage == "folder" else storage
    table = PerSampleTable(TableOptions(10, torch.float32, place), "image.test")
    ids = torch.tensor([7, 2, 9])
    put(table, ids, torch.tensor([1.0, 2.0, 3.0]))
    assert table.get(ids, torch.float64).tolist() == [1.0, 2.0, 3.0]
    assert torch.isnan(table.get(torch.tensor([0, 8]), torch.float32)).all()
    if storage == "folder":
        stored = torch.from_file(str(tmp_path / "tables" / "image.test.table"), size=10, dtype=torch.float32)
        assert stored[ids].tolist() == [1.0, 2.0, 3.0]


def test_large_tables_go_to_the_node_and_small_ones_to_the_rank():
    assert TableOptions(1000).place == "rank"
    assert TableOptions(10**9, torch.float16).place == "node"


def test_host_tables_stay_on_the_host_and_keep_their_precision():
    objective = fb.make_objective("sogclr", num_samples=8, table_storage="node", table_dtype=torch.float16).double()
    assert objective.normalizers["image"].log_u.values.dtype == torch.float16


def test_stochastic_rounding_keeps_the_mean_and_small_moves():
    """At |log u| near 30 float16 has a spacing of 0.016; 2,000 moves of 0.001 must still add up to 2."""
    exact = torch.full((20_000,), -30.0051)
    group = torch.arange(20_000)
    rounded = round_stochastically(exact, group, PROGRESS).float()
    assert set(rounded.unique().tolist()) == {-30.015625, -30.0}
    assert abs(float(rounded.mean()) + 30.0051) < 3e-4

    table = PerSampleTable(TableOptions(400, torch.float16, "rank"), "t")
    ids = torch.arange(400)
    put(table, ids, torch.full((400,), -30.0))
    for step in range(2000):
        put(table, ids, table.get(ids, torch.float32) + 0.001, step)
    assert abs(float(table.get(ids, torch.float32).mean()) + 28.0) < 0.05
    plain = torch.tensor(-30.0, dtype=torch.float16)
    for _ in range(2000):
        plain = plain + torch.tensor(0.001, dtype=torch.float16)
    assert float(plain) == -30.0, "without it every move is lost"


def test_rounding_leaves_nan_and_infinity():
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    rounded = round_stochastically(odd, torch.arange(4), PROGRESS)
    torch.testing.assert_close(rounded, odd.half(), equal_nan=True, rtol=0, atol=0)


def test_the_same_id_twice_shares_one_value():
    ids = torch.tensor([5, 3, 5, 8, 3, 5])
    named = Ids(ids)
    assert (named.group_N[:, None] == named.group_N[None]).equal(ids[:, None] == ids[None])
    values = torch.tensor([1.0, 10.0, 2.0, 7.0, 20.0, 6.0])
    assert mean_within(values, named).tolist() == [3.0, 15.0, 3.0, 7.0, 15.0, 3.0]
    torch.testing.assert_close(log_mean_within(values.log(), named), mean_within(values, named).log())


def test_duplicates_in_a_batch_move_u_once_by_their_mean():
    """One id, one u: u <- (1 - gamma) u + gamma mean(epsilon + g), whatever the order of the rows."""
    image, text = unit_rows(6, 4, 1), unit_rows(6, 4, 2)
    ids = torch.tensor([0, 1, 1, 2, 3, 4])
    objective = fb.make_objective("sogclr", num_samples=5, gamma=0.5, temperature=0.2, epsilon=0.0).double()
    objective(image, text, ids)
    sim = image @ text.T / 0.2
    gap = torch.exp(sim - sim.diagonal()[:, None]).fill_diagonal_(0.0)
    g = gap.sum(1) / 5
    expected = torch.stack([g[0], (g[1] + g[2]) / 2, g[3], g[4], g[5]]).log()
    torch.testing.assert_close(objective.normalizers["image"].log_u.values, expected)
    backwards = fb.make_objective("sogclr", num_samples=5, gamma=0.5, temperature=0.2, epsilon=0.0).double()
    backwards(image.flip(0), text.flip(0), ids.flip(0))
    torch.testing.assert_close(backwards.normalizers["image"].log_u.values, expected)


def test_images_and_texts_can_have_their_own_ids():
    """Several captions an image: the image's u is shared, each caption has its own."""
    objective = fb.make_objective("sogclr", num_samples=10)
    image_ids, text_ids = torch.tensor([0, 0, 1, 2]), torch.tensor([4, 5, 6, 7])
    objective(unit_rows(4, 5, 1, torch.float32), unit_rows(4, 5, 2, torch.float32), (image_ids, text_ids))
    seen = {
        name: (~torch.isnan(objective.normalizers[name].log_u.values)).nonzero()[:, 0] for name in ("image", "text")
    }
    assert seen["image"].tolist() == [0, 1, 2]
    assert seen["text"].tolist() == [4, 5, 6, 7]


def test_a_table_of_another_data_set_is_refused():
    saved = fb.make_objective("sogclr", num_samples=20).state_dict()
    with pytest.raises(ValueError, match=r"20 samples.*num_samples=30.*another data set"):
        fb.make_objective("sogclr", num_samples=30).load_state_dict(saved)


def test_a_table_of_a_data_set_with_another_fingerprint_is_refused():
    saved = fb.make_objective("sogclr", num_samples=20, dataset="cc3m of May").state_dict()
    fb.make_objective("sogclr", num_samples=20, dataset="cc3m of May").load_state_dict(saved)
    with pytest.raises(ValueError, match=r"another data set than dataset='cc3m of June'"):
        fb.make_objective("sogclr", num_samples=20, dataset="cc3m of June").load_state_dict(saved)


def test_two_objectives_cannot_share_a_folder(tmp_path):
    place = str(tmp_path / "tables")
    first = PerSampleTable(TableOptions(10, torch.float32, place), "t")
    put(first, torch.tensor([3]), torch.tensor([1.5]))
    with pytest.raises(ValueError, match="in use by another objective; give each its own folder"):
        PerSampleTable(TableOptions(10, torch.float32, place), "t")
    assert first.get(torch.tensor([3]), torch.float32).item() == 1.5
    del first
    gc.collect()
    PerSampleTable(TableOptions(10, torch.float32, place), "t")


def test_a_table_that_does_not_fit_is_refused_at_once(monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ValueError, match=r"needs 4 MiB in .* not enough room; give table_storage a folder"):
        PerSampleTable(TableOptions(2**20, torch.float32, "node"), "t")


def test_a_copy_of_a_shared_table_is_private():
    table = PerSampleTable(TableOptions(10, torch.float32, "node"), "t")
    put(table, torch.tensor([3]), torch.tensor([1.5]))
    twin = copy.deepcopy(table)
    put(twin, torch.tensor([3]), torch.tensor([2.5]))
    assert table.get(torch.tensor([3]), torch.float32).item() == 1.5
    assert twin.get(torch.tensor([3]), torch.float32).item() == 2.5


def test_a_new_table_leaves_the_old_ones_state_alone(tmp_path):
    place = str(tmp_path / "tables")
    old = PerSampleTable(TableOptions(10, torch.float32, place), "t")
    put(old, torch.tensor([3]), torch.tensor([1.5]))
    state = old.state_dict()
    del old
    gc.collect()
    new = PerSampleTable(TableOptions(10, torch.float32, place), "t")
    assert state["values"][3] == 1.5
    new.load_state_dict(state)
    assert new.get(torch.tensor([3]), torch.float32).item() == 1.5


def test_loading_keeps_the_mapping(tmp_path):
    place = str(tmp_path / "tables")
    table = PerSampleTable(TableOptions(10, torch.float32, place), "t")
    mapped = table.values
    table.load_state_dict({"values": torch.arange(10.0)}, assign=True)
    assert table.values is mapped
    assert mapped[4] == 4.0


def test_places_are_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    PerSampleTable(TableOptions(4, torch.float32, "~/tables"), "t")
    assert (tmp_path / "tables" / "t.table").exists()
    PerSampleTable(TableOptions(4, torch.float32, tmp_path / "other"), "t")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"table_storage='.*file' cannot be used as a folder"):
        PerSampleTable(TableOptions(4, torch.float32, str(tmp_path / "file")), "t")


@pytest.mark.parametrize("name", list(fb.METHODS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_cast_leaves_the_state_wide(name, dtype):
    """An objective inside a model that is cast to 16 bits goes on as it was."""
    plain, cast = (fb.make_objective(name, width=6, num_samples=90) for _ in range(2))
    cast.to(dtype)
    image, text, ids = unit_rows(8, 6, 1, torch.float32), unit_rows(8, 6, 2, torch.float32), torch.arange(8)
    for _ in range(2):
        assert torch.equal(plain(image, text, ids).loss, cast(image, text, ids).loss)


def test_casting_the_objective_does_not_coarsen_its_memory():
    objective = fb.make_objective("fastclip_v3", num_samples=9000)
    before = objective.temperatures["both"].log_temperature.item()
    objective.to(torch.bfloat16)
    assert objective.normalizers["image"].log_u.values.dtype == torch.float32
    assert objective.temperatures["both"].log_temperature.dtype == torch.float32
    assert objective.temperatures["both"].log_temperature.item() == before


def test_moments_of_temperatures_stay_in_float32():
    objective = fb.make_objective("fastclip_v2", num_samples=9000, table_dtype=torch.float16)
    own = objective.temperatures["image"]
    assert own.tau.values.dtype == torch.float16
    assert own.first.values.dtype == own.second.values.dtype == torch.float32


def test_a_killed_run_leaves_no_shared_memory_behind(tmp_path, monkeypatch):
    """The node's table has no name in the file system once it is mapped."""
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    table = PerSampleTable(TableOptions(100, torch.float32, "node"), "t")
    put(table, torch.tensor([3]), torch.tensor([1.5]))
    assert list(tmp_path.iterdir()) == []
    assert table.get(torch.tensor([3]), torch.float32).item() == 1.5
