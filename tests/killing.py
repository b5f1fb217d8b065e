"""Processes that kill themselves at a chosen moment."""

import multiprocessing
import os
import signal

import torch

from tests.waiting import HANG

TAKE_LONG_TO_IMPORT = ["fullbatch.training_run", "fullbatch.finetuning.finetune", "fullbatch.trials.trial", "open_clip"]


class Fatal:
    """Of all calls of the functions that it wraps, the one of this number kills the process; 0: none does."""

    def __init__(self, number):
        self.left = number

    def __call__(self, function):
        def counted(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    def among(self, module, *names):
        for name in names:
            setattr(module, name, self(getattr(module, name)))


def started(function, *args):
    """A process that calls this, forked from one that has imported the rest, with the environment of this moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(TAKE_LONG_TO_IMPORT)
    process = context.Process(target=_alone, args=(dict(os.environ), function, *args))
    process.start()
    return process


def _alone(environment, function, *args):
    os.environ.clear()  # it is that of the moment in which the first test needed such a process
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*args)


def exit_code(process):
    process.join(HANG)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode
