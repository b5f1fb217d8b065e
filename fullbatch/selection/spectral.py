"""Batches of pairs that are hard for each other, by spectral clustering: Algorithm 3 of "Mini-Batch Optimization of
Contrastive Loss" (Cho et al. 2023).

    w(k, l) = sum over (i, j) in {(k, l), (l, k)} of
              log(1 + (B - 1) exp((u_i.v_j - u_i.v_i) / tau)) + log(1 + (B - 1) exp((v_i.u_j - v_i.u_i) / tau))

The weights of a batch's pairs, over B (B - 1), bound its loss from below, by Jensen's inequality; so batches that cut
little weight of the graph are batches of large loss.  The paper has no tau; the authors' code has.  The epoch is cut
into blocks first, since the eigenvectors cost the cube of a block's size: 0.13 s at 1280 rows, 7 s at 5120, on one
core.  Larger blocks make harder batches.  (Lanczos was tried: faster on some tables, slower on others, or no end.)

What the paper leaves open:

- The places of the epoch that fill no batch, at its end, are left out, as in a uniform epoch.
- More batches a block than there are: one block.  One batch a block, or one batch in all: the uniform order.
- Rows never seen (not finite) have no weights.  They are in no cluster and go where they are least in the way: their
  cost is the same in every batch.  A block with fewer rows seen than batches keeps its uniform order.
- Weights may vanish (at small tau), so that the graph falls apart and the eigenvalue 0 has several vectors: any basis
  of them serves, since the rows of a component are alike in each.  Rows that are zero in every vector stay zero.
- Equal rows, or all of them equal: fewer than k different centres; the assignment still fills every batch.
- Equal texts would be each other's negatives, and the most alike of all: they are swapped apart after the assignment.
- Batches come in the order of their first places, places within a batch ascend: neither depends on names of clusters.
"""

# P: places of an epoch, in uniform order   N: rows of a block   S: rows seen   k: batches of a block   B: batch size
# D: width

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus

from fullbatch.config.extras import require_extra

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_LINEAR_FROM = 40.0  # log(1 + e^x) is x within 4e-18 there, finer than float64


def require_packages(wish: str) -> None:
    """What is imported below, where it is needed, is an extra."""
    for package in ("scipy", "sklearn", "threadpoolctl"):
        require_extra(package, "spectral", wish)


def pair_weights(image_ND: Tensor, text_ND: Tensor, tau: float, batch_size: int) -> Tensor:
    """w of every two rows, 0 on the diagonal: the affinity matrix A of Algorithm 3."""
    sim_NN = (image_ND / tau) @ text_ND.T
    shift_N = math.log(batch_size - 1) - sim_NN.diagonal()
    # a similarity has its image as an anchor, and its text; the transpose below brings the other order of the pair
    half_NN = softplus(sim_NN + shift_N[:, None], threshold=_LINEAR_FROM)
    half_NN += softplus(sim_NN + shift_N, threshold=_LINEAR_FROM)
    return (half_NN + half_NN.T).fill_diagonal_(0)


def laplacian(weights_NN: Tensor) -> Tensor:
    """L = D - A."""
    result_NN = -weights_NN
    result_NN.diagonal().add_(weights_NN.sum(1))
    return result_NN


def first_eigenvectors(laplacian_NN: Tensor, count: int) -> Tensor:
    """The eigenvectors of the ``count`` smallest eigenvalues, as columns."""
    if laplacian_NN.device.type == "cpu":  # only those asked for; torch would compute them all
        from scipy.linalg import eigh  # here, since few runs need it

        _, vectors = eigh(laplacian_NN.numpy(), subset_by_index=[0, count - 1], check_finite=False)
        return torch.from_numpy(vectors)
    all_vectors: Tensor = torch.linalg.eigh(laplacian_NN).eigenvectors
    return all_vectors[:, :count]


def unit_rows(vectors_Nk: Tensor) -> Tensor:
    """Rows of length one; a row of zeros stays as it is."""
    length_N1 = vectors_Nk.norm(dim=1, keepdim=True)
    return vectors_Nk / torch.where(length_N1 > 0, length_N1, 1.0)


