"""A worker as a process of its own: python -m tests.trials.working STORAGE STUDY FOLDER SLOTS LOST_AFTER HALT BEAT

It tries slots with a made-up objective.  A file in FOLDER says that a slot was begun in an attempt, or ended there; the
system makes each only once.  In the first attempt of slot HALT it waits until FOLDER/go appears; -1: nowhere.
"""

import sys
import time
from pathlib import Path

from optuna.samplers import TPESampler

import fullbatch.trials.queue
from fullbatch.trials.phases import Score, Slot
from fullbatch.trials.queue import SlotQueue
from fullbatch.trials.storage import open_storage


def queue_of(storage, study, slots):
    return SlotQueue(storage, study, ["maximize"], [Slot(n) for n in range(slots)])


def main(where, study, folder, slots, lost_after, halt, beat):
    folder = Path(folder)
    fullbatch.trials.queue.heartbeat_every = lambda storage: float(beat)
    queue = queue_of(open_storage(where, float(lost_after)), study, int(slots))
    while not queue.complete:
        lease = queue.take(lambda slot: TPESampler(seed=slot.number, n_startup_trials=2))
        if lease is None:
            time.sleep(0.05)
            continue
        params = lease.begin(
            lambda trial: {"x": trial.suggest_float("x", 0, 1), "c": trial.suggest_categorical("c", "ab")}
        )
        if params is None:
            continue
        name = f"{lease.slot.number}-{lease.attempt}"
        (folder / f"begun-{name}").open("x").close()
        while lease.slot.number == int(halt) and lease.attempt == 1 and not (folder / "go").exists():
            (folder / f"halts-{name}").touch()
            time.sleep(0.01)
        lease.report(1, params["x"])
        counts = lease.end(Score("done", (params["x"],), evaluations=((1, (params["x"],)),)))
        (folder / f"{'ended' if counts else 'dropped'}-{name}").open("x").close()


if __name__ == "__main__":
    main(*sys.argv[1:])
