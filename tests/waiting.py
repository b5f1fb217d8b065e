"""Waiting for what threads and other processes do."""

import time

HANG = 300.0  # seconds that only a hang takes, on any machine


def wait_for(what, *processes):
    """The first answer of ``what`` that counts; the processes that it waits for must live on."""
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        if found := what():
            return found
        for process in processes:
            assert process.poll() is None, f"ended with {process.returncode}"
        time.sleep(0.02)
    raise AssertionError("it never came")
