"""Distributions of similarities against loops in float64."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from fullbatch.evaluation.similarities import (
    BINS,
    FEWEST_FOR_FAR,
    merged_bins,
    near_negatives,
    similarity_distributions,
)


def tables(count, width=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    image = torch.randn(count, width, dtype=torch.float64, generator=draw)
    text = image + 0.8 * torch.randn(count, width, dtype=torch.float64, generator=draw)
    return normalize(image, dim=1), normalize(text, dim=1)


def by_loops(anchors, others):
    found = {"positives": [], "nearest": [], "far": [], "lower": []}
    for i, anchor in enumerate(anchors.tolist()):
        dots = [math.fsum(a * b for a, b in zip(anchor, other, strict=True)) for other in others.tolist()]
        negatives = sorted((value for j, value in enumerate(dots) if j != i), reverse=True)
        found["positives"].append(dots[i])
        found["nearest"] += negatives[:5]
        found["far"] += negatives[89:100]
        found["lower"] += negatives[len(negatives) // 2 :]
    return found


@pytest.mark.parametrize(("count", "chunk"), [(12, 5), (13, None), (FEWEST_FOR_FAR, 64)])
def test_it_equals_loops_in_both_directions(count, chunk):
    image, text = tables(count)
    for anchors, others in ((image, text), (text, image)):
        found = similarity_distributions(anchors, others, chunk)
        for name, values in by_loops(anchors, others).items():
            distribution = found.get(name)
            if name == "far" and count < FEWEST_FOR_FAR:
                assert distribution is None
                continue
            mean = math.fsum(values) / len(values)
            deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
            assert distribution.count == len(values)
            assert distribution.mean == pytest.approx(mean, rel=1e-9)
            assert distribution.deviation == pytest.approx(deviation, rel=1e-9)
            places = [min(int((value + 1.0) * BINS / 2), BINS - 1) for value in values]
            assert distribution.bins_K.tolist() == [places.count(place) for place in range(BINS)]


def test_chunks_change_nothing():
    image, text = tables(40)
    one, other = (similarity_distributions(image, text, chunk) for chunk in (7, 40))
    for name in ("positives", "nearest", "lower"):
        assert torch.equal(one[name].bins_K, other[name].bins_K)
        assert one[name].mean == pytest.approx(other[name].mean, rel=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_ends_of_the_scale_have_bins_too(sign):
    image = normalize(torch.ones(20, 3), dim=1)  # in float32 its products pass 1 by a little
    found = similarity_distributions(image, sign * image)
    assert found["positives"].bins_K[BINS - 1 if sign > 0 else 0] == 20
    middles, (shares,) = merged_bins([found["positives"]])
    assert sum(shares) == pytest.approx(1.0) and len(middles) == len(shares)


@pytest.mark.parametrize("most", [8, 80])
def test_common_bins_keep_every_value(most):
    image, text = tables(60)
    found = similarity_distributions(image, text)
    distributions = [found["positives"], found["nearest"], found["lower"]]
    middles, rows = merged_bins(distributions, most)
    assert len(middles) <= most
    for distribution, shares in zip(distributions, rows, strict=True):
        assert sum(shares) == pytest.approx(1.0)
        about = sum(middle * share for middle, share in zip(middles, shares, strict=True))
        assert about == pytest.approx(distribution.mean, abs=middles[1] - middles[0])
    assert shares[0] == shares[-1] == 0.0


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match="at least 12 pairs"):
        similarity_distributions(*tables(11))
    image, text = tables(20)
    with pytest.raises(ValueError, match="length 1"):
        similarity_distributions(image * 2.0, text)


@pytest.mark.parametrize("chunk", [None, 4])
def test_near_negatives_of_two_models_by_loops(chunk):
    """TuneCLIP's Table 21: by the first model, whose captions of others are nearer than its own; by both, how near."""
    models = [tables(14, seed=0), tables(14, seed=1)]
    groups = torch.tensor([0, 0, *range(1, 13)])  # the first two have one caption, which is no negative
    dots = [(image @ text.T).tolist() for image, text in models]
    others = {i: [j for j in range(14) if groups[j] != groups[i]] for i in range(14)}
    margin = {i: max(dots[0][i][j] for j in others[i]) - dots[0][i][i] for i in range(14)}
    found = near_negatives(models, groups, anchors=3, chunk=chunk)
    assert [row.anchor for row in found] == sorted(margin, key=margin.get, reverse=True)[:3]
    for row in found:
        nearest = sorted(others[row.anchor], key=lambda j, i=row.anchor: dots[0][i][j], reverse=True)[:5]
        assert row.others == nearest
        for which, values in enumerate(row.similarities):
            assert values == pytest.approx([dots[which][row.anchor][j] for j in nearest])
