import pytest

from tests.trials import postgresql


@pytest.fixture(scope="session")
def postgresql_url():
    if why := postgresql.why_not():
        pytest.skip(why)
    with postgresql.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def storage_url(request, tmp_path):
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/study.db"
        case _:
            return request.getfixturevalue("postgresql_url")
