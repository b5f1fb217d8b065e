import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before any hub client is imported: no test waits for a network
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: threads that wait for each other starve two tests
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as fullbatch sets it, which comes after torch here

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from torch.nn.functional import normalize

from tests.browser import browser, browser_with_a_font, playwright  # noqa: F401  (fixtures)

torch.set_num_threads(1)  # small tensors: threads only get in each other's way
settings.register_profile(
    "any machine", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def unit_rows(count: int, width: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=-1).to(dtype)


def _ranks(size):
    from tests.distributed.pool import RankPool

    pool = RankPool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks():
    """Two real gloo processes, started once a session."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four_ranks():
    """More than two add up in an order that matters."""
    yield from _ranks(4)
