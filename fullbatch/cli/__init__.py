"""The command line: parse, then call one function.  What answers `fullbatch --help` imports next to nothing: it answers
as soon as Python has started."""

import sys

import fullbatch

TYPE_CHECKING = False  # typing's own, without importing it
if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: fullbatch COMMAND [OPTIONS]

  train        train a CLIP-style model; with no options: NeuCLIP on the built-in emoji, in minutes on a CPU
  finetune     fine-tune a pretrained model without losing what it knows: TuneCLIP, measured before and after
  interpolate  what the weights between a base and a tuned model are worth, and the best of them
  evaluate     zero-shot, retrieval and DataComp numbers of a run, a checkpoint or an open_clip model
  audit        how wrong the normalizers of a run were, checkpoint by checkpoint
  compare      race methods x batch sizes x seeds on the same data, model and budget
  search       find the method, the optimizer and the settings for your data, on one machine or many
  report       one self-contained page about a run, or comparing several
  theory       watch which batches lead free embeddings to the full batch's optimum: numbers and a page of figures
  export       write a trained model for open_clip, Hugging Face transformers, ONNX, or as safetensors
  find         search a folder of pictures by words or by a picture, on the terminal or a local page
  recipes      list the recipes, or show one: fullbatch recipes NAME

`fullbatch COMMAND --help` shows a command's options, `fullbatch train --help-all` every setting of a run.
"""
COMMANDS = tuple(line.split()[0] for line in USAGE.splitlines() if line.startswith("  "))
# A command is the function of its name in the file of its name, but for these.
FILES = {"interpolate": "finetune", "recipes": "help"}


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run a command and return the exit status; a user's mistake is one message, not a traceback."""
    match list(sys.argv[1:] if arguments is None else arguments):
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
            return 0
        case ["-V" | "--version", *_]:
            print(f"fullbatch {fullbatch.__version__}")
            return 0
        case [name, *rest] if name in COMMANDS:
            from fullbatch.cli.command import own_process, run_command

            if arguments is None:
                own_process()
            return run_command(name, FILES.get(name, name), rest)
        case [name, *_]:
            from difflib import get_close_matches

            close = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
            guess = f"; did you mean {close[0]!r}?" if close else "."
            print(f"fullbatch: There is no command {name!r}{guess} They are {', '.join(COMMANDS)}.", file=sys.stderr)
            return 1
    raise AssertionError("every list of arguments has its case")


def run() -> None:
    """The console script."""
    sys.exit(main())
