import pytest
import torch

from fullbatch.theory.embeddings import (
    FreePairs,
    antipodes,
    cross_polytope,
    distance,
    optimum_of,
    relabelled_distance,
    simplex,
)


def matchings(vertices):
    if not vertices:
        yield []
        return
    first, *rest = vertices
    for other in rest:
        for more in matchings([vertex for vertex in rest if vertex != other]):
            yield [(first, other), *more]


@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_antipodes_are_the_best_of_all_matchings(count):
    maps = torch.randn(20, count, count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    found = antipodes(maps)
    assert torch.equal(found.gather(1, found), torch.arange(count).expand(20, -1))  # partners of each other
    nearest = distance(count, count // 2, maps) if count > 2 else None
    for place, gram in enumerate(maps):
        best = min(float(sum(gram[a, b] + gram[b, a] for a, b in one)) for one in matchings(list(range(count))))
        mine = sum(float(gram[i, found[place, i]]) for i in range(count))
        assert mine == pytest.approx(best, abs=1e-12)
        if nearest is not None:
            target = cross_polytope(found[place])
            assert float(nearest[place]) == pytest.approx(float((gram - target).norm()), abs=1e-12)


def test_more_maps_than_a_chunk_and_n_16():
    partner = torch.tensor([5, 2, 1, 7, 6, 0, 4, 3, 9, 8, 15, 14, 13, 12, 11, 10])
    maps = cross_polytope(partner).expand(600, -1, -1) + 0.01 * torch.randn(600, 16, 16, dtype=torch.float64)
    assert torch.equal(antipodes(maps), partner.expand(600, -1))


def test_vectors_of_the_optima_are_at_distance_0():
    corners = torch.cat([torch.eye(3), -torch.eye(3)])[[0, 4, 2, 1, 5, 3]].double()
    assert float(distance(6, 3, FreePairs.of(torch.stack([corners, corners])).gram_RNN)) < 1e-12
    centred = torch.eye(5).double() - 0.2
    assert float(distance(5, 5, FreePairs.of(torch.stack([centred, centred])).gram_RNN)) < 1e-12
    assert simplex(5)[0, 1] == pytest.approx(-0.25)


def test_an_unproven_case_has_no_optimum():
    assert optimum_of(8, 3, torch.eye(8).double()) is None
    with pytest.raises(ValueError, match="not for N = 8, d = 3"):
        distance(8, 3, torch.eye(8).double())


def test_an_odd_number_has_no_antipodes():
    with pytest.raises(ValueError, match="even number of vectors, got 5"):
        antipodes(torch.eye(5).double()[None])


def test_relabelling_is_undone():
    gram = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    assert relabelled_distance(gram, gram[order][:, order]) < 1e-12
    assert relabelled_distance(gram, gram + torch.eye(6)) == pytest.approx(6**0.5, abs=1e-9)
    with pytest.raises(ValueError, match="at most 9"):
        relabelled_distance(torch.eye(10), torch.eye(10))
