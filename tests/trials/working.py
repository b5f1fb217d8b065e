"""A worker as a process of its own: python -m tests.trials.working STORAGE STUDY FOLDER SLOTS LOST_AFTER HALT BEAT

It tries slots with a made-up objective.  A file in FOLDER says that a slot was begun in an attempt, or ended there; the
system makes each only once.  In the first attempt of slot HALT it waits until FOLDER/go appears; -1: nowhere.
"""

import sys
import time
from pathlib import Path

from optuna.samplers import TPESampler

from fullbatch.trials.ledger import Ledger
from fullbatch.trials.slots import Slot
from fullbatch.trials.storage import open_storage


def ledger_of(storage, study, slots, lost_after=180.0, beat=10.0):
    return Ledger(storage, study, ["maximize"], [Slot(n) for n in range(slots)], lost_after=lost_after, beat_every=beat)


def main(where, study, folder, slots, lost_after, halt, beat):
    folder = Path(folder)
    ledger = ledger_of(open_storage(where), study, int(slots), float(lost_after), float(beat))
    while not ledger.complete:
        claim = ledger.claim(lambda slot: TPESampler(seed=slot.number, n_startup_trials=2))
        if claim is None:
            time.sleep(0.05)
            continue
        with claim:
            params = claim.begin(
                lambda trial: {"x": trial.suggest_float("x", 0, 1), "c": trial.suggest_categorical("c", "ab")}
            )
            if params is None:
                continue
            name = f"{claim.slot.number}-{claim.attempt}"
            (folder / f"begun-{name}").open("x").close()
            while claim.slot.number == int(halt) and claim.attempt == 1 and not (folder / "go").exists():
                (folder / f"halts-{name}").touch()
                time.sleep(0.01)
            claim.report(1, params["x"])
            counts = claim.end("done", [params["x"]], evaluations=[(1, (params["x"],))])
            (folder / f"{'ended' if counts else 'dropped'}-{name}").open("x").close()


if __name__ == "__main__":
    main(*sys.argv[1:])
