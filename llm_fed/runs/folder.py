"""A run on disk: one folder with the configuration, metrics, timings and checkpoints, and one writer at a time."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from llm_fed import checksum, datapath, paths
from llm_fed.config import Config
from llm_fed.configfile import as_dict, flat, from_dict
from llm_fed.errors import RunError, UserError
from llm_fed.files import write_file
from llm_fed.runs import digests, extend
from llm_fed.runs.checkpoint import Checkpoints, rounds_in
from llm_fed.runs.reading import saved_config
from llm_fed.runs.records import check_beginning, read_records, time_of_day

# What may differ between the commands that start and continue a run: it changes no number, or (network) decides who is
# late, which no run repeats anyway. `extend` has what may differ although it changes numbers.
_FREE_KEYS = ("checkpoint.", "export.", "report.", "track.", "network.", "eval.base")

SAMPLES = "samples.jsonl"  # sample predictions, see `experiment/samples.py`
EXPERTS = "experts.jsonl"  # how much each expert counts, see `experiment/experts.py`
CROSS = "cross.json"  # every personal model on every client's examples, see `commands/cross.py`

# What a run writes, in the order in which `fresh` deletes it: a crash in between leaves no folder that seems complete.
_WRITTEN = (
    "summary.json", "report.html", SAMPLES, EXPERTS, CROSS, "adapters", "trackers", "environment.json", "start.json",
    "timing.jsonl", digests.FILE, "metrics.jsonl", "network.json", "config.yaml", "checkpoints", "needs",
)  # fmt: skip

_RESULTS = _WRITTEN[:6]  # what a finished run has handed out


class Run:
    """The run folder, opened for writing. Use as a context manager: it holds the folder's lock.

    Entering checks the folder and changes nothing in it; `begin` takes it over, once all else is known to be right.

    Args:
        config: its paths become absolute ones, and a `base.dtype: auto` what the run that is continued computes in.
        fresh: delete what an earlier run left there.
        listen: is given each line of metrics.jsonl as it is written.

    Raises:
        UserError: the folder belongs to a run of another configuration, or is no run folder.
        RunError: another process writes to it.

    Attributes:
        before: the configuration that a run which is continued had until now; None: it has not changed.
    """

    checkpoints: Checkpoints  # from `begin` on
    digests: digests.Digests  # from `begin` on
    saved: dict[str, Any] | None = None  # the configuration with which the run was begun or continued last
    before: Config | None = None  # the same, where it is continued with another one
    _reopened = False  # a finished run goes on

    def __init__(
        self,
        folder: Path,
        config: Config,
        fresh: bool = False,
        listen: Callable[[Mapping[str, Any]], None] = lambda record: None,
    ):
        self.folder, self.config, self._listen = folder, paths.absolute(config), listen
        self._fresh, self._lap = fresh, time.perf_counter()
        try:
            self._is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from error
        self._lock = FileLock(folder / ".lock")

    def __enter__(self) -> Run:
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise RunError(
                f"another process is writing to {self.folder}; wait for it, or give another --out"
            ) from error
        try:
            self._check()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_new and [path.name for path in self.folder.iterdir()] == [".lock"]:  # nothing was begun
            shutil.rmtree(self.folder)
        self._lock.release()

    def _check(self) -> None:
        names = {path.name for path in self.folder.iterdir()} - {".lock", ".config.yaml.partial"}
        if names - {"checkpoints"} and not {"config.yaml", "checkpoints"} <= names:
            raise UserError(
                f"{self.folder} is not a run folder: it holds {min(names - {'checkpoints'})} but not both of "
                "config.yaml and checkpoints; give another --out"
            )
        if not self._fresh and (self.folder / "config.yaml").exists():
            self.saved = saved_config(self.folder)
            self._compare(self.saved)

    @property
    def reached(self) -> int:
        """The round of the newest checkpoint from which this run will continue; 0: it begins."""
        is_new = self._fresh or not (self.folder / "config.yaml").exists()
        return 0 if is_new else max(rounds_in(self.folder / "checkpoints"), default=0)

    def begin(self) -> None:
        """Take the folder over: write the configuration, open the checkpoints, delete what `fresh` says, and of a
        finished run that goes on what is no longer true.

        Raises:
            RunError: the disk is full or cannot be written.
        """
        if not self.continues:
            self._delete(_WRITTEN)
        elif self._reopened:
            self._delete(_RESULTS)
        limit = self.config.checkpoint.memory_limit * 2**30
        try:
            self.checkpoints = Checkpoints(self.folder / "checkpoints", limit)
        except OSError as error:
            raise _unwritable(self.folder / "checkpoints", error) from error
        if self.before is not None:
            self._keep_search(self.before)
        self.digests = digests.Digests(self.folder, self._append)
        text = yaml.safe_dump(as_dict(self.config), sort_keys=False)
        self._write("config.yaml", checksum.commented(text).encode())
        if self._timing_file.exists():
            data = self._timing_file.read_bytes()
            os.truncate(self._timing_file, data.rfind(b"\n") + 1)  # a power failure may have left half a line

    def _delete(self, names: Iterable[str]) -> None:
        for path in (self.folder / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _keep_search(self, before: Config) -> None:
        """Write into a checkpoint of an older version how the best round was sought until now, which config.yaml alone
        has said."""
        saved = self.checkpoints.latest()
        if saved is not None and "search" not in saved.state:
            self.checkpoints.save(saved.round, {**saved.state, "search": extend.search(before)}, saved.rows)

    def _compare(self, saved: dict[str, Any]) -> None:
        if self.config.base.dtype == "auto" and holds_results(self.folder):
            self.config = replace(self.config, base=replace(self.config.base, dtype=saved["base"]["dtype"]))
        before, now = flat(saved), flat(as_dict(self.config))
        changes = {
            key: (before.get(key), now.get(key))
            for key in sorted(before.keys() | now.keys())
            if not (paths.same(key, before.get(key), now.get(key)) or key.startswith(_FREE_KEYS))
            and not datapath.same(key, before.get(key), now.get(key))
        }
        renamed = _renamed(changes, saved, self.config)
        changes = {key: values for key, values in changes.items() if key not in renamed}
        if changes and not holds_results(self.folder):
            self._fresh = True  # nothing to continue, and nothing to lose
            return
        changed = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items() if key not in extend.MAY_CHANGE]
        if changed:
            free = (f"{key}*" if key.endswith(".") else key for key in _FREE_KEYS)
            raise UserError(
                f"{self.folder} holds a run of another configuration ({'; '.join(changed)}). Give the same "
                "configuration to continue it, another --out, or --fresh to start again. Only "
                f"{', '.join((*extend.MAY_CHANGE, *free))} may change."
            )
        if changes:
            extend.check(self.folder, changes)
            self.before, self._reopened = from_dict(saved), extend.reopens(changes)

    @property
    def continues(self) -> bool:
        """Whether the folder holds a run that goes on."""
        return not self._fresh and (self.folder / "config.yaml").exists()

    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json where the run is finished, and what is asked of it has not changed."""
        return None if self._fresh or self._reopened else self.recall("summary.json")

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl. It holds nothing that differs between equal runs."""
        self._append(self.metrics_file, record)
        self._listen(record)

    def lap(self, part: str | None = None) -> None:
        """Seconds since the run was opened, or since the last lap, go into timing.jsonl as this part of the run; None:
        they are not kept, as what they went to has lines of its own."""
        now = time.perf_counter()
        if part is not None:
            seconds = round(now - self._lap, 4)
            self._append(self._timing_file, {"seconds": seconds, "parts": {part: seconds}, "ended": time_of_day()})
        self._lap = now

    def log_timing(self, record: Mapping[str, Any]) -> None:
        """Append one line to timing.jsonl."""
        self._append(self._timing_file, record)

    @property
    def _timing_file(self) -> Path:
        return self.folder / "timing.jsonl"

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        try:
            with open(path, "ab") as file:
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise _unwritable(path, error) from error

    def mark(self) -> int:
        """Bring metrics.jsonl safely to the disk; its length in bytes, which a checkpoint remembers."""
        if not self.metrics_file.exists():
            return 0
        try:
            with open(self.metrics_file, "rb") as file:
                os.fsync(file.fileno())
                return file.seek(0, os.SEEK_END)
        except OSError as error:
            raise _unwritable(self.metrics_file, error) from error

    def rewind(self, saved: Mapping[str, Any] | None = None) -> None:
        """Cut metrics.jsonl and digests.jsonl back to what they held at a checkpoint: later lines are written again.

        Args:
            saved: what the checkpoint knows of them; None: back to nothing.

        Raises:
            RunError: somebody else changed it, see `records.check_beginning`.
        """
        saved = saved or {"metrics": 0}
        mark = saved["metrics"]
        if check_beginning(self.metrics_file, mark, saved.get("metrics_sha256")) > mark:
            os.truncate(self.metrics_file, mark)
        self.digests.rewind(saved.get("digests", 0))

    def records(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        return read_records(self.metrics_file)

    def remember(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a small JSON file of the run folder with its checksum, whole or not at all; RunError if the disk is
        full."""
        self._write(name, json.dumps(checksum.added(value), indent=1, ensure_ascii=False).encode())

    def write_lines(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write a JSONL file of the run folder, whole or not at all; RunError if the disk is full."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        self._write(name, text.encode(errors="replace"))  # a text may hold half of a character

    def forget(self, name: str) -> None:
        """Delete a file of the run folder that an earlier end of the run may have left."""
        (self.folder / name).unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        try:
            write_file(self.folder / name, data)
        except OSError as error:
            raise _unwritable(self.folder / name, error) from error

    def recall(self, name: str) -> dict[str, Any] | None:
        """What `remember` wrote, or None; RunError if it is damaged."""
        path = self.folder / name
        try:
            return checksum.checked(json.loads(path.read_bytes())) if path.exists() else None
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is damaged: {error}; start again with --fresh") from error


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"cannot write {path}: {error.strerror or error}. Make room, then give the same command to continue."
    )


