"""What a disk may hold after the power failed: the log of faults.c, played back.

Data count from the moment their file is synced, names from the moment their folder is (POSIX), or, as ext4's journal
does it, in their order, up to the last sync of anything at least.  Of what came later any part may have reached the
disk: nothing, everything, the first writes with the last one cut, some of the blocks, or only the new length.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HEAD = 8192  # bytes before the log: the control of faults.c
BLOCK = 4096
CREATE, MKDIR, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, RMDIR = range(1, 9)
KINDS = {"create": CREATE, "mkdir": MKDIR, "write": WRITE, "truncate": TRUNCATE, "sync": SYNC, "rename": RENAME}
KINDS |= {"unlink": UNLINK, "rmdir": RMDIR}
_RECORD = struct.Struct("=4I3Q")

Rules = Literal["ext4", "posix"]


@dataclass(frozen=True)
class Operation:
    kind: int
    path: str
    other: str  # what it is renamed to
    inode: int
    offset: int  # of a write; the new length of a file that is cut
    data: bytes


def operations(log: Path) -> Iterator[Operation]:
    with log.open("rb") as file:
        left = int.from_bytes(file.read(8), "little")
        file.seek(HEAD)
        while left > 0:
            kind, path, other, _, inode, offset, length = _RECORD.unpack(file.read(_RECORD.size))
            length = length if kind == WRITE else 0
            names = os.fsdecode(file.read(path)), os.fsdecode(file.read(other))
            yield Operation(kind, *names, inode, offset, file.read(length))
            left -= _RECORD.size + path + other + length


def counts(log: Path) -> dict[str, int]:
    """Operations of each kind."""
    with log.open("rb") as file:
        numbers = struct.unpack("=17Q", file.read(17 * 8))
    return {name: numbers[1 + kind] for name, kind in KINDS.items()}


@dataclass(eq=False)
class File:
    synced: bytearray = field(default_factory=bytearray)
    later: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, data); None: cut to that length

    def sync(self) -> None:
        _apply(self.synced, self.later)
        self.later.clear()

    def after_failure(self, draw: random.Random) -> bytes:
        content, later = bytearray(self.synced), self.later
        match draw.choice(["nothing", "all", "first", "blocks", "length"]) if later else "nothing":
            case "all":
                _apply(content, later)
            case "first":
                done = draw.randrange(len(later))
                _apply(content, later[:done])
                offset, data = later[done]
                _apply(content, [(offset, None if data is None else data[: draw.randrange(len(data) + 1)])])
            case "blocks":
                for offset, data in later:
                    if data is None:
                        _apply(content, [(offset, None)])
                        continue
                    for start in range(0, len(data), BLOCK):
                        if draw.random() < 0.5:
                            _apply(content, [(offset + start, data[start : start + BLOCK])])
            case "length":
                whole = bytearray(content)
                _apply(whole, later)
                content = bytearray(content[: len(whole)].ljust(len(whole), b"\0"))
        return bytes(content)


def _apply(content: bytearray, writes: list[tuple[int, bytes | None]]) -> None:
    for offset, data in writes:
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        if data is None:
            del content[offset:]
        else:
            content[offset : offset + len(data)] = data


@dataclass(eq=False)
class Folder:
    names: dict[str, Node] = field(default_factory=dict)  # as processes see it
    before: dict[str, Node] = field(default_factory=dict)  # as it was when the disk was opened
    synced: int = 0  # the operation that synced it last


Node = File | Folder


@dataclass(frozen=True)
class Naming:
    """A change of a folder's names: ``old`` is gone, if there was one, and ``new``, if there is one, means ``node``."""

    number: int  # among all operations
    folder: Folder
    old: str | None
    new: str | None
    node: Node


