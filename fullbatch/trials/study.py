"""A search's plan in its storage, so that a worker on another machine needs nothing but the storage's name.

The plan is an attribute of a study that has the search's name; the phases are studies of their own beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial

from fullbatch.config.words import listed, nearest
from fullbatch.trials.comparison_checks import first_difference
from fullbatch.trials.search_plan import SearchPlan, search_from
from fullbatch.trials.slots import PhaseName
from fullbatch.trials.storage import patiently

PLAN = "plan"


def phase_study(name: str, phase: PhaseName) -> str:
    return f"{name}/{phase}"


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
    return search_from(json.loads(study.user_attrs[PLAN]))


def searches_in(storage: BaseStorage) -> list[str]:
    found = patiently(lambda: optuna.get_all_study_summaries(storage, include_best_trial=False))
    return sorted(one.study_name for one in found if PLAN in one.user_attrs)
