"""The ledger in one process: order, retries, endings; who is taken for dead, and who is not."""

import os
import subprocess
import sys
import time

import optuna
import pytest
from optuna.samplers import TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from fullbatch.trials.identity import Identity, is_gone, this_process
from fullbatch.trials.ledger import Ledger
from fullbatch.trials.slots import Slot
from fullbatch.trials.standing import BEAT, DEATHS, SLOT, WORKER

NEVER = 1e6


class World:
    """One storage, a clock, and who is dead."""

    def __init__(self, slots=3, directions=("maximize",), storage=None):
        self.storage = storage or InMemoryStorage()
        self.slots = [Slot(number, {"c": "b"}) for number in range(slots)]
        self.directions, self.now, self.dead = list(directions), 0.0, set()

    def ledger(self, name="one", **more):
        return Ledger(
            self.storage,
            "study",
            self.directions,
            self.slots,
            Identity("here", 1, "now", name),
            100.0,
            beat_every=NEVER,
            gone=lambda identity: identity.name in self.dead,
            clock=lambda: self.now,
            **more,
        )


def sampler(slot):
    return TPESampler(seed=slot.number, n_startup_trials=2)


def choose(trial):
    return {"x": trial.suggest_float("x", 0, 1), "c": trial.suggest_categorical("c", ["a", "b"])}


def claimed(ledger):
    claim = ledger.claim(sampler)
    assert claim is not None
    return claim


def test_slots_end_in_their_order():
    ledger = World().ledger()
    for number in range(3):
        assert not ledger.complete
        claim = claimed(ledger)
        params = claim.begin(choose)
        assert params["c"] == "b", "what the slot has is not left to the sampler"
        assert [(one.slot.number, one.params, one.worker) for one in ledger.running()] == [(number, params, "one")]
        assert claim.end("done", [params["x"]], 2.0, 0.5, evaluations=[(1, (0.0,)), (2, (params["x"],))])
    assert ledger.complete and ledger.claim(sampler) is None and not ledger.running()
    found = ledger.ended()[2]
    assert (found.status, found.values, found.params) == ("done", (params["x"],), params)
    assert (found.seconds, found.device_hours, found.attempts) == (2.0, 0.5, 1)
    assert found.evaluations == ((1, (0.0,)), (2, (params["x"],)))
    assert len(ledger.study.trials) == 3


def test_killed_and_resumed_it_tries_the_same():
    def search(die):
        world, tried = World(slots=8), []
        ledger = world.ledger("0")
        while not ledger.complete:
            claim = claimed(ledger)
            if len(tried) in die:  # once before it has chosen, once after
                die.discard(len(tried))
                if len(tried) % 2:
                    claim.begin(choose)
                world.dead.add(ledger.worker.name)
                ledger = world.ledger(f"{len(world.dead)}")
                continue
            params = claim.begin(choose)
            tried.append(params)
            assert claim.end("done", [params["x"]])
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
    ledger = World(1, ["maximize", "minimize"][:directions]).ledger()
    claim = claimed(ledger)
    claim.begin(choose)
    claim.report(1, 0.25)
    assert claim.end(status, values, error="why")
    (found,) = ledger.ended()
    assert (found.status, found.values, found.error, found.attempts) == (status, kept, "why", 1)
    assert found.number == 0 and ledger.study.trials[0].state is state
    assert ledger.complete and ledger.claim(sampler) is None
    with pytest.raises(AssertionError):
        claim.end(status, values)


def test_a_value_that_is_no_number_is_a_divergence():
    ledger = World(1).ledger()
    claim = claimed(ledger)
    claim.begin(choose)
    assert claim.end("done", [float("nan")])
    assert (ledger.ended()[0].status, ledger.ended()[0].values) == ("diverged", None)


def test_let_go_it_is_no_death():
    ledger = World(1).ledger()
    for attempt in range(1, 6):
        claim = claimed(ledger)
        assert claim.attempt == attempt
        params = claim.begin(choose)
        if attempt == 5:
            assert claim.end("done", [1.0])
        elif attempt % 2:
            claim.release()
        else:
            with pytest.raises(KeyboardInterrupt), claim:
                raise KeyboardInterrupt
    (found,) = ledger.ended()
    assert (found.status, found.attempts, found.params) == ("done", 5, params)


