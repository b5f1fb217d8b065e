import pytest

import fullbatch as fb
from fullbatch.find.index import PictureIndex
from fullbatch.find.nearest import Finder
from tests.find.making import serving
from tests.training.small import small_config


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run folder."""
    return fb.train(small_config(tmp_path_factory.mktemp("trained"), steps=4)).folder


@pytest.fixture(scope="session")
def encoder(trained):
    return fb.load(trained, device="cpu", batch_size=4)


@pytest.fixture(scope="session")
def indexed(encoder):
    """Index a folder and open it for searching."""

    def make(folder, place, copy="fp32"):
        index = PictureIndex(folder, encoder, place)
        index.update()
        return Finder(index, copy)

    return make


@pytest.fixture(scope="module")
def server(finder):
    """Of the module's own pictures."""
    with serving(finder) as running:
        yield running
