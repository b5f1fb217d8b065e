"""A share of the data: the same samples everywhere, and a data set of its own to all that comes after."""

from dataclasses import replace

import pytest
import torch

from fullbatch.audit import Options
from fullbatch.audit.finished_run import audit_run
from fullbatch.config.data import Data
from fullbatch.config.training import Selection
from fullbatch.data.durable import read_lines
from fullbatch.data.images import EvalTransform
from fullbatch.data.in_memory import decoded_key
from fullbatch.data.loader import open_pool
from fullbatch.training_run import train
from tests.data.making import captioned, write_shard
from tests.training.small import differences, renamed, saved_state, small_config


@pytest.fixture
def shard(tmp_path):
    return str(write_shard(tmp_path / "shard.tar", captioned(200, (20, 16))))


def names(config):
    pool, order = open_pool(config)
    assert order.num_samples == order.epoch_size == len(pool)
    return [pool.read(index).name for index in range(len(pool))]


def shared(config, share, **data):
    return replace(config, data=replace(config.data, data_share=share, **data))


def test_the_same_samples_in_their_order_and_smaller_shares_in_larger_ones(shard):
    whole = names(Data(data=(shard,)))
    found = {share: names(Data(data=(shard,), data_share=share)) for share in (0.05, 0.2, 0.5, 0.999)}
    assert [len(some) for some in found.values()] == [10, 40, 100, 200]
    for some in found.values():
        assert some == [name for name in whole if name in set(some)], "none twice, in the order of the source"
    assert set(found[0.05]) < set(found[0.2]) < set(found[0.5])
    assert found[0.2] == names(Data(data=(shard,), data_share=0.2))
    halves = [sum(name in set(found[0.5]) for name in part) for part in (whole[:100], whole[100:])]
    assert min(halves) > 30, "from all over the source"


def test_of_every_source_its_share(tmp_path, shard):
    other = str(write_shard(tmp_path / "other.tar", captioned(40, (20, 16))))
    pool, order = open_pool(Data(data=(shard, f"{other}?weight=2"), data_share=0.1))
    assert pool.lengths == (20, 4) and order.slots == (20, 8)


def test_it_is_another_data_set(shard):
    pools = [open_pool(Data(data=(shard,), data_share=share))[0] for share in (1.0, 0.999, 0.5, 0.2)]
    prints = [pool.fingerprint for pool in pools]
    assert prints[0] == prints[1] and len(set(prints)) == 3
    assert not any(" " in text for text in prints), "that would be two sources"
    sources = Data(data=(shard,)).sources
    assert len({decoded_key(pool, sources, EvalTransform(16, 10**6)) for pool in pools}) == 3
    assert len(open_pool(Data(data=(shard,), data_share=0.2))[0]) == 40


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan"), "half", True])
def test_no_share(share):
    with pytest.raises(ValueError, match=r"Data\.data_share must lie in \(0, 1\]"):
        Data(data_share=share)


def test_nothing_left(tmp_path, shard):
    with pytest.raises(ValueError, match=r"--data-share 0.001 leaves none of the 200 samples of .*shard.tar"):
        open_pool(Data(data=(shard,), data_share=0.001))
    config = small_config(tmp_path)  # 40 samples, batches of 8
    with pytest.raises(ValueError, match=r"--batch-size 8 is more than the 4 samples.*or more than --data-share 0.1\."):
        train(shared(config, 0.1))


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_run_on_a_share_remembers_its_samples_only(tmp_path, monkeypatch, in_memory):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    config = shared(small_config(tmp_path, "isogclr"), 0.5, in_memory=in_memory)
    run = train(config).folder
    state = saved_state(run, 20)
    tables = {name: value for name, value in state["objective"].items() if name.endswith(".values")}
    assert tables and all(value.shape == (20,) for value in tables.values())
    seen = [value for name, value in tables.items() if "log_u" in name]
    assert seen and all(value.isfinite().all() for value in seen), "in two epochs and more each sample has come"
    assert read_lines(run / "metrics.jsonl")[-1]["epoch"] == 10.0, "two batches of 8 an epoch"

    again = train(renamed(config, "again")).folder
    assert differences(state, saved_state(again, 20)) == []
    found = audit_run(run, Options(anchors=100, device="cpu"))
    assert found.results["checkpoints"][-1]["samples"] == 20


def test_resuming(tmp_path):
    config = shared(small_config(tmp_path, "sogclr"), 0.5)
    run = train(replace(config, training=replace(config.training, samples=80))).folder
    for other in (1.0, 0.25):
        with pytest.raises(ValueError, match=r"--resume cannot change --data-share \(it was 0.5, now "):
            train(shared(config, other), resume=run)
    train(config, resume=run)
    assert saved_state(run, 20)["position"]["step"] == 20


@pytest.mark.slow
def test_batches_that_are_selected_on_a_share(tmp_path):
    config = shared(small_config(tmp_path, "openclip", steps=8), 0.5)
    run = train(replace(config, selection=Selection(batches="spectral"))).folder
    assert saved_state(run, 8)["position"]["step"] == 8


def on_rank(rank, config):
    train(config)


def test_the_same_on_two_ranks(tmp_path, two_ranks):
    config = shared(small_config(tmp_path, "sogclr"), 0.5)
    one = train(config).folder
    two_ranks.run(on_rank, renamed(config, "two"))
    losses = [[line["loss"] for line in read_lines(run / "metrics.jsonl")] for run in (one, tmp_path / "two")]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0.0, atol=1e-5)