def test_after_too_many_deaths_it_has_failed():
    world = World(2)
    for death in range(DEATHS):
        claim = claimed(world.ledger(f"victim {death}"))
        assert (claim.slot.number, claim.attempt) == (0, death + 1)
        claim.begin(choose)
        world.dead.add(f"victim {death}")
    ledger = world.ledger(last_words=lambda slot: f"KeyError: 'slot {slot.number}'")
    claim = claimed(ledger)
    assert claim.slot.number == 1
    (found,) = ledger.ended()
    assert (found.status, found.attempts, found.values) == ("failed", DEATHS, None)
    assert f"died {DEATHS} times (out of memory? its output ends with: KeyError: 'slot 0')" in found.error


@pytest.mark.parametrize(("lost_after", "every"), [(180.0, 10.0), (30.0, 5.0), (0.6, 0.1)])
def test_who_is_soon_taken_for_dead_says_often_that_it_lives(lost_after, every):
    world = World(1)
    ledger = Ledger(world.storage, "study", world.directions, world.slots, lost_after=lost_after)
    with claimed(ledger) as claim:
        assert claim._every == pytest.approx(every)


def test_two_who_find_a_death_try_again_once():
    world = World(1)
    claimed(world.ledger("victim")).begin(choose)
    one, two = world.ledger("one"), world.ledger("two")
    world.dead.add("victim")
    first = claimed(one)
    assert two.claim(sampler) is None
    assert (first.slot.number, first.attempt) == (0, 2)


def test_who_was_taken_for_dead_changes_nothing():
    for late in ("begin", "report", "beat", "end", "fail", "release"):
        world = World(1)
        claim = claimed(world.ledger("sleeper"))
        if late != "begin":
            claim.begin(choose)
        world.dead.add("sleeper")
        ledger = world.ledger()
        other = claimed(ledger)
        match late:
            case "begin":
                assert claim.begin(choose) is None
            case "report":
                assert claim.report(1, 0.5) is False
            case "beat":
                claim.beat()
            case "end":
                assert not claim.end("done", [7.0])
            case "fail":
                assert not claim.end("failed", error="late")
            case "release":
                claim.release()
        assert claim.lost
        other.begin(choose)
        assert other.end("done", [1.0])
        assert [found.values for found in ledger.ended()] == [(1.0,)]


def test_a_sign_of_life_is_enough():
    world = World(1)
    claim = claimed(world.ledger("elsewhere"))
    ledger = world.ledger()
    for _ in range(20):
        world.now += 30.0
        claim.beat()
        assert ledger.bury_the_dead() == 0
    for _ in range(5):
        world.now += 30.0
        assert not claim.lost
        ledger.bury_the_dead()
    claim.beat()
    assert claim.lost


def test_a_watcher_that_was_asleep_does_not_count_its_sleep():
    """Machine and workers were paused together, and it is the first to wake."""
    world = World(1)
    claimed(world.ledger("elsewhere"))
    ledger = world.ledger()
    assert ledger.bury_the_dead() == 0
    for _ in range(3):
        world.now += 1e5
        dead = ledger.bury_the_dead()
    assert dead == 1
    assert world.now == 3e5, "three looks a pause apart are needed"


def test_time_spent_reading_is_nobodys_silence():
    """The watcher sleeps between its look at the clock and its look at the trials, or after it."""
    world = World(1)
    claimed(world.ledger("elsewhere"))
    times = iter([0.0, 1e5, 1e5 + 1, 3e5, 3e5 + 1, 5e5])  # before and after each reading
    ledger = world.ledger()
    ledger.clock = lambda: next(times)
    assert [ledger.bury_the_dead() for _ in range(3)] == [0, 0, 0]
    assert next(iter(ledger._seen.values()))[1] == 2.0


def test_a_trial_taken_by_nobody_knows_whom():
    """Its process died before it wrote its name; that is no death of the slot's."""
    world = World(1)
    for _ in range(DEATHS + 1):
        ledger = world.ledger()
        ledger.study.enqueue_trial({"c": "b"}, user_attrs={SLOT: 0, "attempt": _ + 1})
        ledger.study.ask()
        assert ledger.claim(sampler) is None
        world.now += 31.0
        assert ledger.bury_the_dead() == 1
    claim = claimed(ledger)
    assert claim.attempt == DEATHS + 2


