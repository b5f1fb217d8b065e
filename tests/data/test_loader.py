"""Batches do not depend on workers or ranks; a bad sample is replaced by the same other one everywhere."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fullbatch.config.data import Data
from fullbatch.data.images import EvalTransform, TrainTransform
from fullbatch.data.loader import EvaluationBatches, SamplePool, TrainingBatches, load, open_pool
from fullbatch.data.order import Blocks, Order
from fullbatch.data.sample import BadSample, RawSample, Samples
from fullbatch.data.workers import read_ahead
from fullbatch.distributed import World
from tests.data.making import captioned, write_shard

CPU = torch.device("cpu")


def tokenize(captions):
    rows = [[ord(letter) for letter in caption[:12].ljust(12)] for caption in captions]
    return torch.tensor(rows)


def batches(path, batch_size=8, world=World(), seed=3, crop=(0.3, 1.0)):
    pool, order = open_pool(Data(data=(str(path),)))
    order = type(order)(order.lengths, order.weights, seed)
    return TrainingBatches(pool, order, batch_size, TrainTransform(8, crop, flip=True), tokenize, world)


@pytest.fixture
def shard(tmp_path):
    return write_shard(tmp_path / "a.tar", captioned(30))


def equal(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("ids", "images", "tokens"))


@pytest.mark.parametrize("size", [(32, 24), (96, 72)])  # the larger are decoded at reduced size
def test_workers_change_nothing(tmp_path, size):
    shard = write_shard(tmp_path / "a.tar", captioned(30, size))
    runs = [list(load(batches(shard), range(9), workers, CPU)) for workers in (0, 1, 2)]
    for run in runs[1:]:
        assert all(equal(*pair) for pair in zip(runs[0], run, strict=True))


class Shared:
    """Whether a worker made its images where the training process can read them."""

    def __init__(self, of):
        self.of = of

    def __getitem__(self, step):
        return self.of[step].images.is_shared()


def test_a_worker_stacks_images_in_shared_memory(shard):
    assert list(read_ahead(Shared(batches(shard)), [range(2)], 1)) == [True, True]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_put_together_are_one_rank(shard, size):
    whole = batches(shard)
    for step in range(6):
        parts = [batches(shard, world=World(rank, size))[step] for rank in range(size)]
        assert torch.equal(torch.cat([part.ids for part in parts]), whole[step].ids)
        assert torch.equal(torch.cat([part.images for part in parts]), whole[step].images)


def test_the_middle_of_an_epoch_can_be_entered(shard):
    assert equal(next(load(batches(shard), range(5, 6), 0, CPU)), list(load(batches(shard), range(6), 0, CPU))[5])


def test_an_epoch_shows_no_sample_twice(shard):
    shown = torch.cat([batches(shard)[step].ids for step in range(3)])  # 30 samples, batches of 8
    assert len(shown.unique()) == 24


def test_crops_differ_between_epochs(shard):
    run = batches(shard, batch_size=30)
    first, second = run[0], run[1]
    assert not torch.equal(first.images[first.ids.argsort()], second.images[second.ids.argsort()])


def spoilt(tmp_path, bad):
    samples = captioned(30)
    for number in bad:
        samples[number][1]["jpg"] = b"no image"
    return write_shard(tmp_path / "spoilt.tar", samples)


def test_bad_samples_are_replaced_the_same_everywhere(tmp_path):
    bad = {4, 9, 17}
    path = spoilt(tmp_path, bad)
    one, again = (list(load(batches(path), range(6), workers, CPU)) for workers in (0, 2))
    for batch, other in zip(one, again, strict=True):
        assert equal(batch, other)
        assert not bad & set(batch.ids.tolist())
        assert len(batch.ids) == 8
        assert [str(b) for b in batch.bad] == [str(b) for b in other.bad]
    named = {str(error).split(":")[1] for batch in one for error in batch.bad}
    assert named <= {f"{number:09d}" for number in bad}
    planned = [sample for step in range(6) for sample in batches(path).ids(step)]
    met = sum(sample in bad for sample in planned)
    assert sum(len(batch.bad) for batch in one) >= met > 0


def test_in_blocks_a_bad_sample_is_replaced_by_one_of_its_window(tmp_path):
    """Which is read now; the last, short window has others to draw from, and a window of bad ones the epoch."""
    order = Order((30,), (1.0,), 3, Blocks(2, 4))
    whole = order.ids(0, np.arange(30)).tolist()
    for bad in ({4, 9, 17}, set(whole[28:]), set(whole[8:16])):
        run = replace(batches(spoilt(tmp_path, bad), batch_size=30), order=order)
        for place, (planned, shown) in enumerate(zip(whole, run[0].ids.tolist(), strict=True)):
            near = order.neighbourhood(place)
            assert shown not in bad and (planned in bad or shown == planned)
            assert shown in whole[near.start : near.stop] or bad == set(whole[8:16])


def test_nothing_but_bad_samples_is_an_explanation(tmp_path):
    path = spoilt(tmp_path, range(30))
    with pytest.raises(ValueError, match="in a row could not be read"):
        batches(path)[0]


class Numbers(Samples):
    """A source of which number 3 is bad."""

    def __init__(self, count):
        self.count, self.name, self.fingerprint = count, "numbers", f"numbers {count}"

    def _read(self, index):
        if index == 3:
            raise BadSample("numbers:3", "odd")
        return RawSample(f"numbers:{index}", b"", (f"number {index}",))


class Blank(EvalTransform):
    def __call__(self, raw, name):
        return torch.zeros((3, self.size, self.size), dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_sees_each_sample_once(size):
    pool = SamplePool([Numbers(10)])
    parts = [EvaluationBatches(pool, 4, Blank(8), tokenize, World(rank, size)) for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    ids = [sample for part in parts for index in range(len(part)) for sample in part[index].ids.tolist()]
    assert sorted(ids) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_ids_of_several_sources_do_not_collide():
    pool = SamplePool([Numbers(5), Numbers(7), Numbers(2)])
    assert len(pool) == 14
    names = []
    for sample in np.arange(14):
        try:
            names.append(pool.read(int(sample)).name)
        except BadSample as error:
            names.append(error.name)
    assert names == [f"numbers:{index}" for count in (5, 7, 2) for index in range(count)]
