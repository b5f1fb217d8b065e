"""The queue when workers are killed or fall asleep between any two calls to the storage, in any order of calls."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from fullbatch.trials.phases import Slot
from fullbatch.trials.queue import ATTEMPT, MOST_DEATHS, RELEASED, SLOT, SlotQueue
from tests.trials.simulation import Actor, Seen, Stage

SLOTS = [Slot(number) for number in range(5)]

# who goes on, by how many calls; whether it is killed then; how much time passes before
moves = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(1, 40), st.sampled_from([False] * 9 + [True]), st.sampled_from([0, 20, 34])
    ),
    max_size=40,
)


def play(script):
    stage, seen = Stage(), Seen()
    for number in range(4):
        stage.add(Actor(stage, f"w{number}", SLOTS, seen))
    for who, calls, kill, pause in script:
        stage.now += pause
        actor = stage.actors[who]
        for call in range(calls):
            if not stage.step(actor, kill=kill and call == calls - 1):
                break
    sleepers = [actor for actor in stage.actors if not actor.done]
    seen.slept = {actor.name for actor in sleepers}
    last = Actor(stage, "last", SLOTS, seen, endless=True)
    stage.add(last)
    for _ in range(20000):  # the others sleep until it has done all
        stage.now += 10
        if not stage.step(last):
            break
    assert last.done
    for actor in sleepers:  # who wakes up finds it so, and changes nothing
        while stage.step(actor):
            pass
    return stage, seen


def check(stage, seen):
    for actor in stage.actors:
        if actor.failure is not None:
            raise actor.failure
    queue = SlotQueue(stage.inner, "study", ["maximize"], SLOTS)
    ended = queue.ended()
    seen.look(ended)
    assert [found.slot.number for found in ended] == [0, 1, 2, 3, 4]
    assert ended[0].status == "failed"
    trials = queue.study.trials
    first = {}  # by attempt: any other was made too late, and never begun
    for trial in trials:
        if trial.user_attrs[SLOT] == 1 and ATTEMPT in trial.user_attrs:
            first.setdefault(trial.user_attrs[ATTEMPT], trial)
    dead = [t for t in first.values() if t.state is TrialState.FAIL and RELEASED not in t.user_attrs]
    expected = "failed" if len(dead) >= MOST_DEATHS else "done"
    assert ended[1].status == expected, "given up after so many deaths, counted here, and never before"
    good = Counter(t.user_attrs[SLOT] for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED))
    assert all(number == 1 for number in good.values()), "a result counts once for the sampler too"
    for found in ended:
        if (found.slot.number, found.attempts) in seen.begun:
            assert found.params == seen.begun[found.slot.number, found.attempts]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@example(
    [(0, 1, False, 0), (1, 2, False, 0), (0, 7, False, 0), (0, 37, False, 0), (1, 21, True, 34), (0, 20, False, 0)]
)
@given(moves)
def test_every_slot_ends_once(script):
    check(*play(script))


@pytest.mark.slow
@settings(max_examples=1500, suppress_health_check=list(HealthCheck))
@given(moves)
def test_every_slot_ends_once_in_many_more_ways(script):
    check(*play(script))


def test_killed_between_any_two_calls():
    """One worker, killed after its first, its second, its third call …; another does the rest."""
    for calls in range(1, 400):
        stage, seen = play([(0, calls, True, 0)])
        check(stage, seen)
        if not stage.actors[0].shot:
            return
    raise AssertionError("it never came to its end")


def test_asleep_between_any_two_calls():
    for calls in range(1, 400, 3):
        stage, seen = play([(0, calls, False, 0)])
        check(stage, seen)
        if "w0" not in seen.slept:
            return


def test_three_deaths_in_one_slot_end_it():
    """Two killed and one asleep in the same trial."""
    stage, seen = play(
        [(0, 1, False, 0), (0, 1, False, 0), (0, 18, False, 0), (1, 16, True, 0), (2, 21, True, 0), (0, 23, False, 0)]
    )
    check(stage, seen)