def test_a_trial_without_a_slot_is_put_away():
    world = World(1)
    ledger = world.ledger()
    stray = ledger.study.ask()
    claim = claimed(ledger)
    assert claim.slot.number == 0
    world.now += 31.0
    ledger.bury_the_dead()
    world.now += 31.0
    ledger.bury_the_dead()
    assert ledger.study.trials[stray.number].state is TrialState.FAIL
    claim.begin(choose)
    assert claim.end("done", [1.0])
    assert len(ledger.ended()) == 1


def test_made_twice_the_first_counts():
    world = World(1)
    ledger = world.ledger()
    for _ in range(3):
        ledger.study.enqueue_trial({"c": "b"}, user_attrs={SLOT: 0, "attempt": 1})
    claim = claimed(ledger)
    assert claim.trial.number == 0
    assert world.ledger("two").claim(sampler) is None
    claim.begin(choose)
    claim.end("done", [1.0])
    assert ledger.claim(sampler) is None and len(ledger.ended()) == 1


def test_the_heart_beats_by_itself():
    world = World(1)
    ledger = world.ledger()
    ledger.beat_every = 0.001
    claim = claimed(ledger)
    deadline = time.monotonic() + 60
    while ledger.study.trials[0].user_attrs.get(BEAT, 0) < 3:
        assert time.monotonic() < deadline
    ledger.study.tell(0, state=TrialState.FAIL)  # as somebody else would
    while not claim.lost:
        assert time.monotonic() < deadline


def test_another_direction_is_another_search():
    world = World(1)
    world.ledger()
    world.directions = ["minimize"]
    with pytest.raises(ValueError, match="another name"):
        world.ledger()


def test_dead_attempts_do_not_compete():
    """A lost attempt's evaluations would count twice in a pruner that looks at all trials."""
    world = World(4)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    for name in ("a", "b"):
        lost = claimed(world.ledger(name, pruner=pruner))
        lost.begin(choose)
        lost.report(1, 0.9)
        world.dead.add(name)
    ledger = world.ledger("c", pruner=pruner)
    claim = claimed(ledger)
    claim.begin(choose)
    assert not claim.report(1, 0.9)
    claim.end("done", [0.9])
    claim = claimed(ledger)
    claim.begin(choose)
    assert claim.report(1, 0.5)
    claim.end("pruned", [0.5])
    claim = claimed(ledger)
    claim.begin(choose)
    assert claim.report(1, 0.8), "half of three is one"
    claim.end("pruned", [0.8])
    claim = claimed(ledger)
    claim.begin(choose)
    assert not claim.report(1, 0.85), "half of four is two; with the dead ones it would be the fourth of six"
    claim.end("done", [0.85])


# ---------------------------------------------------------------------------------------------------------------------
# processes


def test_a_process_is_known_by_more_than_its_number():
    me = this_process()
    assert me.pid == os.getpid() and not is_gone(me)
    assert Identity.read(me.as_dict()) == me and Identity.read(None) is None
    assert is_gone(Identity(me.place, me.pid, "before", "reused")), "the number was used again"
    assert not is_gone(Identity("another machine", me.pid, "before", "far")), "nobody can know"
    assert not is_gone(Identity("", me.pid, "", "?"))


def test_a_process_that_ended_is_gone_before_its_parent_asks():
    code = """
from fullbatch.trials.identity import this_process
print(*this_process().as_dict().values(), sep="|", flush=True)
input()"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    place, pid, began, name = process.stdout.readline().strip().split("|")
    child = Identity(place, int(pid), began, name)
    assert not is_gone(child)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table
    assert is_gone(child)
    process.communicate()
    assert is_gone(child)


def test_the_holders_name_is_kept():
    world = World(1)
    ledger = Ledger(world.storage, "study", ["maximize"], world.slots)
    with claimed(ledger) as claim:
        assert Identity.read(ledger.study.trials[0].user_attrs[WORKER]) == this_process()
        assert ledger.running()[0].worker.endswith(f":{os.getpid()}")
        claim.begin(choose)
        assert claim.end("done", [1.0])
