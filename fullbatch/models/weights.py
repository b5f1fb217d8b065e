"""State dicts, read from a file whatever wraps them, and loaded only where every key and shape fits.  Some have to come
from a model hub; where they cannot, one sentence says so."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def fetched(what: str, advice: str) -> Iterator[None]:
    """Whatever a hub client raises becomes one ValueError: what was wanted, why not, what to do."""
    try:
        yield
    except Exception as error:  # hub clients raise errors of many families
        stop = "" if advice.endswith("?") else "."
        raise ValueError(f"{what} could not be loaded ({first_line(error)}); {advice}{stop}") from None


def first_line(error: BaseException, limit: int = 160) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[0].split(". ")[0].strip().rstrip(".:;")
    return line if len(line) <= limit else line[: limit - 3] + "..."


PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.", "backbone.")  # of DistributedDataParallel, torch.compile and TwoTowers


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors file or a torch checkpoint; no code in the file is run."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return unwrapped(load_file(path), path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file ({first_line(error)}).") from None
    if path.suffix not in PICKLED:
        raise ValueError(f"{path} must end in .safetensors or one of {', '.join(PICKLED)} to be read as weights.")
    try:
        return unwrapped(torch.load(path, map_location="cpu", weights_only=True), path)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = first_line(error)
        raise ValueError(
            f"{path} cannot be read as a checkpoint of tensors ({reason}); save a plain state dict, or safetensors."
        ) from None


def unwrapped(saved: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside ``{"state_dict": ...}`` or ``{"model": ...}``, without prefixes that all keys share."""
    for key in _WRAPPERS:
        if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
            saved = saved[key]
    if not isinstance(saved, Mapping) or not all(isinstance(value, Tensor) for value in saved.values()) or not saved:
        raise ValueError(f"{path} holds no state dict: expected names and tensors, plain or under 'state_dict'.")
    state = dict(saved)
    while prefix := next((p for p in _PREFIXES if all(key.startswith(p) for key in state)), None):
        state = {key[len(prefix) :]: value for key, value in state.items()}
    return state


def load_weights(module: nn.Module, state: Mapping[str, Tensor], source: str, model: str) -> None:
    """Load all or nothing: one error names the first misfits and counts them."""
    own = module.state_dict()
    misfits = [f"{key} is missing" for key in own if key not in state]
    misfits += [f"{key} is unknown" for key in state if key not in own]
    misfits += [
        f"{key} is {tuple(state[key].shape)} instead of {tuple(value.shape)}"
        for key, value in own.items()
        if key in state and state[key].shape != value.shape
    ]
    if misfits:
        first = ", ".join(misfits[:3]) + (", ..." if len(misfits) > 3 else "")
        raise ValueError(
            f"{source} does not fit the model {model!r} in {len(misfits)} of its weights ({first}); "
            "name the model that it was trained with."
        )
    module.load_state_dict(state)
