"""Workers on one storage, one call to it at a time, in an order that the test chooses: killed, or asleep, between any
two calls.  Time passes only for who sleeps."""

import threading

import optuna
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import TrialState

import fullbatch.trials.queue
import fullbatch.trials.storage
from fullbatch.trials.phases import Ended, Score
from fullbatch.trials.processes import ProcessIdentity
from fullbatch.trials.queue import Lease, SlotQueue

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Killed(BaseException):
    """SIGKILL: what comes after it in the code does not happen; every further call raises it again."""


class Stage:
    """Whose turn it is."""

    def __init__(self):
        self.inner = InMemoryStorage()
        self.heartbeats = {}
        self.dead = set()
        self.now = 0.0
        self.actors = []

    def add(self, actor):
        self.actors.append(actor)
        actor.thread.start()

    def step(self, actor, kill=False):
        """One call of the actor's, to its end; false if it has nothing more to do."""
        if actor.done:
            return False
        if kill:
            self.dead.add(actor.name)
            actor.killed = actor.shot = True
        actor.may_go.release()
        actor.arrived.acquire()
        return not actor.done


class Gate(BaseStorage, BaseHeartbeat):
    """An actor's way to the storage, with heartbeats as a data base has them.  As in a data base that reads what is
    committed, a user attribute is written in two steps: a trial may be ended between the look and the writing."""

    def __init__(self, stage, actor, grace_period):
        self._stage, self._actor, self.grace_period = stage, actor, grace_period

    def record_heartbeat(self, trial_id):
        self._actor.turn()
        self._stage.heartbeats[trial_id] = self._stage.now

    def _get_stale_trial_ids(self, study_id):
        self._actor.turn()
        running = self._stage.inner.get_all_trials(study_id, deepcopy=False, states=[TrialState.RUNNING])
        beats = {trial._trial_id: self._stage.heartbeats.get(trial._trial_id) for trial in running}
        late = self._stage.now - self.grace_period
        return [number for number, beat in beats.items() if beat is not None and beat < late]

    def get_heartbeat_interval(self):
        return 10

    def get_heartbeat_stale_trial_callback(self):
        return None

    get_failed_trial_callback = get_heartbeat_stale_trial_callback

    def set_trial_user_attr(self, trial_id, key, value):
        inner = self._stage.inner
        self._actor.turn()
        inner.check_trial_is_updatable(trial_id, inner.get_trial(trial_id).state)
        self._actor.turn()
        inner.check_trial_is_updatable = lambda *anything: None
        try:
            inner.set_trial_user_attr(trial_id, key, value)
        finally:
            del inner.check_trial_is_updatable


def _gated(name):
    def call(self, *args, **kwargs):
        self._actor.turn()
        return getattr(self._stage.inner, name)(*args, **kwargs)

    return call


for _name in BaseStorage.__abstractmethods__ - {"set_trial_user_attr"}:
    setattr(Gate, _name, _gated(_name))
Gate.__abstractmethods__ = frozenset()


def without_heartbeat(storage, trial_id):
    """As the queue asks a data base; others are asked in their own way."""
    if not isinstance(storage, Gate):
        return fullbatch.trials.storage.without_heartbeat(storage, trial_id)
    storage._actor.turn()
    return trial_id not in storage._stage.heartbeats


def _live(lease, live=Lease._live):
    """An actor gives its signs of life itself: a thread would give them by a clock, and in the middle of a turn."""
    if not isinstance(lease._queue.storage, Gate):
        live(lease)


class Actor:
    """A worker: it leases trials until there are none."""

    def __init__(self, stage, name, slots, seen, endless=False, lost_after=100.0):
        self.stage, self.name, self.slots, self.seen = stage, name, slots, seen
        self.endless, self.lost_after = endless, lost_after
        self.may_go, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.done = self.killed = self.shot = False
        self.failure = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def turn(self):
        self.arrived.release()
        self.may_go.acquire()
        if self.killed:
            raise Killed

    def _run(self):
        self.may_go.acquire()
        try:
            if not self.killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self.failure = error
        self.done = True
        self.arrived.release()

    def _work(self):
        fullbatch.trials.queue.without_heartbeat = without_heartbeat
        Lease._live = _live
        queue = SlotQueue(
            Gate(self.stage, self, self.lost_after),
            "study",
            ["maximize"],
            self.slots,
            worker=ProcessIdentity("here", 1, "now", self.name),
            is_gone=lambda identity: identity.name in self.stage.dead,
        )
        while not queue.complete:
            lease = queue.take(lambda slot: RandomSampler())  # never the same twice
            self.seen.look(queue.ended())
            if lease is None:
                if not self.endless:
                    return
                self.turn()
                continue
            self._try(lease)
        self.seen.look(queue.ended())

    def _try(self, lease):
        """Slot 0 cannot be trained, slot 1 is let go at first, slot 2 kills whom it meets; others end well."""
        params = lease.begin(lambda trial: {name: trial.suggest_float(name, 0, 1) for name in "xy"})
        if params is None:
            return
        x = params["x"]
        self.seen.began(lease.slot.number, lease.attempt, params)
        lease.report(1, x)
        lease.beat()
        match lease.slot.number:
            case 0:
                counts = lease.end(Score("failed", error="no memory"))
            case 1 if lease.attempt == 1:
                return lease.release()
            case 2 if not self.endless:
                self.stage.dead.add(self.name)
                self.killed = True
                raise Killed
            case 3:
                counts = lease.end(Score("pruned", (x,)))
            case _:
                counts = lease.end(Score("done", (x,)))
        if counts:
            self.seen.ended_once(lease.slot.number)
        assert counts or lease.lost


class Seen:
    """What was seen at any time, by anyone: an end is an end."""

    def __init__(self):
        self.ended: dict[int, Ended] = {}
        self.begun: dict[tuple[int, int], dict[str, float]] = {}
        self.counted: set[int] = set()

    def look(self, ended):
        for found in ended:
            before = self.ended.setdefault(found.slot.number, found)
            assert (before.number, before.status, before.values, before.attempts) == (
                found.number,
                found.status,
                found.values,
                found.attempts,
            )
        assert set(self.ended) <= {found.slot.number for found in ended}

    def began(self, slot, attempt, params):
        assert (slot, attempt) not in self.begun, "run twice"
        self.begun[slot, attempt] = params
        assert all(found == params for (number, _), found in self.begun.items() if number == slot)

    def ended_once(self, slot):
        assert slot not in self.counted, "counted twice"
        self.counted.add(slot)
