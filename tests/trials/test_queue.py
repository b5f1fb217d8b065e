"""The queue in one process: order, retries, endings; who is taken for dead, and who is not."""

import itertools
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.samplers import TPESampler
from optuna.storages import InMemoryStorage
from optuna.storages._rdb.models import TrialHeartbeatModel
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import TrialState, create_trial

from fullbatch.trials.phases import Score, Slot
from fullbatch.trials.processes import ProcessIdentity, is_gone, this_process
from fullbatch.trials.queue import ATTEMPT, MOST_DEATHS, SLOT, WORKER, SlotQueue
from fullbatch.trials.storage import heartbeat_every, open_storage
from tests.waiting import HANG, wait_for


class World:
    """One storage, and who is dead."""

    def __init__(self, slots=3, directions=("maximize",), storage=None):
        self.storage = storage or InMemoryStorage()
        self.slots = [Slot(number, {"c": "b"}) for number in range(slots)]
        self.directions, self.dead = list(directions), set()

    def queue(self, name="one", **more):
        return SlotQueue(
            self.storage,
            "study",
            self.directions,
            self.slots,
            worker=ProcessIdentity("here", 1, "now", name),
            is_gone=lambda identity: identity.name in self.dead,
            **more,
        )


def sampler(slot):
    return TPESampler(seed=slot.number, n_startup_trials=2)


def choose(trial):
    return {"x": trial.suggest_float("x", 0, 1), "c": trial.suggest_categorical("c", ["a", "b"])}


def grow_older(queue, number, seconds):
    """As if the last heartbeat of this trial lay so much further back."""
    trial = queue.study.trials[number]
    with _create_scoped_session(queue.storage.scoped_session) as session:
        TrialHeartbeatModel.where_trial_id(trial._trial_id, session).heartbeat -= timedelta(seconds=seconds)


def taken(queue):
    lease = queue.take(sampler)
    assert lease is not None
    return lease


def test_slots_end_in_their_order():
    queue = World().queue()
    for number in range(3):
        assert not queue.complete
        lease = taken(queue)
        params = lease.begin(choose)
        assert params["c"] == "b", "what the slot has is not left to the sampler"
        assert [(one.slot.number, one.params, one.worker) for one in queue.progress()[1]] == [(number, params, "one")]
        assert lease.end(Score("done", (params["x"],), 2.0, 0.5, evaluations=((1, (0.0,)), (2, (params["x"],)))))
    assert queue.complete and queue.take(sampler) is None and not queue.progress()[1]
    found = queue.ended()[2]
    assert (found.status, found.values, found.params) == ("done", (params["x"],), params)
    assert (found.seconds, found.device_hours, found.attempts) == (2.0, 0.5, 1)
    assert found.evaluations == ((1, (0.0,)), (2, (params["x"],)))
    assert len(queue.study.trials) == 3


def test_killed_and_resumed_it_tries_the_same():
    def search(die):
        world, tried = World(slots=8), []
        queue = world.queue("0")
        while not queue.complete:
            lease = taken(queue)
            if len(tried) in die:  # once before it has chosen, once after
                die.discard(len(tried))
                if len(tried) % 2:
                    lease.begin(choose)
                world.dead.add(queue.worker.name)
                queue = world.queue(f"{len(world.dead)}")
                continue
            params = lease.begin(choose)
            tried.append(params)
            assert lease.end(Score("done", (params["x"],)))
        return tried

    assert search({2, 3, 6, 7}) == search(set())


@pytest.mark.parametrize(
    ("status", "values", "state", "kept", "directions"),
    [
        ("done", [0.5], TrialState.COMPLETE, (0.5,), 1),
        ("stopped", [0.5], TrialState.COMPLETE, (0.5,), 1),
        ("pruned", [0.25], TrialState.PRUNED, (0.25,), 1),
        ("diverged", [0.0], TrialState.COMPLETE, (0.0,), 1),
        ("diverged", None, TrialState.PRUNED, None, 1),
        ("failed", None, TrialState.FAIL, None, 1),
        ("done", [0.5, 2.0], TrialState.COMPLETE, (0.5, 2.0), 2),
        ("diverged", [0.0, 9.0], TrialState.COMPLETE, (0.0, 9.0), 2),
        ("diverged", None, TrialState.FAIL, None, 2),
        ("failed", None, TrialState.FAIL, None, 2),
    ],
)
def test_endings(status, values, state, kept, directions):
    queue = World(1, ["maximize", "minimize"][:directions]).queue()
    lease = taken(queue)
    lease.begin(choose)
    lease.report(1, 0.25)
    assert lease.end(Score(status, values, error="why"))
    (found,) = queue.ended()
    assert (found.status, found.values, found.error, found.attempts) == (status, kept, "why", 1)
    assert found.number == 0 and queue.study.trials[0].state is state
    assert queue.complete and queue.take(sampler) is None
    with pytest.raises(AssertionError):
        lease.end(Score(status, values))