def _renamed(changes: extend.Changes, saved: Mapping[str, Any], now: Config) -> set[str]:
    """The keys of `changes` that say the same in other words: a method or a task by its entry point and by its path."""
    method = {key for key in changes if key.startswith("method.")}
    named = {key for key in ("task.name", "task.server.name") if all(changes.get(key, (None,)))}
    if not method and not named:
        return set()
    from llm_fed import methods, tasks  # all of them, and rarely needed

    same = set()
    with suppress(UserError):  # what cannot be found any more differs as its text does
        if method and methods.canonical(saved["method"]) == methods.canonical(now.method):
            same |= method
    for key in named:
        with suppress(UserError):
            before, after = (tasks.find(name, key) for name in changes[key])
            same |= {key} if before is after else set()
    return same


def look(folder: Path, config: Config, fresh: bool) -> tuple[int, bool]:
    """(the round after which a run in this folder would go on, whether it is complete); nothing there is changed.

    Raises:
        UserError, RunError: as entering a `Run`.
    """
    if not folder.exists():
        return 0, False
    lock = folder / ".lock"
    had_lock = lock.exists()
    try:
        with Run(folder, config, fresh) as run:
            return run.reached, run.summary() is not None
    finally:
        if not had_lock:
            lock.unlink(missing_ok=True)


def holds_results(folder: Path) -> bool:
    """Whether a round has ended in a run folder, or in one of a run that it needs; before that all may be refused."""
    names = ("metrics.jsonl", "summary.json", "checkpoints/round-*")
    return any(path.is_dir() or path.stat().st_size > 0 for name in names for path in folder.rglob(name))


def log_failure(run: Run, round: int, client: str, error: Exception) -> None:
    log_event(run, round, client, "client failed", f"{type(error).__name__}: {error}")


def log_event(run: Run, round: int, client: str, event: str, reason: str) -> None:
    """A line of metrics.jsonl for what went wrong with one client in one round."""
    run.log({"kind": "event", "round": round, "client": client, "event": event, "reason": reason})


def rounded(value: float) -> float:
    """A figure for metrics.jsonl: six significant digits are enough to read and survive a change of the last bit."""
    return float(f"{value:.6g}")
