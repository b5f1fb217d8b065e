"""The processes that plan: started in time, and ended with the run."""

import os
import signal

import numpy as np
import pytest

from fullbatch.selection.planning import Planners, meeting_equals
from tests.waiting import wait_for


@pytest.mark.slow
def test_planners_are_all_started_before_there_is_a_plan_to_make():
    planners = Planners(3)
    planners.start_processes()
    try:
        assert planners._pool is not None and len(planners._pool._processes) == 3
    finally:
        planners.close()


def test_closing_waits_until_the_planners_have_ended():
    """Else a run in a child process, as those of a comparison are, can hang at its exit: Python closes the planners'
    queue there, and what tells them to end is never sent."""
    planners = Planners(1)
    planners.start_processes()
    pool = planners._pool
    assert pool is not None
    (process,) = pool._processes.values()
    assert pool.submit(int).result() == 0
    planners.close()
    assert process.exitcode == 0


def test_a_planner_that_died_is_a_sentence():
    planners = Planners(1)
    planners.start_processes()
    pool = planners._pool
    assert pool is not None and pool.submit(int).result() == 0
    (process,) = pool._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    wait_for(lambda: pool._broken)  # the pool finds out a moment later
    with pytest.raises(OSError, match="A process that plans batches died"):
        planners.start([None])
    planners.close()


def test_how_many_meet_an_equal():
    texts = np.array([[3, 5, 3, 7], [1, 2, 3, 4], [6, 6, 6, 2], [0, 0, 9, 9]])
    assert meeting_equals(texts) == 2 + 0 + 3 + 2
