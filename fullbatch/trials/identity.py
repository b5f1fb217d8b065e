"""Who holds a trial: a process, named so that another one can tell whether it still lives.

A process number alone says little: numbers are used again, and mean another process on another machine, in another
container, after a restart.  With the boot of the machine, the namespaces it counts in and the time the process began,
the answer "it is gone" is certain.  Where it cannot be known (another machine), the beats of the ledger decide.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Identity:
    """place    the running machine and the namespace in which ``pid`` counts; "": not known
    pid      of the process
    began    when it began, in the system's own words; "": not known
    name     for people
    """

    place: str
    pid: int
    began: str
    name: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, values: object) -> Identity | None:
        """None: nobody that could be asked for."""
        if not isinstance(values, Mapping) or set(values) != {field.name for field in fields(cls)}:
            return None
        return cls(**values)


def this_process() -> Identity:
    pid = os.getpid()
    return Identity(_place(), pid, _began(pid) or "", f"{socket.gethostname()}:{pid}")


def is_gone(identity: Identity) -> bool:
    """True only if it is certain; a process that is stopped, or that another user runs, is there."""
    if not identity.place or not identity.began or identity.place != _place():
        return False
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is there, and another user's
    began = _began(identity.pid)
    return began is not None and began != identity.began


# ---------------------------------------------------------------------------------------------------------------------
# Linux tells it in /proc; elsewhere (macOS) sysctl and ps do


@lru_cache(maxsize=1)
def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [
            os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time") if Path(f"/proc/self/ns/{kind}").exists()
        ]
    except OSError:
        return _said("sysctl", "-n", "kern.bootsessionuuid")
    return " ".join([boot, *spaces])


def _began(pid: int) -> str | None:
    """Of a process that has ended, but that its parent has not asked about yet: "ended".  None: cannot be told."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _said("ps", "-o", "lstart=", "-p", str(pid)) or None
    state, *rest = line.rpartition(")")[2].split()  # the name before it may hold anything
    return "ended" if state in "ZX" else rest[18]


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
