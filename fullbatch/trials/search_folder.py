"""A search's folder: which storage it belongs to, wherever it is looked at from and wherever it is moved to.

Its own data base needs no word.  Another storage is named in storage.txt, so that the folder goes on with that one and
no other: by a path from the root, and without its password.
"""

from __future__ import annotations

import re
from pathlib import Path

from fullbatch.config.shown import HIDDEN, without_password
from fullbatch.config.words import listed
from fullbatch.training.run_folder import replace_text
from fullbatch.trials.search_plan import SearchPlan, read_search, search_from
from fullbatch.trials.storage import difference, kept_plan, open_storage, searches_in

PLAN, STUDY, STORAGE = "search.yaml", "study.db", "storage.txt"
_JOURNAL = "study.journal"  # of earlier versions
_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///)(?!file:|:memory:)([^?]+)(.*)")


def storage_of(folder: Path, given: str | None) -> str:
    """The folder's, once it has one; until then the one that is ``given``, else a data base of its own."""
    own = str(folder / STUDY)
    if not (folder / PLAN).is_file():
        return own if given is None else absolute(given)
    kept = _kept(folder)
    if kept is None and (folder / _JOURNAL).is_file():
        raise ValueError(
            f"{folder} holds a search of an earlier version ({_JOURNAL}), which cannot be gone on with; begin it anew "
            f"with --plan {folder / PLAN} and another --name."
        )
    if given is None:
        if kept is not None and HIDDEN in kept:
            raise ValueError(
                f"{folder} goes on with the storage {kept}; give it again, with its password: --study URL."
            )
        return kept or own
    if _bare(absolute(given)) != _bare(absolute(own) if kept is None else kept):
        raise ValueError(
            f"{folder} belongs to the storage {kept or own}, and --study names {without_password(given)}; leave --study"
            " out, or take another --name or --searches."
        )
    return own if kept is None else absolute(given)


def remember(folder: Path, storage: str) -> None:
    """Where the storage is another one than the folder's own."""
    if absolute(storage) != absolute(str(folder / STUDY)):
        replace_text(folder / STORAGE, without_password(absolute(storage)) + "\n")


def plan_to_go_on_with(folder: Path, storage: str) -> SearchPlan:
    """The one in the storage, which search.yaml says as well."""
    written = search_from(read_search(folder / PLAN))
    shown = without_password(storage)
    missing = (
        f"{folder} belongs to the storage {shown}, which has no search {written.name!r}{{}}. If the storage was moved, "
        f"put it back or correct {folder / STORAGE}; else begin anew with --plan {folder / PLAN} and another --name."
    )
    file = _file_of(storage)
    if file is not None and not file.is_file():
        raise ValueError(missing.format(": there is no such file"))
    opened = open_storage(storage)
    there = searches_in(opened)
    if written.name not in there:
        raise ValueError(missing.format(f" (it has {listed(there)})" if there else " and no other"))
    plan = kept_plan(opened, written.name)
    if change := difference(plan, written):
        raise ValueError(
            f"{folder / PLAN} was changed after the search began: {change}. A search keeps its plan: undo that, or "
            f"begin another with --plan {folder / PLAN} --name ANOTHER."
        )
    return plan


def _kept(folder: Path) -> str | None:
    file = folder / STORAGE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def absolute(storage: str) -> str:
    """A file by its path from the root.

    >>> absolute("postgresql://me@host/db"), absolute("sqlite:////a/b.db?timeout=3")
    ('postgresql://me@host/db', 'sqlite:////a/b.db?timeout=3')
    """
    if "://" not in storage:
        return str(Path(storage).absolute())
    found = _SQLITE_FILE.fullmatch(storage)
    return storage if found is None else f"{found[1]}{Path(found[2]).absolute()}{found[3]}"


def _file_of(storage: str) -> Path | None:
    if "://" not in storage:
        return Path(storage)
    found = _SQLITE_FILE.fullmatch(storage)
    return None if found is None else Path(found[2])


def _bare(storage: str) -> str:
    """Without a password, whether there was one or not."""
    return without_password(storage).replace(f":{HIDDEN}@", "@")