def test_a_value_that_is_no_number_is_a_divergence():
    queue = World(1).queue()
    lease = taken(queue)
    lease.begin(choose)
    assert lease.end(Score("done", (float("nan"),)))
    assert (queue.ended()[0].status, queue.ended()[0].values) == ("diverged", None)


def test_let_go_it_is_no_death():
    queue = World(1).queue()
    for attempt in range(1, 6):
        lease = taken(queue)
        assert lease.attempt == attempt
        params = lease.begin(choose)
        if attempt == 5:
            assert lease.end(Score("done", (1.0,)))
        else:
            lease.release()
    (found,) = queue.ended()
    assert (found.status, found.attempts, found.params) == ("done", 5, params)


def test_after_too_many_deaths_it_has_failed():
    world = World(2)
    for death in range(MOST_DEATHS):
        lease = taken(world.queue(f"victim {death}"))
        assert (lease.slot.number, lease.attempt) == (0, death + 1)
        lease.begin(choose)
        world.dead.add(f"victim {death}")
    queue = world.queue(last_line=lambda slot: f"KeyError: 'slot {slot.number}'")
    lease = taken(queue)
    assert lease.slot.number == 1
    (found,) = queue.ended()
    assert (found.status, found.attempts, found.values) == ("failed", MOST_DEATHS, None)
    assert f"died {MOST_DEATHS} times (out of memory? its output ends with: KeyError: 'slot 0')" in found.error


@pytest.mark.parametrize(("lost_after", "every"), [(180.0, 10.0), (30.0, 5.0), (6.0, 1.0)])
def test_who_is_soon_taken_for_dead_says_often_that_it_lives(tmp_path, lost_after, every):
    assert heartbeat_every(open_storage(str(tmp_path / "study.db"), lost_after)) == pytest.approx(every)


def test_two_who_find_a_death_try_again_once():
    world = World(1)
    taken(world.queue("victim")).begin(choose)
    one, two = world.queue("one"), world.queue("two")
    world.dead.add("victim")
    first = taken(one)
    assert two.take(sampler) is None
    assert (first.slot.number, first.attempt) == (0, 2)


def test_who_was_taken_for_dead_changes_nothing():
    for late in ("begin", "report", "beat", "end", "fail", "release"):
        world = World(1)
        lease = taken(world.queue("sleeper"))
        if late != "begin":
            lease.begin(choose)
        world.dead.add("sleeper")
        queue = world.queue()
        other = taken(queue)
        match late:
            case "begin":
                assert lease.begin(choose) is None
            case "report":
                assert lease.report(1, 0.5) is False
            case "beat":
                lease.beat()
            case "end":
                assert not lease.end(Score("done", (7.0,)))
            case "fail":
                assert not lease.end(Score("failed", error="late"))
            case "release":
                lease.release()
        assert lease.lost
        other.begin(choose)
        assert other.end(Score("done", (1.0,)))
        assert [found.values for found in queue.ended()] == [(1.0,)]


def test_a_sign_of_life_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr("fullbatch.trials.storage.BEAT_EVERY", 0.01)
    storage, beats = open_storage(str(tmp_path / "study.db")), []
    record = storage.record_heartbeat
    monkeypatch.setattr(storage, "record_heartbeat", lambda trial: record(trial) or beats.append(trial))
    others = set(threading.enumerate())
    lease = taken(World(1, storage=storage).queue("elsewhere"))
    (heart,) = set(threading.enumerate()) - others
    queue = World(1, storage=storage).queue()
    for _ in range(4):
        grow_older(queue, 0, 3600.0)
        before = len(beats)
        wait_for(lambda before=before: len(beats) > before + 1)  # the first of them may have begun before
        queue.fail_dead()
    assert not queue.study.trials[0].state.is_finished() and not lease.lost
    lease._over.set()  # no heartbeats any more
    heart.join(HANG)
    grow_older(queue, 0, 3600.0)
    queue.fail_dead()
    assert queue.study.trials[0].state is TrialState.FAIL


def test_a_trial_that_never_had_a_heartbeat_grows_stale_too(tmp_path):
    """Its worker died on another machine, before the first one, or was of a version that had none."""
    world = World(1, storage=open_storage(str(tmp_path / "study.db"), lost_after=180.0))
    made(world.queue("elsewhere"))
    queue = world.queue("here")
    for _ in range(2):
        assert queue.take(sampler) is None
        grow_older(queue, 0, 100.0)
    assert taken(queue).attempt == 2


@pytest.mark.slow
def test_processes_that_come_and_go_keep_no_dead_trial_alive(tmp_path):
    """Who meets a trial gives it a heartbeat only if it never had one."""
    world = World(1, storage=open_storage(str(tmp_path / "study.db"), lost_after=2.0))
    lease = taken(world.queue("elsewhere"))
    lease._over.set()  # no heartbeats any more
    newcomers = itertools.count()
    assert wait_for(lambda: world.queue(f"newcomer {next(newcomers)}").take(sampler)).attempt == 2


def test_a_trial_whose_making_was_not_answered_is_no_death(tmp_path, monkeypatch):
    """The storage made it, and the connection broke before it said so."""
    world = World(1, storage=open_storage(str(tmp_path / "study.db"), lost_after=60.0))
    queue, create = world.queue(), world.storage.create_new_trial
    broken = [True] * (MOST_DEATHS + 1)

    def break_off(*args, **kwargs):
        made = create(*args, **kwargs)
        if broken and broken.pop():
            raise StorageInternalError("the server closed the connection")
        return made

    monkeypatch.setattr(world.storage, "create_new_trial", break_off)
    lease = taken(queue)
    lease.begin(choose)
    assert lease.end(Score("done", (1.0,))) and queue.complete


@pytest.mark.parametrize(("named", "attempt"), [(False, 2), (True, 1)])
def test_results_of_earlier_versions_count(named, attempt):
    """They made trials before they knew who takes them: one that nobody began, or whose taker wrote its name after it
    had been failed, stands before the one that ended the slot."""
    queue = World(1).queue()
    name = {WORKER: asdict(queue.worker)}
    stray, good = {SLOT: 0, ATTEMPT: 1, **(name if named else {})}, {SLOT: 0, ATTEMPT: attempt, **name}
    queue.study.add_trial(create_trial(state=TrialState.FAIL, user_attrs=stray))
    queue.study.add_trial(create_trial(values=[0.5], user_attrs=good))
    assert [(ended.status, ended.values) for ended in queue.ended()] == [("done", (0.5,))]


def test_a_trial_without_a_slot_is_put_away(tmp_path):
    """Somebody else's, in the same study: it is in nobody's way."""
    world = World(1, storage=open_storage(str(tmp_path / "study.db"), lost_after=180.0))
    queue = world.queue()
    stray = queue.study.ask()
    lease = taken(queue)
    assert lease.slot.number == 0
    for _ in range(2):
        assert queue.study.trials[stray.number].state is TrialState.RUNNING
        grow_older(queue, stray.number, 100.0)
        queue.fail_dead()
    assert queue.study.trials[stray.number].state is TrialState.FAIL
    lease.begin(choose)
    assert lease.end(Score("done", (1.0,)))
    assert len(queue.ended()) == 1


def made(queue, attempt=1):
    """A trial that its process has made, and no more."""
    attrs = {SLOT: 0, ATTEMPT: attempt, WORKER: asdict(queue.worker)}
    queue.study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=attrs))


def test_made_twice_the_first_counts():
    world = World(1)
    queue = world.queue()
    lease = taken(queue)
    for late in (1, 1, 3):
        made(queue, late)
    assert lease.trial.number == 0
    assert world.queue("two").take(sampler) is None
    lease.begin(choose)
    lease.end(Score("done", (1.0,)))
    assert queue.take(sampler) is None and len(queue.ended()) == 1


