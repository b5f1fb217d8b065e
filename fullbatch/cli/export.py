"""``fullbatch export``: a trained model for other programs, with a card that says what it is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from fullbatch.loading import Opened
    from fullbatch.report.model_card import Origin


@dataclass(frozen=True)
class _Export:
    """Write a trained model for other programs."""

    run: tyro.conf.Positional[Path]  # a run folder, one of its checkpoints, or what was exported
    output: tyro.conf.Positional[Path]  # the file or folder to write
    # open_clip: FILE.pt or a folder; huggingface, onnx: a folder; safetensors: either
    format: Literal["open_clip", "huggingface", "safetensors", "onnx"] = "open_clip"
    average: bool = True  # the averaged weights, where the run kept an average
    overwrite: bool = False  # replace a file, or an earlier export in the folder
    quantize: bool = False  # onnx: also a text tower in int8, and how near it is to the float one
    license: str | None = None  # for the model card, as hubs write it: mit, apache-2.0, cc-by-4.0, other
    push: str | None = None  # OWNER/NAME: push the folder to the Hugging Face Hub; a new repository is private


def export(arguments: list[str]) -> int:
    options = tyro.cli(_Export, args=arguments, prog="fullbatch export")
    from fullbatch.models.hub import push_folder
    from fullbatch.models.onnx_towers import check_quantizable, quantize_text
    from fullbatch.report.model_card import check_license, model_card, write_card

    check_license(options.license)
    _check(options)
    opened, origin = _open(options)
    if options.quantize:
        check_quantizable(opened.model)
    output = opened.export(options.output, options.format, options.overwrite)
    if options.quantize:
        small = quantize_text(opened.model, output)
        print(
            f"{small.file}: {small.bytes / 1e6:,.1f} MB instead of {small.float_bytes / 1e6:,.1f}; cosine to the float "
            f"tower {small.mean_cosine:.4f}, the lowest of {small.captions} captions {small.lowest_cosine:.4f}"
        )
    if output.is_dir():
        card = model_card(opened, options.format, origin, options.license, options.push, output)
        if not write_card(output, card):
            print(f"note: {output / 'README.md'} is not of fullbatch and stays as it is", file=sys.stderr)
    print(output)
    if options.push is not None:
        print(push_folder(output, options.push))
    return 0


def _check(options: _Export) -> None:
    from fullbatch.models.hub import check_repository
    from fullbatch.models.weights import PICKLED

    if options.quantize and options.format != "onnx":
        raise ValueError(f"--quantize belongs to --format onnx, and the format is {options.format}.")
    if options.push is None:
        return
    check_repository(options.push)
    if options.output.suffix in (*PICKLED, ".safetensors"):
        raise ValueError(f"--push takes a folder with its model card, and {options.output} is a file; name a folder.")
    if options.output.is_dir() and any(options.output.iterdir()):
        raise ValueError(f"--push publishes all that a folder holds, and {options.output} is not empty; name another.")


def _open(options: _Export) -> tuple[Opened, Origin | None]:
    """The model, and what is known of the run that made it."""
    from fullbatch.config.model import Model
    from fullbatch.finetuning.record import FILE, result_of
    from fullbatch.loading import Loaded, open_model
    from fullbatch.report.model_card import origin_of, origin_of_tuned

    run = options.run
    opened = open_model(Model(str(run)), average=options.average)
    if not isinstance(opened, Loaded):
        return opened, origin_of_tuned(run)
    if (run / FILE).is_file() and (result := result_of(run)) is not None:
        print(f"note: this is the last checkpoint of a fine-tuning; what came of it is {result}", file=sys.stderr)
    return opened, origin_of(run, opened.step, options.average)
