"""Clusters of equal size: each row has one centre, each centre has ``capacity`` rows, at the least total cost.

With ``capacity`` copies of each centre this is the minimum-weight matching of Algorithm 3 (``spectral.py``), and the
Hungarian method on a rows x rows matrix would solve it (``scipy.optimize.linear_sum_assignment``).  But the copies of a
centre are all alike, so it is a transport problem with few sinks, and paths between the k centres are all there is to
look for: five times as fast at 1280 rows and 40 centres, ninety at 5120 (``benchmarks/selection.py``), and as exact.
"""

# N: rows   k: centres

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def even_assignment(cost_Nk: Floats, capacity: int) -> Ints:
    """The centre of each row: exactly ``capacity`` rows a centre, at the least total cost.

    Starts from every row at its nearest centre, which is the best there is when sizes are free, and takes rows away
    from crowded centres one by one, each time along the cheapest chain of moves that ends where there is room
    (successive shortest paths): after every chain the assignment is the cheapest one of its sizes.
    Of equal costs the earlier centre and the earlier row win, so the result depends on nothing but the arguments.
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
