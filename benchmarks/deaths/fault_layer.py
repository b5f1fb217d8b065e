"""A process whose file operations go wrong: faults.c, built and told what to do."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from failing_disk import KINDS

SOURCE = Path(__file__).with_name("faults.c")
FaultKind = Literal["none", "kill", "power", "refuse", "clock"]
_NUMBERS: dict[FaultKind, int] = {"none": 0, "kill": 1, "power": 2, "refuse": 3, "clock": 4}


@dataclass(frozen=True)
class Fault:
    """At operation ``at`` among those of ``kinds``, counted over all processes of the command."""

    kind: FaultKind = "none"
    at: int = 0  # from 1; 0: never
    kinds: tuple[str, ...] = tuple(KINDS)
    error: str = "EIO"  # of an operation that is refused
    lasting: bool = False  # whether later ones are refused as well
    after: bool = False  # die after the operation; of a write the first half is done
    jump: int = 0  # seconds by which the clock jumps

    def arm(self, log: Path, folder: Path) -> None:
        """In this process and those it will fork."""
        bits = sum(1 << KINDS[name] for name in self.kinds)
        arm = ctypes.CDLL(None).faults_arm
        arm.argtypes = [
            *[ctypes.c_char_p] * 2,
            *[ctypes.c_uint32] * 2,
            ctypes.c_uint64,
            *[ctypes.c_int] * 3,
            ctypes.c_int64,
        ]
        number = getattr(errno, self.error)
        given = (_NUMBERS[self.kind], bits, self.at, number, int(self.lasting), int(self.after), self.jump)
        if arm(os.fsencode(log), os.fsencode(folder), *given):
            raise OSError(f"{log} cannot be written.")


def under_the_layer(work: Path) -> None:
    """Start this program again with the layer below its files, unless it is there."""
    library = work / "faults.so"
    if str(library) in os.environ.get("LD_PRELOAD", ""):
        return
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    once = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **once})
