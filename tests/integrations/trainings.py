"""Trainings that are cut off: by SIGKILL, in a process of their own, or by an exception."""

import multiprocessing
import os
import signal

import torch


class CutOff(Exception):
    """What a training meets where it is to stop."""


def die_at(step, kill):
    """To be called before every step; in step ``step`` (from 0) it ends the training."""
    count = 0

    def before_step(*_):
        nonlocal count
        count += 1
        if count == step + 1:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise CutOff

    return before_step


def kill_training(train, *args):
    """Run ``train(*args)``, which kills itself, in a process of its own."""
    process = multiprocessing.get_context("forkserver").Process(target=_with_one_thread, args=(train, *args))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def _with_one_thread(train, *args):
    torch.set_num_threads(1)
    train(*args)


def differences(first, second, place="state"):
    """The places in which two nested states differ, to the bit."""
    if isinstance(first, torch.Tensor):
        same = first.shape == second.shape and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
        return [] if same else [place]
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{place}: {sorted(map(str, first.keys() ^ second.keys()))}"]
        return [line for key in first for line in differences(first[key], second[key], f"{place}.{key}")]
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return [f"{place}: lengths"]
        return [
            line
            for k, pair in enumerate(zip(first, second, strict=True))
            for line in differences(*pair, f"{place}.{k}")
        ]
    return [] if first == second else [place]
