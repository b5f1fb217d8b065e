"""The processes that plan: started in time, and ended with the run."""

from fullbatch.selection.planning import Planners


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
