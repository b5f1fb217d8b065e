"""``fullbatch export``: a trained model for other programs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class _Export:
    """Write a trained model for other programs."""

    run: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(help="a run folder, one of its checkpoints, or what was exported as safetensors"),
    ]
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="the file or folder to write")]
    format: Annotated[
        Literal["open_clip", "huggingface", "safetensors"],
        tyro.conf.arg(help="open_clip: FILE.pt or a folder; huggingface: a folder; safetensors: either"),
    ] = "open_clip"
    average: Annotated[bool, tyro.conf.arg(help="the averaged weights, where the run kept an average")] = True
    overwrite: Annotated[bool, tyro.conf.arg(help="replace a file, or an earlier export in the folder")] = False


def export(arguments: list[str]) -> int:
    options = tyro.cli(_Export, args=arguments, prog="fullbatch export")
    from fullbatch.config.model import Model
    from fullbatch.finetuning.base import open_model
    from fullbatch.finetuning.record import FILE, result_of
    from fullbatch.loading import export_run
    from fullbatch.models.export import export as write
    from fullbatch.models.load import EXPORTED

    if options.run.is_file() or (options.run / EXPORTED).is_file():
        opened = open_model(Model(str(options.run)))
        start = opened.temperature, opened.bias
        print(write(opened.model, options.output, options.format, *start, options.overwrite))
    else:
        if (options.run / FILE).is_file() and (result := result_of(options.run)) is not None:
            print(
                f"note: this is the last checkpoint of a fine-tuning; what came of it is {result}",
                file=sys.stderr,
            )
        print(export_run(options.run, options.output, options.format, options.average, options.overwrite))
    return 0
