"""The objective in open_clip's own training script (``open_clip_train`` 3.x).

    python -m fullbatch.integrations.open_clip --objective neuclip --train-data 'shards/{00000..00331}.tar' ...

Everything after our flags is open_clip's.  ``open_clip_train.main`` runs as it is; only what it calls by name is
replaced while it runs: the loss, the optimizer (which then carries the objective), the data (whose batches then bring
ids) and the epoch (which then begins with its own seed, so that a resumed run sees what the undisturbed one saw).
"""

# B: pairs in a batch   D: width

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fullbatch import distributed
from fullbatch.config.extras import require_extra
from fullbatch.config.messages import listed, message, nearest
from fullbatch.config.methods import METHODS
from fullbatch.data.order import key_of
from fullbatch.integrations.open_clip_data import (
    PairsOf,
    number_pipeline,
    number_table,
    seed_everything,
    shard_sizes,
    without_end_marks,
)
from fullbatch.integrations.state import carry_state, check_carried, freeze_temperature, write_temperature
from fullbatch.objective.objective import Objective, make_objective
from fullbatch.training.optimizer import TEMPERATURE_SHARE

_ADVICE = "call carry_state(optimizer, objective) after making the optimizer."


class OpenClipLoss(nn.Module):
    """Called as open_clip's own losses are.  ``expect_ids`` is told the ids of the batches of the next step, one call a
    batch; with ``accum_freq`` batches a step, open_clip calls the loss once for each."""

    def __init__(self, objective: Objective, model: nn.Module | None = None, accum_freq: int = 1) -> None:
        super().__init__()
        self.objective, self.accum_freq = objective, accum_freq
        self._model = [model]  # not a submodule: its weights are not the loss's
        self._ids: list[Tensor] = []
        self._cached: list[Tensor] = []  # gradients of the step's embeddings
        self._value = torch.zeros(())  # and the objective's value there
        self._calls = 0

    def expect_ids(self, ids_B: Tensor) -> None:
        self._ids.append(ids_B)

    def begin_epoch(self, epoch: int) -> None:
        """What an epoch could not bring to a whole step is left behind."""
        self._ids, self._cached, self._calls = [], [], 0
        self.objective.set_epoch(epoch)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | None = None,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Any:
        check_carried(self.objective, _ADVICE)
        if self.accum_freq == 1:
            loss = self._judge(image_features, text_features)
        else:
            loss = self._judge_once_a_step(image_features, text_features)
        if self._model[0] is not None:
            write_temperature(self._model[0], self.objective)
        return {"contrastive_loss": loss} if output_dict else loss

    def _judge(self, image_BD: Tensor, text_BD: Tensor) -> Tensor:
        ids_B = torch.cat(self._ids) if self._ids else None
        self._ids = []
        loss: Tensor = self.objective.train()(image_BD, text_BD, ids_B).loss
        return loss

    def _judge_once_a_step(self, image_BD: Tensor, text_BD: Tensor) -> Tensor:
        """Each call brings the whole step's embeddings, one batch of them with gradient.  The objective sees them in
        the first call only, or it would learn ``accum_freq`` times from one step; its gradient serves all calls."""
        learned = [parameter for parameter in self.objective.parameters() if parameter.requires_grad]
        loss = image_BD.new_zeros((), dtype=torch.float32)
        if self._calls == 0:
            rows = [_in_32_bits(rows_BD.detach()).requires_grad_() for rows_BD in (image_BD, text_BD)]
            value = self._judge(*rows)
            gradients = torch.autograd.grad(value, [*rows, *learned], allow_unused=True)
            self._cached = [_or_zeros(gradient, row) for gradient, row in zip(gradients[:2], rows, strict=True)]
            self._value = value.detach()
            for parameter, gradient in zip(learned, gradients[2:], strict=True):
                loss = loss + _with_gradient(parameter, _or_zeros(gradient, parameter))
        for rows_BD, gradient_BD in zip((image_BD, text_BD), self._cached, strict=True):
            loss = loss + _with_gradient(rows_BD, gradient_BD)
        self._calls = (self._calls + 1) % self.accum_freq
        return loss + self._value


