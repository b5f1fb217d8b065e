"""A signal stops what it meets, and is not lost where that has just ended by itself."""

import os
import signal

import pytest

from fullbatch.training.interruption import Interrupted, Interruption


def tell(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_what_has_ended_by_itself_passes_the_signal_on():
    with Interruption() as outer:
        with Interruption() as inner:
            tell()
        assert inner.signal == outer.signal == signal.SIGTERM


def test_so_does_what_has_failed():
    def fail():
        with Interruption():
            tell(signal.SIGINT)
            raise ValueError("diverged")

    with Interruption() as outer, pytest.raises(ValueError, match="diverged"):
        fail()
    assert outer.signal == signal.SIGINT


def test_who_stops_for_it_keeps_it():
    def stop():
        with Interruption() as inner:
            tell()
            raise Interrupted(inner.signal, "")

    with Interruption() as outer, pytest.raises(Interrupted):
        stop()
    assert outer.signal is None


def test_without_one_around_it_nothing_more_happens():
    """A run that had just ended when the signal came has ended."""
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as alone:
        tell()
    assert alone.signal == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_is_for_who_was_there_before():
    with Interruption() as outer:
        with Interruption() as inner:
            tell()
            tell()
        assert inner.signal == outer.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) != outer._receive
