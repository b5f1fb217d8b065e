"""Where a search is kept: SQLite or a data base server, which all its workers share; and the plan in it.

Optuna asks two things of a storage that SQLite, as Optuna opens it, does not give: that taking a waiting trial and
ending a running one look and write in one act.  (A data base server locks the row.)  So every transaction on SQLite
takes the write lock at its beginning.

The plan is an attribute of a study that has the search's name, so that a worker on another machine needs nothing but
the storage's name.  The phases are studies of their own beside it.
"""

from __future__ import annotations

import json
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState, create_trial
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from fullbatch.config.messages import HIDDEN, listed, nearest, without_password
from fullbatch.data.durable import make_folder
from fullbatch.training.run_folder import replace_text
from fullbatch.trials.checks import first_difference
from fullbatch.trials.comparison_plan import read_plan
from fullbatch.trials.search_plan import SearchPlan, search_from

T = TypeVar("T")
LOST_AFTER = 180.0  # seconds without a heartbeat
BEAT_EVERY = 10.0  # seconds, or less where a worker is soon taken for dead
PATIENCE = 60.0  # seconds that a storage may be away
_DAMAGED = ("malformed",)  # as SQLite says it; that does not mend itself
_DRIVERS = {"psycopg2": "postgresql+psycopg2", "psycopg": "postgresql+psycopg"}
_WITHOUT_DRIVER = {
    "postgresql": "the driver is missing: pip install 'fullbatch[postgresql]'.",
    "postgres": "write postgresql:// in place of postgres://.",
}


class StorageAway(ConnectionError):
    """For longer than anyone waits: a server that is down, a disk that is full or gone."""


@contextmanager
def naming(storage: str) -> Iterator[None]:
    """In the message where it is away: neither Optuna nor SQLite says which file it was."""
    try:
        yield
    except (StorageAway, StorageInternalError) as error:
        raise StorageAway(f"{without_password(storage)}: {error}") from error


def open_storage(where: str, lost_after: float = LOST_AFTER) -> BaseStorage:
    """``where``: the path of an SQLite file, or the URL of a data base.  After ``lost_after`` seconds without a
    heartbeat a worker counts as dead."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    warnings.filterwarnings("ignore", "Heartbeat of storage")  # it is meant for Optuna's own loop
    if not where.strip():
        raise ValueError("The study's place is empty; it is a file, sqlite:///FILE or postgresql://USER@HOST/NAME.")
    if "://" not in where:
        _check_file(Path(where))
        where = URL.create("sqlite", database=str(Path(where).absolute())).render_as_string()
        where = where.replace("{", "{{").replace("}", "}}")  # Optuna formats it
    try:
        shown, url = without_password(where), make_url(where)
        kind = url.get_backend_name()
    except (ArgumentError, ValueError) as error:
        raise ValueError(
            f"{without_password(where)!r} is not a URL of a data base; one is postgresql://USER:PASSWORD@HOST/NAME."
        ) from error
    if url.host and "@" in f"{url.host}{url.database}":
        raise ValueError(f"{shown}: in a password write %40 for an @.")
    for wait in (0.05, 0.2, 0.5, 1.0, 2.0, None):
        try:
            return _opened(where, kind, max(1, round(lost_after)))
        except (NoSuchModuleError, ImportError) as error:
            unknown = f"there is no driver for {kind!r} here; known are sqlite:///FILE and postgresql://…"
            raise ValueError(f"{shown}: {_WITHOUT_DRIVER.get(kind, unknown)}") from error
        except (SQLAlchemyError, StorageInternalError, RuntimeError) as error:
            cause = error if isinstance(error, SQLAlchemyError) else error.__cause__
            said = str(cause.orig) if isinstance(cause, DBAPIError) else str(cause or error)
            # two processes that make the tables at the same time: one of them has to look again
            at_once = isinstance(cause, IntegrityError) or "already exists" in said or "locked" in said
            if wait is None or not at_once:
                raise ValueError(f"The study's data base {shown} cannot be used: {' '.join(said.split())}") from error
            time.sleep(wait)
    raise AssertionError("unreachable")


def _opened(url: str, kind: str, grace: int) -> RDBStorage:
    options: dict[str, Any] = {"connect_args": {"timeout": PATIENCE}} if kind == "sqlite" else {"pool_pre_ping": True}
    if kind == "postgresql":
        url, options["connect_args"] = _with_driver(url), {"connect_timeout": 10}
    storage = RDBStorage(url, options, heartbeat_interval=max(1, grace // 6), grace_period=grace)
    if kind == "sqlite":
        _lock_at_the_beginning(storage.engine)
    return storage


def _lock_at_the_beginning(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: object) -> None:
        connection.isolation_level = None  # sqlite3 must not begin by itself

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections from before do not know


def _with_driver(url: str) -> str:
    """SQLAlchemy's default driver has changed over its versions; take the one that is installed."""
    scheme, rest = url.split("://", 1)
    if scheme != "postgresql":
        return url
    for module, named in _DRIVERS.items():
        if find_spec(module) is not None:
            return f"{named}://{rest}"
    raise ImportError("psycopg2")


