"""Which cases of a test everyone runs, and which only `make test-all` does: the same code, met from another side."""

import pytest


def first(some, of):
    """``some`` at once, the others in the slow tier."""
    assert set(some) <= set(of)
    return [case if case in some else pytest.param(case, marks=pytest.mark.slow) for case in of]