def distances_to_centres(rows_Nk: Floats, centres: int, seed: int) -> Floats:
    """How far each row is from each centre that k-means finds (k-means++, one start)."""
    from sklearn.cluster import KMeans  # here, since it takes a second to import and few runs need it
    from sklearn.exceptions import ConvergenceWarning

    distinct = min(centres, len(np.unique(rows_Nk, axis=0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # rows equal but for rounding: two centres in one place
        fitted = KMeans(distinct, n_init=1, random_state=seed % 2**32).fit(rows_Nk)
    centre_kk: Floats = fitted.cluster_centers_[np.arange(centres) % distinct]  # too few different rows: some twice
    squared_Nk: Floats = (rows_Nk**2).sum(1)[:, None] - 2 * rows_Nk @ centre_kk.T + (centre_kk**2).sum(1)
    distance_Nk: Floats = np.sqrt(np.maximum(squared_Nk, 0.0))
    return distance_Nk


def even_clusters(
    image_ND: Tensor, text_ND: Tensor, batch_size: int, tau: float, seed: int, texts_N: Ints | None = None
) -> Ints:
    """Algorithm 3 on one block: places (k, B) of its rows, each once; N must be a multiple of B.  On one CPU thread.
    ``texts_N`` tells the texts apart, 0 for one that is not known; equal ones are kept out of each other's batches."""
    rows, batches = len(image_ND), len(image_ND) // batch_size
    assert rows == batches * batch_size, "a block is whole batches"
    seen_N = image_ND.isfinite().all(1) & text_ND.isfinite().all(1)
    if batches < 2 or int(seen_N.sum()) < batches:
        return np.arange(rows).reshape(batches, batch_size)
    wide = torch.promote_types(image_ND.dtype, torch.float32)  # half precision would not tell the eigenvectors apart
    image_SD, text_SD = image_ND[seen_N].to(wide), text_ND[seen_N].to(wide)
    with one_thread():
        vectors_Sk = unit_rows(first_eigenvectors(laplacian(pair_weights(image_SD, text_SD, tau, batch_size)), batches))
        cost_Nk = np.zeros((rows, batches))
        cost_Nk[seen_N.numpy(force=True)] = distances_to_centres(vectors_Sk.double().numpy(force=True), batches, seed)
    centre_N = even_assignment(cost_Nk, batch_size)
    if texts_N is not None:
        centre_N = equals_apart(centre_N, cost_Nk, texts_N)
    places_kB = np.argsort(centre_N, kind="stable").reshape(batches, batch_size)
    return places_kB[places_kB[:, 0].argsort()]


def blocks(places: int, batch_size: int, block_batches: int) -> list[range]:
    """The blocks of an epoch: consecutive places, whole batches; the last block may be smaller."""
    end, size = places // batch_size * batch_size, block_batches * batch_size
    return [range(start, min(start + size, end)) for start in range(0, end, size)]


def order_of_block(
    image_ND: Tensor, text_ND: Tensor, batch_size: int, tau: float, seed: int, block: int, texts_N: Ints | None = None
) -> Ints:
    """The rows of the epoch's block number ``block`` in their new order: what one planner does at a time."""
    block_seed = int(np.random.SeedSequence([seed % 2**64, block]).generate_state(1)[0])
    return even_clusters(image_ND, text_ND, batch_size, tau, block_seed, texts_N).reshape(-1)


def spectral_order(
    image_PD: Tensor, text_PD: Tensor, batch_size: int, block_batches: int, tau: float, seed: int
) -> Ints:
    """The places of an epoch, block by block and batch by batch: each of the first P // B * B places once."""
    orders = [np.empty(0, np.int64)]
    for number, block in enumerate(blocks(len(image_PD), batch_size, block_batches)):
        here = slice(block.start, block.stop)
        orders.append(block.start + order_of_block(image_PD[here], text_PD[here], batch_size, tau, seed, number))
    return np.concatenate(orders)


@functools.cache
def thread_pools() -> Any:
    import sklearn.cluster  # noqa: F401  # what it loads must be there to be limited
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def one_thread() -> Iterator[None]:
    """Also where scikit-learn and SciPy work."""
    with one_torch_thread(), thread_pools().limit(limits=1):
        yield


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Sums in the same order whatever the number of cores, and planners side by side that do not crowd each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- clusters of equal size --------------------------------------------------------------------------------------------


def even_assignment(cost_Nk: Floats, capacity: int) -> Ints:
    """The centre of each row: exactly ``capacity`` rows a centre, at the least total cost.

    That is the minimum-weight matching of Algorithm 3.  The Hungarian method would solve it with ``capacity`` copies of
    each centre, but these are all alike, so paths between the k centres are all there is to look for: five times as
    fast at 1280 rows and 40 centres, ninety at 5120 (``benchmarks/selection.py``), and as exact.

    From every row at its nearest centre, rows leave crowded centres one by one, each time along the cheapest chain of
    moves that ends where there is room: after every chain the assignment is the cheapest one of its sizes (successive
    shortest paths).  Of equal costs the earlier centre and the earlier row win.
    """
    rows, centres = cost_Nk.shape
    assert rows == centres * capacity, "centres times capacity must be the number of rows"
    assert np.isfinite(cost_Nk).all(), "costs must be finite"
    centre_N: Ints = cost_Nk.argmin(1)
    size_k = np.bincount(centre_N, minlength=centres)
    moves = _Moves(cost_Nk, centre_N)
    while (size_k > capacity).any():
        path = moves.cheapest_path(size_k > capacity, size_k < capacity)
        for start, end in itertools.pairwise(path):
            centre_N[moves.row_kk[start, end]] = end
        size_k[path[0]] -= 1
        size_k[path[-1]] += 1
        for centre in path:
            moves.look_again(centre)
    return centre_N


def equals_apart(centre_N: Ints, cost_Nk: Floats, texts_N: Ints) -> Ints:
    """The assignment with equal texts at different centres, as far as that goes: of those that meet all but one change
    places with rows elsewhere, where that costs least and meets no equal in turn."""
    _, text_N = np.unique(np.where(texts_N == 0, -np.arange(1, len(texts_N) + 1), texts_N), return_inverse=True)
    centre_N, everyone = centre_N.copy(), np.arange(len(texts_N))
    count_kT = np.zeros((cost_Nk.shape[1], int(text_N.max(initial=-1)) + 1), np.int64)
    np.add.at(count_kT, (centre_N, text_N), 1)
    for here, text in np.argwhere(count_kT > 1):
        while count_kT[here, text] > 1:
            fits_N = (count_kT[centre_N, text] == 0) & (count_kT[here, text_N] == 0)
            if not fits_N.any():
                break
            equal = np.flatnonzero((centre_N == here) & (text_N == text))
            go = cost_Nk[equal][:, centre_N] - cost_Nk[equal, here, None]
            come_N = np.where(fits_N, cost_Nk[:, here] - cost_Nk[everyone, centre_N], np.inf)
            place, other = np.unravel_index((go + come_N).argmin(), go.shape)
            for row, start, end in ((equal[place], here, centre_N[other]), (other, centre_N[other], here)):
                count_kT[start, text_N[row]] -= 1
                count_kT[end, text_N[row]] += 1
                centre_N[row] = end
    return centre_N


class _Moves:
    """What it costs to move one row from a centre to another, and which row that is."""

    def __init__(self, cost_Nk: Floats, centre_N: Ints) -> None:
        centres = cost_Nk.shape[1]
        self.cost_Nk, self.centre_N = cost_Nk, centre_N
        self.cost_kk = np.full((centres, centres), np.inf)
        self.row_kk: Ints = np.zeros((centres, centres), np.int64)
        self._all: Ints = np.arange(centres)
        # a gain smaller than this is rounding, and following it could go round in a circle
        self._tolerance = 1e-12 * max(float(np.abs(cost_Nk).max(initial=0.0)), 1e-300)
        for centre in range(centres):
            self.look_again(centre)

    def look_again(self, centre: int) -> None:
        """Its cheapest moves, after its rows have changed."""
        here = np.flatnonzero(self.centre_N == centre)
        self.cost_kk[centre] = np.inf
        if here.size:
            extra = self.cost_Nk[here] - self.cost_Nk[here, centre, None]
            cheapest = extra.argmin(0)
            self.cost_kk[centre] = extra[cheapest, self._all]
            self.row_kk[centre] = here[cheapest]
            self.cost_kk[centre, centre] = np.inf

    def cheapest_path(self, crowded_k: npt.NDArray[np.bool_], roomy_k: npt.NDArray[np.bool_]) -> list[int]:
        """Centres from a crowded one to one with room, by Bellman and Ford: moves may have negative costs."""
        distance_k = np.where(crowded_k, 0.0, np.inf)
        before_k = np.full(distance_k.size, -1)
        for _ in range(distance_k.size):
            through = distance_k[:, None] + self.cost_kk
            last_k = through.argmin(0)
            found_k = through[last_k, self._all]
            better_k = found_k < distance_k - self._tolerance
            if not better_k.any():
                break
            distance_k[better_k] = found_k[better_k]
            before_k[better_k] = last_k[better_k]
        path = [int(np.where(roomy_k, distance_k, np.inf).argmin())]
        while before_k[path[0]] >= 0:
            path.insert(0, int(before_k[path[0]]))
        return path