def _check_file(path: Path) -> None:
    try:
        make_folder(path.parent)
        with path.open("ab"):
            pass
        with path.open("rb") as file:
            first = file.read(16)
    except OSError as error:
        raise ValueError(f"The study cannot be kept in {path}: {error.strerror or error}.") from error
    if first.startswith(b'{"op_code"'):
        raise ValueError(
            f"{path} is a journal file, in which earlier versions kept a search; begin it anew, with its search.yaml "
            "as --plan and another --name."
        )
    if first and not first.startswith(b"SQLite format 3"):
        raise ValueError(f"{path} is not an SQLite file; name a new file for the study, or the URL of a data base.")


def heartbeat_every(storage: BaseStorage) -> float | None:
    """Seconds; None: the storage has no heartbeats."""
    lost_after = getattr(storage, "grace_period", None)
    return None if lost_after is None else min(BEAT_EVERY, lost_after / 6)


def without_heartbeat(storage: BaseStorage, trial_id: int) -> bool:
    """Whether it never had one: such a trial would never grow stale."""
    if not isinstance(storage, RDBStorage):
        return False
    from optuna.storages._rdb.models import TrialHeartbeatModel
    from optuna.storages._rdb.storage import _create_scoped_session  # its errors are those that we wait for

    with _create_scoped_session(storage.scoped_session) as session:
        return TrialHeartbeatModel.where_trial_id(trial_id, session) is None


def patiently(act: Callable[[], T], patience: float = PATIENCE) -> T:
    """Try again while the storage is away; the act must be one that may be done twice."""
    until = time.monotonic() + patience
    pause = 0.1
    while True:
        try:
            return act()
        except (StorageInternalError, OSError) as error:
            cause = error.__cause__
            said = " ".join(str(getattr(cause, "orig", None) or cause or error).split()).rstrip(".")
            if any(words in said for words in _DAMAGED):
                raise ValueError(f"The study's data base is damaged: {said}. Put back a whole one.") from error
            if time.monotonic() + pause > until:
                raise StorageAway(f"The study's storage was away for {patience:.0f} seconds: {said}.") from error
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


PLAN = "plan"


def keep_plan(storage: BaseStorage, plan: SearchPlan) -> SearchPlan:
    """Put it there; one that is there already must be the same, or trials of two searches would be mixed.  The one that
    is there: what does not touch the results may differ.

    Of several who bring a plan at once the first counts.  An attribute has the last writer's value, but trials are
    numbered in the order in which they were made: so each makes one that says its plan, and the lowest number is it.
    """
    study = patiently(lambda: optuna.create_study(storage=storage, study_name=plan.name, load_if_exists=True))
    if PLAN not in study.user_attrs:
        ours = create_trial(state=TrialState.FAIL, user_attrs={PLAN: json.dumps(plan.as_dict(), sort_keys=True)})
        patiently(lambda: study.add_trial(ours))
        brought = [trial for trial in patiently(study.get_trials) if PLAN in trial.user_attrs]
        first = min(brought, key=lambda trial: trial.number).user_attrs[PLAN]
        patiently(lambda: study.set_user_attr(PLAN, first))
    kept = kept_plan(storage, plan.name)
    if change := difference(kept, plan):
        raise ValueError(
            f"The search {plan.name!r} was begun with another plan ({change}). Go on with `--resume`, or give this one "
            "another --name."
        )
    return kept


def difference(before: SearchPlan, now: SearchPlan) -> str:
    """The first, in words; "" where the two make the same trials."""
    return first_difference(_telling(before), _telling(now))


def _telling(plan: SearchPlan) -> dict[str, Any]:
    """The plan without what does not touch the results: how a run is written down, and who loads its data."""
    values = plan.as_dict()
    base = {group: fields for group, fields in values["base"].items() if group != "run"}
    if isinstance(data := base.get("data"), Mapping):
        base["data"] = {name: value for name, value in data.items() if name != "workers"}
    return {**values, "base": base}


def kept_plan(storage: BaseStorage, name: str | None) -> SearchPlan:
    """By its name; without one, the only one there is."""
    there = searches_in(storage)
    if name is None and len(there) == 1:
        name = there[0]
    if name is None:
        raise ValueError(
            f"The storage holds the searches {listed(there)}; say which with --name."
            if there
            else "There is no search in this storage yet; bring one with --plan or --recipe."
        )
    if name not in there:
        known = f" It holds {listed(there)}." if there else " It holds none; bring a plan with --plan or --recipe."
        raise ValueError(f"There is no search {name!r} in this storage{nearest(name, there)}{known}")
    study = patiently(lambda: optuna.load_study(storage=storage, study_name=name))
    try:
        values = json.loads(study.user_attrs[PLAN])
    except (ValueError, TypeError) as error:
        raise ValueError(f"The plan of the search {name!r} in this storage is damaged ({error}).") from None
    return search_from(values)


