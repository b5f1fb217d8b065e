"""One command, run: what it logs on the terminal, how a signal ends it, how a user's mistake is answered."""

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

from fullbatch.config.messages import MessageFormatter, message, reason_of, without_password
from fullbatch.training.interruption import Interrupted


def own_process() -> None:
    """Of a process that is the command's: no password stays in ``sys.argv``, which others write down, such as Weights &
    Biases; and a warning is one line without the line of code, on the terminal and in the run's log."""
    sys.argv[1:] = map(without_password, sys.argv[1:])
    logger = logging.getLogger("fullbatch")
    warnings.showwarning = lambda message, *place, **more: logger.warning("%s", message)


def run_command(name: str, module: str, arguments: Sequence[str]) -> int:
    """The exit status of the function ``name`` of ``fullbatch.cli.MODULE``."""
    terminal = Terminal(logging.WARNING)
    terminal.setFormatter(MessageFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[terminal])
    try:
        with _ended_by_sigterm():
            command: Callable[[list[str]], int] = getattr(importlib.import_module(f"fullbatch.cli.{module}"), name)
            return command(list(arguments))
    except KeyboardInterrupt as stopped:
        by = ", by SIGTERM" if isinstance(stopped, _Terminated) else ""
        going_on = f" What was saved before is kept: go on with `fullbatch {name} --resume FOLDER`, if it had begun."
        kept = going_on if name in ("train", "finetune", "compare", "search") else ""
        kept = " What is in the index is kept: the same command goes on." if name == "find" else kept
        print(f"fullbatch: stopped at once{by}.{kept}", file=sys.stderr)
        return 128 + (signal.SIGTERM if by else signal.SIGINT)
    except Interrupted as stopped:
        print(f"fullbatch: {message(stopped)}", file=sys.stderr)
        return stopped.exit_code
    except BrokenPipeError:  # `fullbatch recipes NAME | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        answer = _answer(error, name)
        if answer is None or os.environ.get("FULLBATCH_TRACEBACK"):
            raise
        print(f"fullbatch: {message(answer)}", file=sys.stderr)
        return 1


class Terminal(logging.Handler):
    """Writes to stderr as it is at that moment: a progress bar replaces it, to stay below what is written."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)  # as other handlers: a line that cannot be written ends no command


class _Terminated(KeyboardInterrupt):
    """SIGTERM, where no run is under way that could save first."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C: with a message, and after tidying up."""
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


def _answer(error: Exception, command: str) -> str | None:
    """What to tell the user; None: it is no mistake of theirs."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        first = str(error).split(".")[0]
        return f"{first}. The same gradient in less memory: --micro-batch (a divisor of a rank's share of the batch)."
    if not isinstance(error, ValueError | OSError):
        return None
    from fullbatch.cli.flags import naming_flags

    return naming_flags(reason_of(error), command)
