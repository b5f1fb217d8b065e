"""Views: colours against torchvision, draws that depend on (seed, epoch, place, view) alone, one way on every path."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2 import functional as TF

from fullbatch.config.data import Views
from fullbatch.data.images import (
    EVALUATION,
    EvalTransform,
    ViewMaker,
    augmented,
    blended,
    blurred,
    grey,
    no_tokens,
    turned,
)
from fullbatch.data.in_memory import InMemoryBatches, decode_all, decoded_key, resident
from fullbatch.data.loader import EvaluationBatches, SamplePool, TrainingBatches
from fullbatch.data.order import Order
from fullbatch.data.sample import BadSample, RawSample, Samples
from fullbatch.distributed import World
from tests.data.making import png

CPU = torch.device("cpu")
NOTHING = Views((1.0, 1.0), 0.0, (0.0, 0.0, 0.0, 0.0), 0.0, 0.0, 0.0)
ALL = Views(view_blur=0.5)


def pictures(count=6, size=16, seed=0):
    return torch.randint(256, (count, 3, size, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def floats(count=6, size=16):
    pixels = pictures(count, size).float() / 255.0
    pixels[0] = pixels[0].mean(0)  # a grey one, whose hue is anything
    return pixels


# -- colours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", [-0.5, -0.1, 0.0, 0.07, 0.3])
def test_hue_is_torchvisions(move):
    pixels = floats()
    torch.testing.assert_close(turned(pixels, torch.tensor(move)), TF.adjust_hue(pixels, move), rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.4])
def test_contrast_and_saturation_are_torchvisions(factor):
    pixels = floats()
    share = torch.tensor(factor)
    expected = TF.adjust_saturation(pixels, factor)
    torch.testing.assert_close(blended(pixels, grey(pixels), share), expected, rtol=0.0, atol=1e-3)
    mean = grey(pixels).mean((1, 2, 3), keepdim=True)
    expected = torch.stack([TF.adjust_contrast(each, factor) for each in pixels])
    torch.testing.assert_close(blended(pixels, mean, share), expected, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("sigma", [0.5, 1.3])
def test_blur_is_torchvisions_with_a_width_of_its_own_for_each_image(sigma):
    pixels = floats()
    widths = torch.full((6,), 1e-3)
    widths[2] = sigma
    found = blurred(pixels, widths, radius=3)
    torch.testing.assert_close(found[2], TF.gaussian_blur(pixels[2], [7, 7], [sigma, sigma]), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(found[3:], pixels[3:], rtol=0.0, atol=1e-6)


def test_a_crop_is_pillows_bilinear_one():
    """But for the rows and columns at its edge, where Pillow does not look beyond the box."""
    size = 32
    smooth = torch.nn.functional.interpolate(pictures(1, 8).float(), size=size, mode="bicubic").clamp(0, 255).byte()
    image = Image.fromarray(smooth[0].permute(1, 2, 0).numpy())
    drawn = torch.tensor([[28 / size - 1, 20 / size, 26 / size - 1, 14 / size, 1.0, 1.0, 1.0, 0.0, 1.0, 1e-3]])
    resized = image.resize((size, size), Image.Resampling.BILINEAR, box=(4, 6, 24, 20))
    expected = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    found = augmented(smooth, drawn, NOTHING)[0]
    assert (found.int() - expected.int()).abs()[:, 2:-2, 2:-2].max() <= 1
    drawn[0, 1] *= -1.0
    assert torch.equal(augmented(smooth, drawn, NOTHING)[0], found.flip(2))


# -- draws ------------------------------------------------------------------------------------------------------------


def test_nothing_to_do_does_nothing():
    images = pictures()
    for view in ViewMaker(NOTHING, 1)(images, 0, np.arange(6)):
        assert torch.equal(view, images)


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=8), st.integers(-1, 5), st.integers(0, 3), st.integers(0, 7)
)
def test_a_view_depends_on_its_own_place_alone(places, epoch, seed, at):
    maker = ViewMaker(ALL, seed)
    at %= len(places)
    drawn = maker.drawn(epoch, np.array(places), 16)
    alone = maker.drawn(epoch, np.array(places[at : at + 1]), 16)
    assert np.array_equal(drawn[:, at], alone[:, 0])
    images = pictures(len(places))
    both = maker(images, epoch, np.array(places))
    single = maker(images[at : at + 1], epoch, np.array(places[at : at + 1]))
    for whole, one in zip(both, single, strict=True):
        assert whole.dtype == torch.uint8 and whole.shape == images.shape
        assert torch.equal(whole[at : at + 1], one)


def test_views_differ_by_seed_epoch_place_and_view():
    places = np.arange(200)
    base = ViewMaker(Views(), 0).drawn(0, places, 32)
    assert base.shape == (2, 200, 10) and base.dtype == np.float32
    others = [base[1], ViewMaker(Views(), 1).drawn(0, places, 32)[0], ViewMaker(Views(), 0).drawn(1, places, 32)[0]]
    for other in others:
        assert abs(np.corrcoef(base[0, :, 4], other[:, 4])[0, 1]) < 0.3
        assert (base[0, :, 0] == other[:, 0]).mean() < 0.5


def test_draws_follow_the_settings():
    chosen = Views((0.2, 0.5), 0.3, (0.4, 0.3, 0.2, 0.1), 0.8, 0.2, 0.5)
    drawn = ViewMaker(chosen, 5).drawn(2, np.arange(20_000), 224)[0]
    width, height = np.abs(drawn[:, 1]), drawn[:, 3]
    share = width * height
    assert share.min() > 0.19 and share.max() < 0.51 and abs(share.mean() - 0.35) < 0.01
    aspect = width / height
    assert aspect.min() > 0.72 and aspect.max() < 1.38
    assert (np.abs(drawn[:, 0]) + width <= 1.0001).all() and (np.abs(drawn[:, 2]) + height <= 1.0001).all()
    assert abs((drawn[:, 1] < 0.0).mean() - 0.3) < 0.02
    for place, move, still in ((4, 0.4, 1.0), (5, 0.3, 1.0), (6, 0.2, 1.0), (7, 0.1, 0.0)):
        assert abs((drawn[:, place] != still).mean() - 0.8) < 0.02
        assert math.isclose(np.abs(drawn[:, place] - still).max(), move, rel_tol=0.01)
    assert abs(drawn[:, 8].mean() - 0.8) < 0.02
    assert abs((drawn[:, 9] > 0.01).mean() - 0.5) < 0.02 and drawn[:, 9].max() <= 2.0


def test_large_images_are_made_in_pieces(monkeypatch):
    images, places = pictures(7), np.arange(7)
    whole = ViewMaker(ALL, 0)(images, 0, places)
    monkeypatch.setattr("fullbatch.data.images._ELEMENTS", 3 * 16 * 16 * 2)
    for one, other in zip(whole, ViewMaker(ALL, 0)(images, 0, places), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"view_crop": (0.0, 1.0)}, "view_crop must be two shares"),
        ({"view_grey": 1.5}, r"view_grey must lie in \[0, 1\]"),
        ({"view_jitter": (0.4, 0.4, 0.4, 0.6)}, "view_jitter must be four numbers"),
        ({"view_jitter": (0.4,)}, "view_jitter must be four numbers"),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        Views(**changes)


# -- batches ----------------------------------------------------------------------------------------------------------


class Pictures(Samples):
    name = fingerprint = "pictures"

    def __init__(self, bad=()):
        self.bad = set(bad)

    def __len__(self):
        return 30

    def read(self, index):
        if index in self.bad:
            raise BadSample(str(index), "broken")
        return RawSample(str(index), png((20, 16), index), ("a picture",))


def both_kinds(tmp_path, monkeypatch, world=World(), bad=()):
    monkeypatch.setenv("FULLBATCH_CACHE", str(tmp_path / "cache"))
    pool, views = SamplePool([Pictures(bad)]), ViewMaker(ALL, 3)
    order = Order(pool.lengths, (1.0,), 3)
    read = TrainingBatches(pool, order, 8, EvalTransform(16), no_tokens, world, views=views)
    key = decoded_key(pool, [None], EvalTransform(16))
    kept = resident(key, decode_all(pool, key, EvalTransform(16), 0), no_tokens, CPU)
    return read, InMemoryBatches(pool, order, 8, kept, world=world, views=views)


def assert_alike(one, other):
    assert torch.equal(one.ids, other.ids)
    for mine, theirs in ((one.images, other.images), (one.tokens, other.tokens)):
        assert mine.dtype == torch.uint8 and mine.shape == theirs.shape
        assert (mine.int() - theirs.int()).abs().max() <= 1


def test_read_or_in_memory_the_views_are_the_same(tmp_path, monkeypatch):
    read, kept = both_kinds(tmp_path, monkeypatch)
    for step in (0, 2, 3, 7):
        assert_alike(read[step], kept[step])
    first = kept[0]
    assert not torch.equal(first.images, first.tokens)


def test_two_ranks_make_the_batch_of_one(tmp_path, monkeypatch):
    whole = both_kinds(tmp_path, monkeypatch)
    for place in range(2):
        ranks = [both_kinds(tmp_path, monkeypatch, World(rank, 2))[place] for rank in range(2)]
        for step in (1, 5):
            for name in ("ids", "images", "tokens"):
                parts = torch.cat([getattr(rank[step], name) for rank in ranks])
                assert torch.equal(parts, getattr(whole[place][step], name))


def test_a_bad_sample_is_replaced_and_still_has_two_views(tmp_path, monkeypatch):
    for batches in both_kinds(tmp_path, monkeypatch, bad=(4, 9)):
        seen = [batches[step] for step in range(3)]
        assert not {4, 9} & set(torch.cat([batch.ids for batch in seen]).tolist())
        assert all(batch.tokens.shape == batch.images.shape for batch in seen)


def test_evaluation_sees_the_same_views_in_every_pass(tmp_path, monkeypatch):
    _, kept = both_kinds(tmp_path, monkeypatch)
    batches = EvaluationBatches(kept.pool, 16, EvalTransform(16), no_tokens, views=kept.views)
    chosen = list(kept.chosen(range(30), 16))
    for index in range(2):
        assert_alike(batches[index], chosen[index])
    expected = kept.views(kept.resident.images_nCSS[:16], EVALUATION, np.arange(16))
    assert torch.equal(chosen[0].images, expected[0]) and torch.equal(chosen[0].tokens, expected[1])


def test_no_image_has_no_view():
    """A rank's last batch of an evaluation may be empty."""
    settings = Views(view_blur=1.0)
    none = torch.empty((0, 3, 16, 16), dtype=torch.uint8)
    assert augmented(none, torch.empty((0, 1)), settings).shape == none.shape
