"""How much of the objective's variation each setting explains: Optuna's fANOVA and mean decrease in impurity.

Both fit a forest to the trials and so speak of the region that was tried, which a Bayesian sampler narrows as it goes.
Optuna's evaluators read settings as they are; one that is searched on a log scale is given to them as its logarithm,
or else its largest decade would count for nearly all of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fullbatch.trials.slots import Ended

FEWEST = 8  # trials, below which a forest says nothing


def importance_of(ended: Sequence[Ended], log_scaled: Collection[str], metric: int = 0) -> dict[str, Any] | str:
    """Shares by setting, largest first, that add up to 1; or why there are none.

    A trial that diverged counts with the worst value, where there is one.  Pruned trials are left out, since theirs is
    the value of a shorter training, and counted, since those that are left are what the pruner liked; and so are
    settings that not all trials have.
    """
    pruned = sum(one.status == "pruned" for one in ended)
    trials = [(one.params, value) for one in ended if (value := _value(one, metric)) is not None]
    if len(trials) < FEWEST:
        said = f" ({pruned} were pruned)" if pruned else ""
        return f"of whole trials there are {len(trials)}{said}, and fewer than {FEWEST} tell nothing"
    if len({value for _, value in trials}) == 1:
        return f"all {len(trials)} trials have the same value"
    every = dict.fromkeys(name for params, _ in trials for name in params)
    shared = [name for name in every if all(name in params for params, _ in trials)]
    varied = [name for name in shared if len({_key(params[name]) for params, _ in trials}) > 1]
    if not varied:
        return "no setting that all trials have takes more than one value"
    columns = {name: _column([params[name] for params, _ in trials], name in log_scaled) for name in varied}
    fanova, mdi = _evaluated(columns, [value for _, value in trials])
    return {
        "fanova": fanova,
        "mdi": mdi,
        "trials": len(trials),
        "pruned": pruned,
        "left_out": [name for name in every if name not in shared],
    }


def _value(one: Ended, metric: int) -> float | None:
    if one.status in ("pruned", "failed") or one.values is None or not math.isfinite(one.values[metric]):
        return None
    return one.values[metric]


def _key(value: Any) -> tuple[str, str]:
    return type(value).__name__, repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _column(values: Sequence[Any], log: bool) -> list[float] | list[str]:
    """Numbers as numbers, all else as words."""
    if not all(map(_is_number, values)):
        return [repr(value) for value in values]
    numbers = [float(value) for value in values]
    return [math.log(value) for value in numbers] if log and min(numbers) > 0.0 else numbers


def _evaluated(
    columns: Mapping[str, list[float] | list[str]], values: Sequence[float]
) -> tuple[dict[str, float], dict[str, float]]:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

    spaces: dict[str, BaseDistribution] = {}
    for name, column in columns.items():
        if isinstance(column[0], str):
            spaces[name] = CategoricalDistribution(sorted(set(map(str, column))))
        else:
            numbers = [float(value) for value in column]
            spaces[name] = FloatDistribution(min(numbers), max(numbers))
    loudness = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a study in memory is nobody's news
    try:
        study = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    finally:
        optuna.logging.set_verbosity(loudness)
    study.add_trials(
        optuna.trial.create_trial(
            params={name: column[place] for name, column in columns.items()}, distributions=spaces, value=value
        )
        for place, value in enumerate(values)
    )
    forests = (
        optuna.importance.FanovaImportanceEvaluator(seed=0),
        optuna.importance.MeanDecreaseImpurityImportanceEvaluator(seed=0),
    )
    fanova, mdi = (optuna.importance.get_param_importances(study, evaluator=forest) for forest in forests)
    return _plain(fanova), _plain(mdi)


def _plain(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: float(share) for name, share in shares.items()}
