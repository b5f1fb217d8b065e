"""What a source holds, not only what its samples are called: for whatever is kept in the cache folder."""

from __future__ import annotations

import os

from fullbatch.config.data import Source
from fullbatch.data.builtin import BUILTIN
from fullbatch.data.sample import BadSample, Samples, fingerprint_of
from fullbatch.data.sources import expand_pattern

_PROBED = 64


def fingerprint_of_samples(samples: Samples, source: Source | None) -> str:
    """The samples' own fingerprint says what they are called; this also looks at sizes, times and some of the bytes.

    A data set whose pictures were replaced under their old names gives another one.
    """
    parts: list[object] = [samples.fingerprint, len(samples)]
    if source is not None and source.kind != "builtin" and source.path not in BUILTIN:
        parts += [part for path in expand_pattern(source.path) for part in _sizes_and_times(path)]
    for index in range(0, len(samples), max(1, len(samples) // _PROBED)):
        try:
            sample = samples.read(index)
            parts += [sample.image, *sample.captions]
        except BadSample as error:
            parts.append(error.reason)
    return fingerprint_of(*parts)


def _sizes_and_times(path: str) -> list[object]:
    if not os.path.isdir(path):
        status = os.stat(path)
        return [os.path.basename(path), status.st_size, status.st_mtime_ns]
    found: list[object] = []
    for folder, subfolders, files in os.walk(path, followlinks=True):
        subfolders.sort()
        for name in sorted(files):
            status = os.stat(os.path.join(folder, name))
            found += [os.path.relpath(folder, path), name, status.st_size, status.st_mtime_ns]
    return found
