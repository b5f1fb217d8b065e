"""A folder goes on with its own storage and its own plan, from wherever it is looked at."""

import shutil
from pathlib import Path

import optuna
import pytest
from optuna.storages import InMemoryStorage

from fullbatch.config.tree import write_values
from fullbatch.trials.storage import (
    PLAN_FILE,
    STORAGE,
    STUDY,
    difference,
    keep_plan,
    kept_plan,
    open_storage,
    plan_to_go_on_with,
    remember,
    storage_of,
)
from tests.trials.plans import plan_of


def begun(folder, storage, plan):
    """As a search leaves it, without trials."""
    keep_plan(open_storage(storage), plan)
    folder.mkdir(exist_ok=True)
    remember(folder, storage)
    (folder / PLAN_FILE).write_text(write_values(plan.as_dict()))


def test_its_own_data_base_is_found_from_everywhere_and_moves_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("small")
    begun(folder, storage_of(folder, None), plan_of())
    assert not (folder / STORAGE).exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.move(tmp_path / "small", tmp_path / "elsewhere" / "moved")
    found = storage_of(Path("moved"), None)
    assert found == f"moved/{STUDY}" and plan_to_go_on_with(Path("moved"), found) == plan_of()
    assert storage_of(Path("moved"), str(tmp_path / "elsewhere/moved" / STUDY)) == found, "it may be named"


@pytest.mark.parametrize("named", ["other.db", "sqlite:///other.db"])
def test_another_storage_is_kept_by_its_path_from_the_root(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "small"
    begun(folder, storage_of(folder, named), plan_of())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = storage_of(folder, None)
    assert str(tmp_path) in found and (folder / STORAGE).read_text().strip() == found
    assert plan_to_go_on_with(folder, found) == plan_of()
    with pytest.raises(ValueError, match=r"belongs to the storage .*other.*leave --study out"):
        storage_of(folder, named)  # from here it is another
    with pytest.raises(ValueError, match="belongs to the storage"):
        storage_of(folder, str(folder / STUDY))


def test_a_password_is_not_kept_and_asked_for(tmp_path):
    (tmp_path / PLAN_FILE).touch()
    remember(tmp_path, "postgresql://me:secret@host/db")
    assert "secret" not in (tmp_path / STORAGE).read_text()
    with pytest.raises(ValueError, match=r"me:\*\*\*@host/db; give it again, with its password"):
        storage_of(tmp_path, None)
    for same in ("postgresql://me:secret@host/db", "postgresql://me@host/db"):
        assert storage_of(tmp_path, same) == same
    with pytest.raises(ValueError, match="belongs to the storage") as refused:
        storage_of(tmp_path, "postgresql://me:secret@host/other")
    assert "secret" not in str(refused.value)


def test_a_storage_without_the_search_is_refused(tmp_path):
    folder = tmp_path / "small"
    begun(folder, str(folder / STUDY), plan_of())
    (folder / STUDY).unlink()
    with pytest.raises(ValueError, match="has no search 'small': there is no such file"):
        plan_to_go_on_with(folder, str(folder / STUDY))
    assert not (folder / STUDY).exists(), "no new study is begun"
    keep_plan(open_storage(str(folder / STUDY)), plan_of(name="other"))
    with pytest.raises(ValueError, match=r"has no search 'small' \(it has .*other"):
        plan_to_go_on_with(folder, str(folder / STUDY))


def test_a_plan_that_was_edited_is_refused(tmp_path):
    folder = tmp_path / "small"
    begun(folder, str(folder / STUDY), plan_of())
    (folder / PLAN_FILE).write_text(write_values(plan_of(seed=7).as_dict()))
    with pytest.raises(ValueError, match="was changed after the search began: seed was 0 and is now 7"):
        plan_to_go_on_with(folder, str(folder / STUDY))


def test_what_does_not_touch_the_results_makes_no_other_plan():
    storage, plan = InMemoryStorage(), plan_of(fine={"trials": 20, "changes": {"epochs": 4}})
    assert keep_plan(storage, plan) == plan
    assert not difference(plan, plan_of(fine={"trials": 20, "changes": {"epochs": 4.0}}))
    base = dict(plan.base)
    base["run"] = {**base["run"], "log_every": 3, "tensorboard": False}
    base["data"] = {**base["data"], "workers": 1}
    assert keep_plan(storage, plan_of(base=base)) == plan, "the one that it was begun with"
    base["data"] = {**base["data"], "image_size": 16}
    with pytest.raises(ValueError, match=r"another plan \(base.data.image_size was"):
        keep_plan(storage, plan_of(base=base))


@pytest.mark.parametrize("moment", ["add_trial", "set_user_attr"])
def test_of_two_who_bring_a_plan_at_once_the_first_counts(monkeypatch, moment):
    """The other does all of it just before, or just after, this one has made its mark."""
    storage, first, second = InMemoryStorage(), plan_of(seed=1), plan_of(seed=2)
    act = getattr(optuna.Study, moment)

    def late(study, *values):
        monkeypatch.undo()
        if moment == "add_trial":
            keep_plan(storage, first)
        else:
            with pytest.raises(ValueError, match="another plan"):
                keep_plan(storage, first)
        act(study, *values)

    monkeypatch.setattr(optuna.Study, moment, late)
    if moment == "add_trial":
        with pytest.raises(ValueError, match="seed was 1 and is now 2"):
            keep_plan(storage, second)
        assert kept_plan(storage, "small").seed == 1
    else:
        assert keep_plan(storage, second).seed == 2 == kept_plan(storage, "small").seed


def test_a_search_of_an_earlier_version_is_refused(tmp_path):
    folder = tmp_path / "small"
    begun(folder, str(folder / STUDY), plan_of())
    (folder / STUDY).rename(folder / "study.journal")
    with pytest.raises(ValueError, match=r"search of an earlier version .*; begin it anew with --plan .*search\.yaml"):
        storage_of(folder, None)