def _in_32_bits(rows_BD: Tensor) -> Tensor:
    """A gradient that no scaler has seen yet would vanish in 16 bits, and rows rounded to 16 are no unit rows in 32."""
    return normalize(rows_BD.float(), dim=-1) if rows_BD.dtype.itemsize < 4 else rows_BD


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _with_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """0, whose gradient with respect to ``value`` is the one given."""
    product = (value.float() * gradient.float()).sum()
    return product - product.detach()


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class ObjectiveRun:
    """What replaces the names that ``open_clip_train.main`` calls."""

    args: argparse.Namespace  # open_clip's
    name: str
    settings: dict[str, Any]
    temperature_lr: float | None

    def __post_init__(self) -> None:
        self.objective: Objective | None = None
        self.model: nn.Module | None = None
        self.needs_ids = METHODS[self.name].needs_ids
        self.sizes: dict[str, int] | None = None
        self.loss: OpenClipLoss | None = None

    def make_model(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            self.model = made[0]
            freeze_temperature(self.model)
            self.objective = self._make_objective(self.model, torch.device(kwargs["device"]))
            self.loss = OpenClipLoss(self.objective, self.model, self.args.accum_freq)
            return made

        return wrapper

    def _make_objective(self, model: nn.Module, device: torch.device) -> Objective:
        surroundings = {"width": embedding_width(model), "seed": self.args.seed, "num_samples": self._count()}
        return make_objective(self.name, **{**surroundings, **self.settings}).to(device)

    def _count(self) -> int | None:
        """How many samples the training data has; shards are counted only where it matters."""
        from open_clip_train.data import expand_urls, get_dataset_size

        match self._kind():
            case "webdataset" if METHODS[self.name].needs_ids:
                self.sizes = shard_sizes(expand_urls(self.args.train_data)[0])
                return sum(self.sizes.values())
            case "webdataset":
                size: int | None = self.args.train_num_samples or get_dataset_size(self.args.train_data)[0]
                return size
            case "csv":
                import pandas

                return len(pandas.read_csv(self.args.train_data, sep=self.args.csv_separator))
            case _:
                return self.args.train_num_samples or None

    def _kind(self) -> str:
        kind: str = self.args.dataset_type
        if kind != "auto":
            return kind
        return "webdataset" if str(self.args.train_data).split(".")[-1] == "tar" else "csv"

    def make_optimizer(self, make: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            assert self.objective is not None
            optimizer = make(*args, **kwargs)
            own = len(optimizer.param_groups)
            carry_state(optimizer, self.objective, temperature_lr=self.temperature_lr)
            shares = [group["lr"] / optimizer.param_groups[0]["lr"] for group in optimizer.param_groups[own:]]

            def follow(*_: Any) -> None:
                """open_clip's schedule gives all groups one rate; loading a checkpoint makes new groups."""
                for group, share in zip(optimizer.param_groups[own:], shares, strict=True):
                    group["lr"] = share * optimizer.param_groups[0]["lr"]

            optimizer.register_step_pre_hook(follow)
            return optimizer

        return wrapper

    def get_data(self, get: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def wrapper(*args: Any, **kwargs: Any) -> dict[str, Any]:
            assert self.loss is not None
            data = get(*args, **kwargs)
            info = data.get("train")
            if info is None:
                return data
            if self._kind() == "webdataset":
                number_pipeline(info, self.sizes if self.needs_ids else None, self.args.seed, distributed.world().rank)
                loader = info.dataloader
            else:
                loader = number_table(info) if self.needs_ids else info.dataloader
            info.dataloader = PairsOf(loader, self.loss.expect_ids) if self.needs_ids else loader
            return data

        return wrapper

    def create_loss(self, _: Any) -> OpenClipLoss:
        assert self.loss is not None
        return self.loss

    def train_one_epoch(self, train: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(model: Any, data: Any, loss: Any, epoch: int, *args: Any, **kwargs: Any) -> Any:
            loss.begin_epoch(epoch)
            seed_everything(key_of(self.args.seed, epoch, distributed.world().rank, 0))
            return train(model, data, loss, epoch, *args, **kwargs)

        return wrapper

    @contextlib.contextmanager
    def in_place(self) -> Iterator[Any]:
        """open_clip's main, with our parts while the context lasts."""
        import timm.optim
        from open_clip_train import data, main

        with contextlib.ExitStack() as stack:
            adamw = SimpleNamespace(AdamW=self.make_optimizer(main.optim.AdamW))
            for module, name, ours in (
                (main, "create_model_and_transforms", self.make_model(main.create_model_and_transforms)),
                (main, "optim", adamw),
                (timm.optim, "create_optimizer_v2", self.make_optimizer(timm.optim.create_optimizer_v2)),
                (main, "get_data", self.get_data(main.get_data)),
                (data, "tar_file_expander", without_end_marks(data.tar_file_expander)),
                (main, "create_loss", self.create_loss),
                (main, "train_one_epoch", self.train_one_epoch(main.train_one_epoch)),
            ):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, ours)
            yield main


def embedding_width(model: nn.Module) -> int:
    towers: Any = model
    projection = getattr(model, "text_projection", None)
    return int(projection.shape[1] if isinstance(projection, Tensor) else towers.text.output_dim)


def check_flags(args: argparse.Namespace) -> None:
    """What open_clip offers beside the loss that our objective replaces."""
    refused = {
        "--siglip": (args.siglip, "give --objective siglip instead"),
        "--distill-model": (args.distill_model, "a teacher has no part in this loss"),
        "--horovod": (args.horovod, "start the ranks with torchrun"),
        "a CoCa model": ("coca" in args.model.lower(), "it needs its captioning loss"),
        "--torchscript": (args.torchscript, "leave it out"),
    }
    for flag, (given, advice) in refused.items():
        if given:
            raise ValueError(f"{flag} does not go with --objective; {advice}.")


def setting(text: str) -> tuple[str, Any]:
    """
    >>> setting("rho=6.5"), setting("rule=adam")
    (('rho', 6.5), ('rule', 'adam'))
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--objective-settings takes NAME=VALUE, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def train(arguments: Sequence[str]) -> int:
    require_extra("open_clip_train", "open_clip", "Training with open_clip")
    require_extra("webdataset", "open_clip", "open_clip's training script")
    from open_clip_train.params import parse_args

    parser = argparse.ArgumentParser(
        "python -m fullbatch.integrations.open_clip",
        description="open_clip's training script with one of our objectives; all other flags are open_clip's.",
        epilog=f"Objectives: {listed(METHODS)}.  open_clip's own flags: python -m open_clip_train.main --help",
        allow_abbrev=False,
    )
    parser.add_argument("--objective", required=True, metavar="NAME")
    parser.add_argument(
        "--objective-settings", nargs="*", default=[], metavar="NAME=VALUE", help="rho=6.5 prototypes=4096"
    )
    parser.add_argument(
        "--temperature-lr", type=float, metavar="RATE", help=f"its peak; --lr times {TEMPERATURE_SHARE} by default"
    )
    own, theirs = parser.parse_known_args(arguments)
    if own.objective not in METHODS:
        raise ValueError(
            f"--objective must be one of {listed(METHODS)}, got {own.objective!r}{nearest(own.objective, METHODS)}"
        )
    args = parse_args(theirs)
    check_flags(args)
    if not args.train_data and args.dataset_type != "synthetic":
        raise ValueError("--train-data is missing: without it open_clip only evaluates, and no objective is needed.")
    run = ObjectiveRun(args, own.objective, dict(map(setting, own.objective_settings)), own.temperature_lr)
    with run.in_place() as main:
        return 1 if main.main(theirs) else 0


def run(arguments: Sequence[str] | None = None) -> int:
    """The command: a user's mistake is one line."""
    try:
        return train(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        if os.environ.get("FULLBATCH_TRACEBACK"):
            raise
        reason = str(error).strip().splitlines()[-1].removeprefix("ValueError: ")  # from a worker it has a traceback
        print(f"fullbatch: {message(reason)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run())
