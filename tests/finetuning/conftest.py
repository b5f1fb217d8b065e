import pytest

from tests.finetuning.making import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """An exported model with much to learn; beside it, in ``trained``, the run it is of."""
    return make_base(tmp_path_factory.mktemp("base"), steps=20, lr=1e-3)


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """One with something to lose."""
    return make_base(tmp_path_factory.mktemp("learned"), steps=100, lr=3e-3)
