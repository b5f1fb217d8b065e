"""Data sets inside the package, so that a first run needs no download."""

from __future__ import annotations

from importlib import resources

from fullbatch.config.messages import listed, nearest

BUILTIN: dict[str, tuple[str, ...]] = {"emoji": ("train", "new_style", "new_concept")}


def builtin_path(name: str, split: str = "train") -> str:
    """The packed tar file of a split."""
    if name not in BUILTIN:
        raise ValueError(f"There is no built-in set {name!r}{nearest(name, BUILTIN)} There are {listed(BUILTIN)}.")
    if split not in BUILTIN[name]:
        guess = nearest(split, BUILTIN[name])
        raise ValueError(f"The built-in set {name!r} has no split {split!r}{guess} It has {listed(BUILTIN[name])}.")
    path = resources.files("fullbatch.data") / name / f"{split}.tar.xz"
    if not path.is_file():
        raise ValueError(
            f"The built-in set {name!r} is missing from this installation ({path}); install fullbatch again."
        )
    return str(path)