def searches_in(storage: BaseStorage) -> list[str]:
    studies = patiently(lambda: optuna.get_all_study_summaries(storage, include_best_trial=False))
    return sorted(study.study_name for study in studies if PLAN in study.user_attrs)


# ---------------------------------------------------------------------------------------------------------------------
# A search's folder: which storage it belongs to, wherever it is looked at from and wherever it is moved to.  Its own
# data base needs no word.  Another storage is named in storage.txt, so that the folder goes on with that one and no
# other: by a path from the root, and without its password.

PLAN_FILE, STUDY, STORAGE = "search.yaml", "study.db", "storage.txt"
_JOURNAL = "study.journal"  # of earlier versions
_SQLITE_FILE = re.compile(r"^(sqlite(?:\+\w+)?:///)(?!file:|:memory:)([^?]+)(.*)$")


def storage_of(folder: Path, given: str | None) -> str:
    """The folder's, once it has one; until then the one that is ``given``, else a data base of its own."""
    own, named = str(folder / STUDY), None if given is None else _absolute(given)
    if not (folder / PLAN_FILE).is_file():
        return named or own
    file = folder / STORAGE
    kept = file.read_text(encoding="utf-8").strip() if file.is_file() else None
    if kept is None and (folder / _JOURNAL).is_file():
        raise ValueError(
            f"{folder} holds a search of an earlier version ({_JOURNAL}), which cannot be gone on with; begin it anew "
            f"with --plan {folder / PLAN_FILE} and another --name."
        )
    if given is None and HIDDEN in (kept or ""):
        raise ValueError(f"{folder} goes on with the storage {kept}; give it again, with its password: --study URL.")
    if named is None or (kept is None and named == _absolute(own)):
        return kept or own
    if _bare(named) != _bare(kept or _absolute(own)):
        raise ValueError(
            f"{folder} belongs to the storage {kept or own}, and --study names {without_password(given or '')}; leave "
            "--study out, or take another --name or --searches."
        )
    return named


def remember(folder: Path, storage: str) -> None:
    """Where the storage is another one than the folder's own."""
    if _absolute(storage) != _absolute(str(folder / STUDY)):
        replace_text(folder / STORAGE, without_password(_absolute(storage)) + "\n")


def plan_to_go_on_with(folder: Path, storage: str) -> SearchPlan:
    """The one in the storage, which search.yaml says as well."""
    written = search_from(read_plan(folder / PLAN_FILE, SearchPlan))
    file = _file_of(storage)
    opened = open_storage(storage) if file is None or file.is_file() else None
    try:
        there = [] if opened is None else searches_in(opened)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:  # what Optuna keeps as text
        raise ValueError(f"The study's data base {without_password(storage)} is damaged ({error}).") from None
    if opened is None or written.name not in there:
        others = f" (it has {listed(there)})" if there else " and no other"
        raise ValueError(
            f"{folder} belongs to the storage {without_password(storage)}, which has no search {written.name!r}"
            f"{': there is no such file' if opened is None else others}. If the storage was moved, put it back or "
            f"correct {folder / STORAGE}; else begin anew with --plan {folder / PLAN_FILE} and another --name."
        )
    plan = kept_plan(opened, written.name)
    if change := difference(plan, written):
        raise ValueError(
            f"{folder / PLAN_FILE} was changed after the search began: {change}. A search keeps its plan: undo that, "
            f"or begin another with --plan {folder / PLAN_FILE} --name ANOTHER."
        )
    return plan


def _file_of(storage: str) -> Path | None:
    if "://" not in storage:
        return Path(storage)
    sqlite = _SQLITE_FILE.fullmatch(storage)
    return None if sqlite is None else Path(sqlite[2])


def _absolute(storage: str) -> str:
    """A file by its path from the root.

    >>> _absolute("postgresql://me@host/db"), _absolute("sqlite:////a/b.db?timeout=3")
    ('postgresql://me@host/db', 'sqlite:////a/b.db?timeout=3')
    """
    if "://" not in storage:
        return str(Path(storage).absolute())
    return _SQLITE_FILE.sub(lambda url: f"{url[1]}{Path(url[2]).absolute()}{url[3]}", storage)


def _bare(storage: str) -> str:
    """Without a password, whether there was one or not."""
    return without_password(storage).replace(f":{HIDDEN}@", "@")
