"""Kill, fill the disk, cut the power, a thousand times, and see what is left.

    python benchmarks/deaths/deaths.py FOLDER --trials 1000      # again: goes on after the last trial
    python benchmarks/deaths/deaths.py FOLDER ... --summary      # the table

FOLDER is best on a disk in memory: each trial writes some hundred megabytes.  Needs Linux and a C compiler.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from death_table import TRIALS, table
from fault_layer import under_the_layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    if options.summary:
        print(table([folder / TRIALS for folder in options.folders]))
        return
    (folder,) = options.folders
    under_the_layer(folder.resolve())
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests make the small data and models
    import torch

    torch.set_num_threads(1)
    from campaign import Campaign

    Campaign(folder, options.seed, options.cases).go_on(options.trials)


if __name__ == "__main__":
    main()