class Disk:
    """A folder whose files were all on the disk when it was opened; then what the log says happened to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inodes: dict[int, Node] = {}  # as they are used now
        self._namings: list[Naming] = []
        self._number = self._synced = 0  # the last operation; the last that synced anything
        self.root = self._opened(folder)

    def _opened(self, path: Path) -> Folder:
        here = Folder()
        self._inodes[path.stat().st_ino] = here
        for entry in path.iterdir():
            node: Node = self._opened(entry) if entry.is_dir() else File(bytearray(entry.read_bytes()))
            here.names[entry.name] = here.before[entry.name] = self._inodes[entry.stat().st_ino] = node
        return here

    def play(self, log: Path) -> None:
        for operation in operations(log):
            self._number += 1
            self._do(operation)

    def _do(self, operation: Operation) -> None:
        kind, inode = operation.kind, operation.inode
        if kind in (WRITE, TRUNCATE, SYNC):
            node = self._inodes[inode]
            if isinstance(node, File) and kind == SYNC:
                node.sync()
            elif isinstance(node, File):
                node.later.append((operation.offset, operation.data if kind == WRITE else None))
            else:
                node.synced = self._number
            self._synced = self._number if kind == SYNC else self._synced
            return
        folder, name = self._place(operation.path)
        if kind in (CREATE, MKDIR):
            self._inodes[inode] = made = File() if kind == CREATE else Folder()
            self._name(folder, None, name, made)
        elif kind == RENAME:
            other, new = self._place(operation.other)
            node = self._inodes[inode]
            if folder.names.get(name) is not node:  # safetensors renames by a system call of its own
                self._name(folder, next(old for old, there in folder.names.items() if there is node), name, node)
            if other is folder:
                self._name(folder, name, new, node)
            else:
                self._name(folder, name, None, node)
                self._name(other, None, new, node)
        else:
            self._name(folder, name, None, folder.names[name])

    def _place(self, path: str) -> tuple[Folder, str]:
        *folders, name = Path(path).relative_to(self.folder).parts
        here = self.root
        for part in folders:
            below = here.names[part]
            assert isinstance(below, Folder)
            here = below
        return here, name

    def _name(self, folder: Folder, old: str | None, new: str | None, node: Node) -> None:
        naming = Naming(self._number, folder, old, new, node)
        self._namings.append(naming)
        _apply_name(folder.names, naming)

    def seen(self) -> dict[str, bytes]:
        """Every file as processes see it."""
        found: dict[str, bytes] = {}

        def look(folder: Folder, path: str) -> None:
            for name, node in folder.names.items():
                if isinstance(node, Folder):
                    look(node, f"{path}{name}/")
                else:
                    content = bytearray(node.synced)
                    _apply(content, node.later)
                    found[path + name] = bytes(content)

        look(self.root, "")
        return found

    def fail(self, draw: random.Random, rules: Rules) -> None:
        """Make the folder what the disk may hold after the power failed."""
        names: dict[Folder, dict[str, Node]] = {}
        kept: dict[Folder, int] = {}
        journal = self._some_of(self._namings, self._synced, draw)
        for naming in self._namings:
            folder = naming.folder
            if folder not in kept:
                own = [other for other in self._namings if other.folder is folder]
                kept[folder] = journal if rules == "ext4" else self._some_of(own, folder.synced, draw)
            if naming.number <= kept[folder]:
                _apply_name(names.setdefault(folder, dict(folder.before)), naming)
        shutil.rmtree(self.folder)
        self._write(self.root, self.folder, names, draw)

    def _some_of(self, namings: list[Naming], synced: int, draw: random.Random) -> int:
        """The operation up to which names have reached the disk."""
        later = [naming.number for naming in namings if naming.number > synced]
        return draw.choice([synced, self._number, draw.choice(later)]) if later else self._number

    def _write(self, folder: Folder, path: Path, names: dict[Folder, dict[str, Node]], draw: random.Random) -> None:
        path.mkdir()
        for name, node in names.get(folder, folder.before).items():
            if isinstance(node, Folder):
                self._write(node, path / name, names, draw)
            else:
                (path / name).write_bytes(node.after_failure(draw))


def _apply_name(names: dict[str, Node], naming: Naming) -> None:
    if naming.old is not None:
        names.pop(naming.old, None)
    if naming.new is not None:
        names[naming.new] = naming.node
