"""Trials, one after the other: a command is struck down, once or several times, then left in peace to its end; what it
came to is compared with what the undisturbed command came to.  Which case and which faults follows from the number."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import struck_command
from death_cases import Case, cases, make_inputs
from death_table import TRIALS
from failing_disk import KINDS, Disk, counts
from fault_layer import Fault
from open_clip.tokenizer import SimpleTokenizer
from struck_command import Ended, Struck

from fullbatch.cli import flags
from fullbatch.config.run import RunConfig
from fullbatch.selection.spectral import thread_pools
from tests.training.small import TOWERS

NAMES = ("create", "mkdir", "sync", "rename", "unlink", "rmdir")  # without writes, which are most of all operations
FAULTS = ("SIGKILL at an operation", "SIGKILL at a moment", "ENOSPC", "EIO", "power (ext4)", "power (POSIX)", "clock")
PLANNER, WORKER = "planner killed", "data worker killed"
REFUSALS = ("ENOSPC", "EIO")
SPARED = (*REFUSALS, PLANNER, WORKER, "")  # faults that leave the command itself alive, to end by its own words


@dataclass(frozen=True)
class Plain:
    """A case undisturbed."""

    outcome: Mapping[str, str]
    operations: Mapping[str, int]  # of each kind
    seconds: float


class Campaign:
    def __init__(self, work: Path, seed: int, only: list[str]) -> None:
        self.work, self.seed = work.resolve(), seed
        self.folder, self.beside = self.work / "disk", self.work / "beside"
        self.beside.mkdir(parents=True, exist_ok=True)
        inputs = self.work / "inputs"
        os.environ["FULLBATCH_CACHE"] = str(self.work / "cache")
        if not inputs.is_dir():
            in_child(lambda: make_inputs(inputs))
        struck_command.adopt_orphans()
        remember()
        self.cases = [case for case in cases(inputs, self.folder) if not only or case.name in only]
        self.trials = self.work / TRIALS
        self.plain: dict[str, Plain] = {}

    def go_on(self, until: int) -> None:
        """From the trial after the last one that was written down."""
        done = len(self.trials.read_text().splitlines()) if self.trials.is_file() else 0
        for number in range(done, until):
            result = self.one(number)
            with self.trials.open("a") as file:
                file.write(json.dumps(result) + "\n")
            bad = {key: value for key, value in result.items() if key in ("wrong", "deaths") and value}
            print(f"{number}: {result['case']}, {result['fault']}: {bad}", flush=True)

    # -- one trial ----------------------------------------------------------------------------------------------------

    def one(self, number: int) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} {number}")
        case = self.cases[number % len(self.cases)]
        plain, kinds = self._plain(case), list(FAULTS)
        if case.name == "train, spectral plans":
            kinds += [PLANNER, PLANNER]
        if case.name == "train, 2 data workers":
            kinds += [WORKER, WORKER]
        kind = draw.choice(kinds)
        self._clear()
        deaths, wrong, command, finished = 0, list[str](), list(case.command), dict[str, int]()
        self.blocked: list[float] = []
        rounds = draw.randint(1, case.deaths)
        for _ in range(rounds):
            fault, struck = self._drawn(kind, plain, draw, rounds if draw.random() < 0.7 else 1)
            ended = self._run(command, fault, struck, kind, draw)
            wrong += self._complaints(ended, kind, finished)
            deaths += ended.status != 0
            if ended.status == 0:
                break
            command = self._next(case, ended)
        else:
            ended = self._run(command, Fault(), Struck(), "", draw)
            wrong += self._complaints(ended, "", finished)
        if ended.status != 0:
            wrong.append(f"would not go on: {ended.said.strip()[-400:]}")
        else:
            wrong += self._divergence(case, plain)
        result = {"number": number, "case": case.name, "fault": kind, "deaths": deaths, "wrong": wrong}
        if wrong:
            kept = self.work / "kept" / f"{number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self.folder, kept)
            shutil.copy(self.beside / "said.txt", kept)
        return result | {"blocked": self.blocked}

    def _plain(self, case: Case) -> Plain:
        """Undisturbed; kept from an earlier command."""
        kept = self.work / "undisturbed" / f"{case.name}.json"
        if not kept.is_file():
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(asdict(self._undisturbed(case))))
            shutil.copy(self.beside / "modules.txt", kept.with_suffix(".txt"))
        if case.name not in self.plain:
            import_all(kept.with_suffix(".txt").read_text().split())
            self.plain[case.name] = Plain(**json.loads(kept.read_text()))
        return self.plain[case.name]

    def _undisturbed(self, case: Case) -> Plain:
        """Twice: a case that differs from itself would tell nothing."""
        found = []
        for _ in range(2):
            self._clear()
            before = Disk(self.folder)
            ended = struck_command.run(list(case.command), Fault(), Struck(), self.folder, self.beside)
            if ended.status:
                raise RuntimeError(f"{case.name} fails undisturbed:\n{ended.said}")
            import_all((self.beside / "modules.txt").read_text().split())
            before.play(self.beside / "log")
            here = {str(path.relative_to(self.folder)): path.read_bytes() for path in _files(self.folder)}
            if before.seen() != here:
                odd = [name for name in here.keys() | before.seen().keys() if here.get(name) != before.seen().get(name)]
                raise RuntimeError(f"{case.name}: the log does not give these files: {odd}")
            found.append(Plain(case.outcome(self.folder), counts(self.beside / "log"), ended.seconds))
        if found[0].outcome != found[1].outcome:
            raise RuntimeError(f"{case.name} differs from itself: {_differences(found[0].outcome, found[1].outcome)}")
        print(f"{case.name}: {found[1].seconds:.1f} s, {sum(found[1].operations.values()):,} operations", flush=True)
        return found[1]

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        (self.beside / "events.jsonl").unlink(missing_ok=True)

    def _drawn(self, kind: str, plain: Plain, draw: random.Random, rounds: int) -> tuple[Fault, Struck]:
        """In the first of so many parts of the command: so that those who go on are struck as well."""

        def place(names: Sequence[str]) -> int:
            return draw.randint(1, max(1, sum(plain.operations[name] for name in names) // rounds))

        some = draw.choice([tuple(KINDS), NAMES, ("sync", "rename")])
        at, after, seconds = place(some), draw.random() < 0.5, 0.9 * plain.seconds / rounds
        match kind:
            case "SIGKILL at an operation":
                return Fault("kill", at, some, after=after), Struck()
            case "SIGKILL at a moment":
                return Fault(), Struck(after=draw.uniform(0.05, seconds))
            case "ENOSPC":
                room = ("create", "mkdir", "write")  # what needs some
                return Fault("refuse", place(room), room, "ENOSPC", lasting=draw.random() < 0.7), Struck()
            case "EIO":
                some = ("write", "sync", "rename") if draw.random() < 0.5 else ("sync", "rename")
                return Fault("refuse", place(some), some, "EIO", lasting=draw.random() < 0.3), Struck()
            case "clock":
                jump = draw.choice([-1, 1]) * draw.randint(60, 72 * 3600)
                return Fault("clock", at, some, jump=jump), Struck(after=draw.uniform(0.3, 1.0) * seconds)
            case _ if kind == PLANNER:
                return Fault(), Struck(planner=draw.randint(1, 8))
            case _ if kind == WORKER:
                return Fault(), Struck(worker=draw.randint(1, 16))
        return Fault("power", at, some, after=after), Struck()

    def _run(self, command: list[str], fault: Fault, struck: Struck, kind: str, draw: random.Random) -> Ended:
        disk = Disk(self.folder) if fault.kind == "power" else None
        ended = struck_command.run(command, fault, struck, self.folder, self.beside)
        if disk is not None and ended.status:
            disk.play(self.beside / "log")
            disk.fail(draw, "ext4" if "ext4" in kind else "posix")
        return ended

    def _next(self, case: Case, ended: Ended) -> list[str]:
        """The command that was printed, if one was; else the same again."""
        printed = re.findall(r"fullbatch ((?:train|finetune|compare|search) --resume [^`\n]+)", ended.said)
        given = shlex.split(printed[-1].rstrip(".")) if printed else []
        if given and "FOLDER" not in given:
            return given
        return [*case.command, *case.again]

    def _complaints(self, ended: Ended, kind: str, finished: dict[str, int]) -> list[str]:
        """What must not be, whatever went wrong; ``finished``: what was finished before, and is added to."""
        wrong = []
        if "Traceback (most recent call last)" in ended.said:
            wrong.append(f"traceback: {ended.said[-1500:]}")
        if ended.hung:
            wrong.append("hung")
        message = ended.said[max(ended.said.rfind("fullbatch: "), ended.said.rfind(" failed: ")) :]
        if ended.status > 0 and len(message) < 2:
            wrong.append(f"ended without a word: {ended.said[-300:]}")
        elif ended.status > 0 and kind in REFUSALS and str(self.folder) not in message:
            wrong.append(f"names no file: {ended.said[-300:]}")
        if ended.status < 0 and not ended.hung and (ended.status != -signal.SIGKILL or kind in SPARED):
            wrong.append(f"crashed: signal {-ended.status}: {ended.said[-300:]}")
        path = self.beside / "events.jsonl"
        for event in map(json.loads, path.read_text().splitlines()) if path.is_file() else ():
            known = finished.get(event.get("of", ""), 0)
            if "begins" in event and event["begins"] < known:
                wrong.append(f"lost: {event['of']} begins at {event['begins']}, and {known} were saved")
            if "blocked" in event:
                self.blocked.append(round(event["blocked"], 2))
            if "saved" in event:
                finished[event["of"]] = max(known, event["saved"])
            if event.get("finished") == "done":
                finished[event["of"]] = 10**9
        path.unlink(missing_ok=True)
        return wrong

    def _divergence(self, case: Case, plain: Plain) -> list[str]:
        try:
            outcome = case.outcome(self.folder)
        except Exception as error:
            return [f"divergent: {type(error).__name__}: {error}"]
        odd = _differences(plain.outcome, outcome)
        return [f"divergent: {odd}"] if odd else []


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """A worker that loses its parent saves once more: of checkpoints that are neither the last nor the best, and of
    plans that none of them needs any more, those count that both have."""
    names = one.keys() | other.keys()
    names = {name for name in names if (name in one and name in other) or not re.search(r"\bplan \d|\bstep-\d", name)}
    return sorted(name for name in names if one.get(name) != other.get(name))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def remember() -> None:
    """Work out once what would be most of a trial's time: the few flags of these commands, and CLIP's vocabulary."""

    def few(base: RunConfig, words: Sequence[str], *rest: object) -> RunConfig:
        given = dict(zip(words[::2], words[1::2], strict=True))
        runs, name = given.get("--runs", base.run.runs), given.get("--name", base.run.name)
        return replace(base, run=replace(base.run, runs=runs, name=name))

    struck_command.replace_in(flags, config_from_flags=few)
    vocabulary, known = SimpleTokenizer.__init__, SimpleTokenizer(context_length=TOWERS["text_cfg"]["context_length"])

    def begin(self: Any, **given: Any) -> None:
        if given == {"context_length": known.context_length}:
            self.__dict__.update(known.__dict__)
        else:
            vocabulary(self, **given)

    SimpleTokenizer.__init__ = begin
    thread_pools()  # a planner imports scikit-learn


def import_all(modules: list[str]) -> None:
    """What a command has imported, so that the next need not."""
    for module in modules:
        if module not in sys.modules:
            with suppress(Exception):
                importlib.import_module(module)


def in_child(work: Callable[[], object]) -> None:
    """So that this process starts no thread, and can be forked."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("what the trials need could not be made")