def test_who_comes_late_with_an_attempt_gives_it_up():
    """Between its look and its trial another process made the same attempt; that is no death of the slot's."""
    world = World(1)
    lease = taken(world.queue("one"))
    late = world.queue("two")
    for _ in range(MOST_DEATHS):
        assert late._attempt(world.slots[0], []) is None
        assert late.study.trials[-1].state is TrialState.FAIL
    lease.release()
    assert late._attempt(world.slots[0], []) is None, "attempt 1 is over"
    assert taken(late).attempt == 2


def test_who_was_taken_for_dead_notices_by_itself(monkeypatch):
    monkeypatch.setattr("fullbatch.trials.queue.BEAT_EVERY", 0.001)
    queue = World(1).queue()
    lease = taken(queue)
    queue.study.tell(0, state=TrialState.FAIL)  # as somebody else would
    wait_for(lambda: lease.lost)


def test_another_direction_is_another_search():
    world = World(1)
    world.queue()
    world.directions = ["minimize"]
    with pytest.raises(ValueError, match="another name"):
        world.queue()


def test_dead_attempts_do_not_compete():
    """A lost attempt's evaluations would count twice in a pruner that looks at all trials."""
    world = World(4)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    for name in ("a", "b"):
        lost = taken(world.queue(name, pruner=pruner))
        lost.begin(choose)
        lost.report(1, 0.9)
        world.dead.add(name)
    queue = world.queue("c", pruner=pruner)
    lease = taken(queue)
    lease.begin(choose)
    assert not lease.report(1, 0.9)
    lease.end(Score("done", (0.9,)))
    lease = taken(queue)
    lease.begin(choose)
    assert lease.report(1, 0.5)
    lease.end(Score("pruned", (0.5,)))
    lease = taken(queue)
    lease.begin(choose)
    assert lease.report(1, 0.8), "half of three is one"
    lease.end(Score("pruned", (0.8,)))
    lease = taken(queue)
    lease.begin(choose)
    assert not lease.report(1, 0.85), "half of four is two; with the dead ones it would be the fourth of six"
    lease.end(Score("done", (0.85,)))


# ---------------------------------------------------------------------------------------------------------------------
# processes


def test_a_process_is_known_by_more_than_its_number():
    me = this_process()
    assert me.pid == os.getpid() and not is_gone(me)
    assert ProcessIdentity.read(asdict(me)) == me and ProcessIdentity.read(None) is None
    assert is_gone(ProcessIdentity(me.place, me.pid, "before", "reused")), "the number was used again"
    assert not is_gone(ProcessIdentity("another machine", me.pid, "before", "far")), "nobody can know"
    assert not is_gone(ProcessIdentity("", me.pid, "", "?"))


def test_a_process_that_ended_is_gone_before_its_parent_asks():
    code = """
from fullbatch.trials.processes import this_process
print(*vars(this_process()).values(), sep="|", flush=True)
input()"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    place, pid, began, name = process.stdout.readline().strip().split("|")
    child = ProcessIdentity(place, int(pid), began, name)
    assert not is_gone(child)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table
    assert is_gone(child)
    process.communicate()
    assert is_gone(child)


def test_the_holders_name_is_kept():
    world = World(1)
    queue = SlotQueue(world.storage, "study", ["maximize"], world.slots)
    lease = taken(queue)
    assert ProcessIdentity.read(queue.study.trials[0].user_attrs[WORKER]) == this_process()
    assert queue.progress()[1][0].worker.endswith(f":{os.getpid()}")
    lease.begin(choose)
    assert lease.end(Score("done", (1.0,)))


def test_a_machine_that_slept_gives_its_workers_time_for_a_heartbeat(tmp_path, monkeypatch):
    world = World(slots=2, storage=open_storage(str(tmp_path / "study.db"), 30.0))
    first, other = world.queue("one"), world.queue("two")
    lease = taken(first)
    stale = []
    monkeypatch.setattr(optuna.storages, "fail_stale_trials", lambda study: stale.append(study))
    other.fail_dead()
    assert len(stale) == 1
    slept, wall = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: wall() + slept[0])
    slept[0] = 3600.0
    other.fail_dead()
    other.fail_dead()
    assert len(stale) == 1, "not at once after the pause"
    other._trusted_from = 0.0
    other.fail_dead()
    assert len(stale) == 2
    lease.release()
