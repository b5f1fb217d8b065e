"""A data set in memory gives batches as the loader's are: no sample twice, the same on any number of ranks."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fullbatch.config.data import Data
from fullbatch.data.images import EvalTransform, TrainTransform
from fullbatch.data.in_memory import InMemoryBatches, Resident, cropped, decode_all, decoded_key, random_boxes, resident
from fullbatch.data.loader import SamplePool, open_pool
from fullbatch.data.order import Order, uniforms
from fullbatch.data.sample import BadSample, RawSample, Samples
from fullbatch.distributed import World
from tests.data.making import png
from tests.data.test_loader import tokenize

CPU = torch.device("cpu")


class Pictures(Samples):
    """Samples with one to three captions; some cannot be read."""

    name = "pictures"

    def __init__(self, count=30, bad=(), fingerprint="pictures-1"):
        self.count, self.bad, self.fingerprint, self.reads = count, set(bad), fingerprint, 0

    def __len__(self):
        return self.count

    def read(self, index):
        self.reads += 1
        if index in self.bad:
            raise BadSample(f"pictures:{index}", "broken")
        return RawSample(str(index), png((16, 12), index), tuple(f"{index} {turn}" for turn in range(1 + index % 3)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))


def make(samples=None, world=World(), seed=3, batch_size=8, crop=(0.5, 1.0)):
    pool = SamplePool([samples or Pictures()])
    key = decoded_key(pool, [None], EvalTransform(8))
    pool.sources[0].reads = 0
    decoded = decode_all(pool, key, EvalTransform(8), workers=0)
    order = Order(pool.lengths, (1.0,), seed)
    kept = resident(key, decoded, tokenize, CPU)
    return InMemoryBatches(pool, order, batch_size, kept, crop, True, world)


def test_an_epoch_shows_no_sample_twice_and_the_next_another_order():
    batches = make()
    first, second = (torch.cat([batches[step].ids for step in steps]) for steps in (range(3), range(3, 6)))
    assert len(first.unique()) == 24 and not torch.equal(first, second)


def test_the_middle_can_be_entered():
    late, whole = make()[5], list(make().stream([range(6)], 0, CPU))[5]
    assert all(torch.equal(getattr(late, name), getattr(whole, name)) for name in ("ids", "images", "tokens"))


def test_ranks_put_together_are_one_rank():
    for step in range(5):
        parts = [make(world=World(rank, 2))[step] for rank in range(2)]
        whole = make()[step]
        for name in ("ids", "images", "tokens"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_captions_are_the_samples_own_and_all_are_drawn():
    batches, seen = make(), set()
    for step in range(60):
        batch = batches[step]
        for sample, tokens in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
            number, turn = "".join(map(chr, tokens)).split()
            assert int(number) == sample
            seen.add((sample, int(turn)))
    assert len(seen) == sum(1 + sample % 3 for sample in range(30))


def test_what_cannot_be_read_is_replaced_and_named():
    batches = make(Pictures(bad=(3, 4), fingerprint="spoilt"))
    shown = torch.cat([batches[step].ids for step in range(9)])
    assert not {3, 4} & set(shown.tolist()) and len(shown) == 72
    decoded = decode_all(batches.pool, "spoilt", EvalTransform(8), workers=0)
    assert [name.split(": ")[0] for name in decoded.bad] == ["pictures:3", "pictures:4"]
    assert all(batch.ids.tolist() == [0, 1, 2, 5, 6] for batch in batches.chosen(range(7), 10))


def test_chosen_samples_are_whole_with_their_first_captions():
    ids = [5, 29, 0, 11]
    shares = [list(make(world=World(rank, 2)).chosen(ids, 1)) for rank in range(2)]
    found = [batch for pair in zip(*shares, strict=True) for batch in pair]
    assert [batch.ids.tolist() for batch in found] == [[0], [1], [2], [3]]
    for batch, sample in zip(found, ids, strict=True):
        assert torch.equal(batch.images[0], EvalTransform(8)(png((16, 12), sample), "picture"))
        assert "".join(map(chr, batch.tokens[0].tolist())).strip() == f"{sample} 0"


def test_it_is_decoded_once_and_again_when_the_data_change():
    first = Pictures()
    before = make(first)[0]
    again = Pictures()
    after = make(again)[0]
    assert (first.reads, again.reads) == (30, 0)
    assert torch.equal(before.images, after.images)
    other = Pictures(fingerprint="pictures-2")
    make(other)
    assert other.reads == 30


def test_pictures_replaced_under_their_old_names_are_decoded_again(tmp_path):
    data = Data(data=(str(tmp_path / "pictures"),), in_memory=True)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for colour in ("red", "blue"):
        for number in range(3):
            Image.new("RGB", (8, 8), colour).save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text(f"picture {number}")
        pool, _ = open_pool(data)
        key = decoded_key(pool, data.sources, EvalTransform(8))
        decoded = decode_all(pool, key, EvalTransform(8), workers=0)
        assert tuple(decoded.pixels_nCHW[0, :, 0, 0]) == {"red": (255, 0, 0), "blue": (0, 0, 255)}[colour]


def test_an_epoch_in_which_nothing_can_be_read():
    pool = SamplePool([Pictures(8, bad=range(8))])
    decoded = decode_all(pool, "nothing", EvalTransform(8), workers=0)
    kept = Resident(torch.from_numpy(decoded.pixels_nCHW), torch.zeros(0, 12), np.zeros(8, int), np.zeros(8, int))
    with pytest.raises(ValueError, match="Hardly a sample of the epoch can be read"):
        InMemoryBatches(pool, Order((8,), (1.0,), 0), 4, kept)[0]


def test_workers_change_nothing():
    pool = SamplePool([Pictures(600, bad=(7,), fingerprint="many")])
    alone = decode_all(pool, "alone", EvalTransform(8), workers=0)
    shared = decode_all(pool, "shared", EvalTransform(8), workers=2)
    assert np.array_equal(alone.pixels_nCHW, shared.pixels_nCHW) and alone.captions == shared.captions


def test_the_whole_image_is_itself_and_a_mirror_mirrors():
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    whole = torch.tensor([[0.0, 0.0, 8.0, 8.0]]).expand(2, 4)
    out = cropped(images, whole, torch.tensor([False, True]))
    assert torch.equal(out[0], images[0]) and torch.equal(out[1], images[1].flip(2))


def test_a_crop_is_what_the_loader_cuts():
    """The two resize by other bicubic kernels; on a smooth picture that is a few grey levels."""
    raw = png((64, 64), seed=5)
    square = EvalTransform(64)(raw, "picture")
    box = (5.0, 9.0, 50.0, 44.0)
    ours = cropped(square[None], torch.tensor([box]), torch.tensor([False]))[0]

    left, top, width, height = (int(value) for value in box)
    image = Image.open(io.BytesIO(raw)).convert("RGB").crop((left, top, left + width, top + height))
    theirs = torch.from_numpy(np.array(image.resize((64, 64), Image.Resampling.BICUBIC))).permute(2, 0, 1)
    assert (ours.int() - theirs.int()).abs().max() <= 4


def test_boxes_lie_inside_and_keep_the_share_of_the_area():
    positions = np.arange(4000)
    boxes = random_boxes(64, (0.3, 0.9), lambda turn, what: uniforms(positions, 17 + 10 * turn + what))
    left, top, width, height = boxes.T
    assert (left >= 0).all() and (top >= 0).all() and (left + width <= 64).all() and (top + height <= 64).all()
    share = width * height / 64**2
    assert 0.28 < share.min() < 0.35 and 0.85 < share.max() < 0.93
    train = TrainTransform(64, (0.3, 0.9))
    assert train.crop == (0.3, 0.9) and 0.57 < share.mean() < 0.62


def test_uniforms_fill_the_interval():
    drawn = uniforms(np.arange(20000), 5)
    assert drawn.min() >= 0.0 and drawn.max() < 1.0 and abs(drawn.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
