"""Where a search is kept: a journal file, SQLite, or a data base server; what all its workers share.

Optuna asks two things of a storage that SQLite, as Optuna opens it, does not give: that taking a waiting trial and
ending a running one look and write in one act.  (A data base server locks the row, a journal is replayed in one
order.)  So every transaction on SQLite takes the write lock at its beginning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage

from fullbatch.config.shown import without_password
from fullbatch.trials.journal import JournalFile

T = TypeVar("T")
PATIENCE = 60.0  # seconds that a storage may be away
_DRIVERS = {"psycopg2": "postgresql+psycopg2", "psycopg": "postgresql+psycopg"}


class StorageAway(ConnectionError):
    """For longer than anyone waits: a server that is down, a disk that is full or gone."""


def open_storage(where: str) -> BaseStorage:
    """``where``: the path of a journal file, ``sqlite:///FILE``, or the URL of a data base."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not where.strip():
        raise ValueError("The study's place is empty; it is a file, sqlite:///FILE or postgresql://USER@HOST/NAME.")
    return _data_base(where) if "://" in where else _journal(Path(where))


def patiently(act: Callable[[], T], patience: float = PATIENCE) -> T:
    """Try again while the storage is away; the act must be one that may be done twice."""
    until = time.monotonic() + patience
    pause = 0.1
    while True:
        try:
            return act()
        except (StorageInternalError, OSError) as error:
            if time.monotonic() + pause > until:
                cause = error.__cause__
                said = " ".join(str(getattr(cause, "orig", None) or cause or error).split()).rstrip(".")
                raise StorageAway(f"The study's storage was away for {patience:.0f} seconds: {said}.") from error
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


def _journal(path: Path) -> BaseStorage:
    try:
        if path.exists():
            with path.open("rb") as file:
                first = file.readline()
            if first.endswith(b"\n") and not first.lstrip().startswith(b'{"op_code"'):
                raise ValueError(f"{path} is not the journal of a study; name a new file, or sqlite:///FILE, or a URL.")
        path.parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFile(path))
    except OSError as error:
        raise ValueError(f"The study cannot be kept in {path}: {error.strerror or error}.") from error
    except (AssertionError, LookupError, TypeError) as error:  # Optuna's answers to what it has not written
        raise ValueError(
            f"{path} is damaged, or of another version of Optuna: a line of it has no meaning ({error!r})."
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# data bases


def _data_base(url: str) -> BaseStorage:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

    try:
        shown, parts = without_password(url), make_url(url)
        kind = parts.get_backend_name()
    except (ArgumentError, ValueError) as error:
        raise ValueError(
            f"{without_password(url)!r} is not a URL of a data base; one is postgresql://USER:PASSWORD@HOST/NAME."
        ) from error
    if parts.host and "@" in f"{parts.host}{parts.database}":
        raise ValueError(f"{shown}: in a password write %40 for an @.")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for wait in (0.05, 0.2, 0.5, 1.0, 2.0, None):
        try:
            return _opened(url, kind)
        except (NoSuchModuleError, ImportError) as error:
            raise ValueError(f"{shown}: {_without_driver(kind)}") from error
        except (SQLAlchemyError, StorageInternalError, RuntimeError) as error:
            cause = error if isinstance(error, SQLAlchemyError) else error.__cause__
            said = str(cause.orig) if isinstance(cause, DBAPIError) else str(cause or error)
            if wait is None or not _of_two_at_once(cause, said):
                raise ValueError(f"The study's data base {shown} cannot be used: {' '.join(said.split())}") from error
            time.sleep(wait)
    raise AssertionError("unreachable")


def _opened(url: str, kind: str) -> RDBStorage:
    match kind:
        case "sqlite":
            storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": PATIENCE}})
            _lock_at_the_beginning(storage)
            return storage
        case "postgresql":
            options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
            return RDBStorage(_with_driver(url), engine_kwargs=options)
        case _:
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})


def _lock_at_the_beginning(storage: RDBStorage) -> None:
    from sqlalchemy import event

    def connected(connection: Any, record: object) -> None:
        connection.isolation_level = None  # sqlite3 must not begin by itself

    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(storage.engine, "connect", connected)
    event.listen(storage.engine, "begin", begun)
    storage.engine.dispose()  # connections from before do not know


def _of_two_at_once(error: BaseException | None, said: str) -> bool:
    """Two processes that make the tables at the same time: one of them has to look again."""
    from sqlalchemy.exc import IntegrityError

    return isinstance(error, IntegrityError) or "already exists" in said or "locked" in said


def _with_driver(url: str) -> str:
    """SQLAlchemy's default driver has changed over its versions; take the one that is installed."""
    scheme, rest = url.split("://", 1)
    if scheme != "postgresql":
        return url
    for module, named in _DRIVERS.items():
        if find_spec(module) is not None:
            return f"{named}://{rest}"
    raise ImportError("psycopg2")


def _without_driver(kind: str) -> str:
    match kind:
        case "postgresql":
            return "the driver is missing: pip install 'fullbatch[postgresql]'."
        case "postgres":
            return "write postgresql:// in place of postgres://."
        case _:
            return f"there is no driver for {kind!r} here; known are sqlite:///FILE and postgresql://…"
