"""The command line: parse, then call one function.  Flags, help and defaults all come from the config tree."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

import torch

import fullbatch
from fullbatch.config.messages import MessageFormatter, listed, message, nearest, without_password

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
  export       write a trained model for open_clip, Hugging Face transformers, or as safetensors
  recipes      list the recipes, or show one: fullbatch recipes NAME

`fullbatch COMMAND --help` shows a command's options; `fullbatch train --method sogclr --help` a method's settings.
"""

# Each is the function of its name in the file of its name in fullbatch/commands.
COMMANDS = (
    "train", "finetune", "interpolate", "evaluate", "audit", "compare", "search", "report", "theory", "export",
    "recipes",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; a user's mistake is one message, not a traceback."""
    from fullbatch.training.interruption import Interrupted

    if arguments is None:
        arguments = sys.argv[1:]
        sys.argv[1:] = map(without_password, arguments)  # others write it down, such as Weights & Biases
    arguments = list(arguments)
    terminal = Terminal(logging.WARNING)
    terminal.setFormatter(MessageFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[terminal])
    try:
        with _ended_by_sigterm():
            return _dispatch(arguments)
    except KeyboardInterrupt as stopped:
        by = ", by SIGTERM" if isinstance(stopped, _Terminated) else ""
        print(f"fullbatch: stopped at once{by}.{_kept(arguments)}", file=sys.stderr)
        return 128 + (signal.SIGTERM if by else signal.SIGINT)
    except Interrupted as stopped:
        print(f"fullbatch: {message(stopped)}", file=sys.stderr)
        return stopped.exit_code
    except BrokenPipeError:  # `fullbatch recipes NAME | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        if os.environ.get("FULLBATCH_TRACEBACK"):
            raise
        print(f"fullbatch: {message(_advice(error, arguments))}", file=sys.stderr)
        return 1


class Terminal(logging.Handler):
    """On stderr as it is when something is said: a progress bar puts itself in front of it, to stay below."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)  # as other handlers: what cannot be said ends no command


class _Terminated(KeyboardInterrupt):
    """SIGTERM, where no run is under way that could save first."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C: with a word, and with what has to be tidied up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def receive(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise _Terminated
        signal.signal(number, signal.SIG_DFL)  # a forked process, which has nothing to tidy up
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _advice(error: Exception, arguments: Sequence[str]) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        first = str(error).split(".")[0]
        return f"{first}. The same gradient in less memory: --micro-batch (a divisor of a rank's share of the batch)."
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}."
    from fullbatch.flags import naming_flags

    return naming_flags(str(error), *arguments[:1])


def _kept(arguments: Sequence[str]) -> str:
    """Ctrl-C before a run can save, or the second one."""
    if not arguments or arguments[0] not in ("train", "finetune", "compare", "search"):
        return ""
    return f" What was saved before is kept: go on with `fullbatch {arguments[0]} --resume FOLDER`, if it had begun."


def run() -> None:
    """The console script."""
    warnings.showwarning = _log_warning
    sys.exit(main())


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line without the line of code, on the terminal and in the run's log."""
    logging.getLogger("fullbatch").warning("%s", message)


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
            return 0
        case ["-V" | "--version", *_]:
            print(f"fullbatch {fullbatch.__version__}")
            return 0
        case [name, *rest] if name in COMMANDS:
            command: Callable[[list[str]], int] = getattr(importlib.import_module(f"fullbatch.commands.{name}"), name)
            return command(rest)
        case [name, *_]:
            raise ValueError(f"There is no command {name!r}{nearest(name, COMMANDS)} They are {listed(COMMANDS)}.")
    raise AssertionError("every list of arguments has its case")
