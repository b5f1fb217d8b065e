"""What a plan says of its batches' normalizers, against loops, and against what it is to mend."""

import math

import numpy as np
import pytest
import torch

import fullbatch as fb
from fullbatch.config.methods import METHODS
from fullbatch.selection.correction import log_corrections as of_samples
from fullbatch.selection.spectral import spectral_order
from tests.conftest import unit_rows

TAU = 0.1


def log_corrections(image, text, chosen, tau, method="neuclip", ids=None):
    return of_samples(image, text, chosen, tau, np.arange(len(image)) if ids is None else ids, METHODS[method])


def by_loops(image, text, chosen, tau, exponent=lambda gap: gap, within=False):
    """The docstring's formula, as it is printed."""
    image, text = image.tolist(), text.tolist()
    found = np.zeros((*chosen.shape, 2))

    def dot(one, other):
        return sum(a * b for a, b in zip(one, other, strict=True))

    def mean(i, among, anchors, others):
        own, kinds = dot(image[i], text[i]), (others, anchors) if within else (others,)
        terms = [math.exp(exponent(dot(anchors[i], kind[j]) - own) / tau) for j in among if j != i for kind in kinds]
        return sum(terms) / len(terms)

    for batch, rows in enumerate(chosen.tolist()):
        for place, i in enumerate(rows):
            for side, tables in enumerate(((image, text), (text, image))):
                everyone = mean(i, range(len(image)), *tables)
                found[batch, place, side] = math.log(everyone) - math.log(mean(i, rows, *tables))
    return found


@pytest.mark.parametrize(
    ("method", "form"),
    [
        ("neuclip", {}),
        ("amorlip", {}),
        ("tuneclip", {"exponent": lambda gap: max(gap + 0.1, 0.0) ** 2}),
        ("sogclr_views", {"within": True}),
    ],
)
def test_the_formula(method, form):
    image, text = unit_rows(24, 5, 1), unit_rows(24, 5, 2)
    chosen = np.random.default_rng(0).permutation(24).reshape(4, 6)
    found = log_corrections(image, text, chosen, TAU, method)
    np.testing.assert_allclose(found, by_loops(image, text, chosen, TAU, **form), rtol=1e-9, atol=1e-9)


def test_a_sample_in_two_places_is_no_negative_of_its_own():
    image, text = unit_rows(12, 5, 1), unit_rows(12, 5, 2)
    twice = [torch.cat([rows, rows[:4]]) for rows in (image, text)]
    ids = np.concatenate([np.arange(12), np.arange(4)])
    found = log_corrections(*twice, np.arange(12).reshape(3, 4), TAU, ids=ids)
    others = (image[0] @ text.T / TAU)[[*range(1, 12), 1, 2, 3]]
    near = (image[0] @ text.T / TAU)[1:4]
    torch.testing.assert_close(found[0, 0, 0], others.exp().mean().log() - near.exp().mean().log())


def test_rows_never_seen_count_for_nothing():
    image, text = unit_rows(24, 5, 1), unit_rows(24, 5, 2)
    chosen = np.arange(24).reshape(4, 6)
    image[3], text[20] = math.nan, math.nan
    found = log_corrections(image, text, chosen, TAU)
    assert found.isfinite().all() and (found[0, 3] == 0).all() and (found[3, 2] == 0).all()
    seen = [place for place in range(24) if place not in (3, 20)]
    others = log_corrections(image[seen], text[seen], np.arange(22)[1:3].reshape(1, 2), TAU)
    assert others.isfinite().all()
    image[:6] = math.nan
    image[1] = unit_rows(1, 5, 3)[0]  # the only one of its batch
    assert (log_corrections(image, text, chosen, TAU)[0] == 0).all()


@pytest.mark.parametrize("tau", [0.1, 0.01])
def test_a_part_of_the_rows_stands_for_all(tau, monkeypatch):
    """Also where an anchor's neighbours are in its batch alone: what a batch shows is never left out of the mean."""
    image, text = clustered(640, 16, 160, 3)
    chosen = spectral_order(image, text, batch_size=8, block_batches=80, tau=tau, seed=0).reshape(-1, 8)
    exact = log_corrections(image, text, chosen, tau)
    monkeypatch.setattr("fullbatch.selection.correction.MOST", 100)
    sampled = log_corrections(image, text, chosen, tau)
    assert sampled.min() >= -math.log(639 / 7) - 1e-9
    if tau == 0.1:  # at 0.01 a mean is one neighbour, which a sixth of the rows does not show
        assert abs((sampled - exact).mean()) < 0.15


def clustered(rows, width, clusters, seed):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, width, generator=generator, dtype=torch.float64)
    of = torch.randint(clusters, (rows,), generator=generator)

    def near(noise):
        table = centres[of] + noise * torch.randn(rows, width, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(table, dim=1)

    return near(0.5), near(0.5)


@pytest.mark.parametrize("method", ["neuclip", "rolling", "sogclr"])
@pytest.mark.parametrize("weights", [False, True])
def test_at_a_small_temperature_a_correction_may_be_huge(method, weights):
    """Where a batch has none of an anchor's neighbours; the steps stay finite."""
    image, text = clustered(640, 16, 160, 3)
    chosen = np.random.default_rng(0).permutation(640).reshape(-1, 8)
    log_c = log_corrections(image, text, chosen, 0.01)
    assert log_c.max() > 30.0
    objective = fb.make_objective(
        method, width=16, num_samples=640, temperature=0.01, correct_weights=weights,
        **({} if method == "sogclr" else {"prototypes": 32}),
    )  # fmt: skip
    for rows, log_c_B2 in zip(chosen[:20], log_c, strict=False):
        pairs = [table[rows].float().requires_grad_() for table in (image, text)]
        out = objective(*pairs, torch.from_numpy(rows), log_c_B2.float())
        out.loss.backward()
        assert out.loss.isfinite() and all(table.grad.isfinite().all() for table in pairs)


def log_g(anchor, other, rows, tau=TAU):
    """Of each row among the others of its batch."""
    sim = (anchor[rows] @ other[rows].T / tau).fill_diagonal_(-torch.inf)
    return sim.logsumexp(1) - math.log(len(rows) - 1)


@pytest.mark.parametrize(("staleness", "left"), [(0.0, 0.02), (0.1, 0.2)])
def test_a_current_snapshot_takes_the_bias_away(staleness, left):
    """Spectral batches show normalizers far too large; times c they are those of the data set, where the plan's
    embeddings are today's, and nearly so where they are older."""
    pytest.importorskip("sklearn")
    image, text = clustered(640, 16, 12, 0)
    generator = torch.Generator().manual_seed(7)
    old = [
        torch.nn.functional.normalize(
            rows + staleness * torch.randn(rows.shape, generator=generator, dtype=torch.float64), dim=1
        )
        for rows in (image, text)
    ]
    chosen = spectral_order(*old, batch_size=16, block_batches=40, tau=TAU, seed=0).reshape(-1, 16)
    log_c = log_corrections(*old, chosen, TAU)
    everyone = log_g(image, text, torch.arange(640))
    plain = torch.cat([log_g(image, text, torch.from_numpy(rows)) for rows in chosen])
    mended = plain + log_c[..., 0].reshape(-1)
    truth = everyone[torch.from_numpy(chosen.reshape(-1))]
    assert (plain - truth).mean() > 0.5, "the bias there is to mend"
    assert abs((mended - truth).mean()) < left
    if not staleness:
        torch.testing.assert_close(mended, truth)
