"""A run, whole: one frozen tree, which the command line, YAML files and the Python interface all speak.  Values lie
over values: defaults, a recipe, a file, flags.  Later wins, and some fields displace others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullbatch.config.axes import Rolling
from fullbatch.config.data import Data, Views
from fullbatch.config.messages import listed, nearest
from fullbatch.config.methods import METHODS, ObjectiveConfig, settings_of
from fullbatch.config.model import Model
from fullbatch.config.optimization import Optimizer, Recovery, Schedule
from fullbatch.config.training import Evaluation, RunFolder, Selection, Training
from fullbatch.config.tree import from_dict, merged


@dataclass(frozen=True)
class RunConfig:
    """Groups of settings; ``RunConfig.of(...)`` takes them flat, by the names they have on the command line."""

    objective: ObjectiveConfig = ObjectiveConfig()
    data: Data = Data()
    model: Model = Model()
    views: Views = Views()
    selection: Selection = Selection()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    recovery: Recovery = Recovery()
    evaluation: Evaluation = Evaluation()
    run: RunFolder = RunFolder()

    def __post_init__(self) -> None:
        if self.schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"Schedule.min_lr must not exceed Optimizer.lr, got {self.schedule.min_lr} > {self.optimizer.lr}."
            )
        pairs, batch = self.recovery.recovery_batch, self.training.batch_size
        if pairs is not None and pairs % batch:
            raise ValueError(f"Recovery.recovery_batch must be a multiple of batch_size ({batch}), got {pairs}.")
        if self.selection.averages:
            recovers = bool(self.recovery.recovery_epochs or self.recovery.recovery_steps)
            for other, given in (("graphs", self.training.graphs), ("a recovery", recovers)):
                if given:
                    raise ValueError(f'Selection.reading must be "sequential" with {other}, got "averaged".')
        if self.selection.batches == "ordered" and pairs is not None and pairs > batch:
            raise ValueError(
                f"Recovery.recovery_batch must be batch_size ({batch}) with ordered batches, got {pairs}: joined, they "
                "would have samples twice."
            )
        method = self.objective.build()
        normalizer = method.normalizer
        if self.selection.correction == "weights" and not method.remembers:
            raise ValueError(
                f'Selection.correction must not be "weights" for {self.objective.method}: it keeps no normalizers that '
                "are corrected, so its weights stay what a batch shows. Leave it out, or take another method."
            )
        if isinstance(normalizer, Rolling) and normalizer.prototypes < batch:
            raise ValueError(
                f"Rolling.prototypes must be at least batch_size ({batch}) for prototypes that roll, got "
                f"{normalizer.prototypes}."
            )
        self._check_views()

    def _check_views(self) -> None:
        """Settings of the one kind of model mean nothing to the other."""
        if self.model.view_tower is not None:
            for field, view in (("crop", "view_crop"), ("flip", "view_flip")):
                value, default = getattr(self.data, field), getattr(Data(), field)
                if value != default:
                    raise ValueError(f"Data.{field} must be left out for two views, got {value!r}; use {view}.")
        changed = [name for name, value in vars(self.views).items() if value != getattr(Views(), name)]
        if changed and self.model.view_tower is None and self.model.pretrained is None:
            raise ValueError(
                f"Views.{changed[0]} and the other settings of views belong to a model with a view_tower; set it too."
            )

    @classmethod
    def of(cls, **settings: Any) -> RunConfig:
        """The config that these command line flags would give, without their dashes.

        >>> config = RunConfig.of(method="sogclr", settings={"gamma": 0.3}, batch_size=256, lr=5e-4)
        >>> config.training.batch_size, config.optimizer.lr
        (256, 0.0005)
        """
        return from_dict(cls, cls.grouped(settings))

    @classmethod
    def grouped(cls, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Flat settings in their groups, as YAML files have them."""
        default = cls()
        groups = [(field.name, getattr(default, field.name)) for field in dataclasses.fields(cls)]
        home = {field.name: name for name, group in groups for field in dataclasses.fields(group)}
        values: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if name not in home:
                of_a_method = any(name in settings_of(method) for method in METHODS.values())
                guess = f"; write settings={{{name!r}: ...}}." if of_a_method else nearest(name, home)
                raise ValueError(f"A run has no setting {name!r}{guess} They are {listed(home)}.")
            values.setdefault(home[name], {})[name] = value
        return values


AXES = ("method", "pairwise", "normalizer", "temperature_rule")
# Fields that say one thing in several units.
RIVALS = (
    ("epochs", "samples"),
    ("warmup_steps", "warmup_epochs", "warmup_share"),
    ("cooldown_steps", "cooldown_epochs"),
    ("recovery_epochs", "recovery_steps"),
    ("evaluate_every", "evaluations"),
)


def layered(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` wins."""
    return merged(giving_way(base, over), over)


def giving_way(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` without what ``over`` displaces.  A method's settings are its own: naming another method, or another
    choice on an axis, leaves them behind; and so does a length its rival in another unit."""
    left = {group: dict(fields) if isinstance(fields, Mapping) else fields for group, fields in base.items()}
    for group, fields in left.items():
        above = over.get(group)
        if not isinstance(fields, dict) or not isinstance(above, Mapping):
            continue
        before = {"method": ObjectiveConfig().method, **fields}
        if group == "objective" and any(above[axis] != before.get(axis) for axis in AXES if axis in above):
            fields.pop("settings", None)
        for names in RIVALS:
            if any(above.get(name) is not None for name in names):
                for name in names:
                    fields.pop(name, None)
    return left
