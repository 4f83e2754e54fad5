"""A run on disk: one folder with the configuration, metrics, timings and checkpoints, and one writer at a time."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llm_fed.basics import checksum, documents
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError, UserError, printable
from llm_fed.basics.files import append_file, check_unlinked, cut_file, read_file, remove, sync_folder, write_file
from llm_fed.basics.rng import Secret
from llm_fed.runs import digests, extend, inputs, secrecy
from llm_fed.runs.checkpoint import Checkpoints, rounds_in
from llm_fed.runs.inputs import Contents, translated
from llm_fed.runs.lock import NAME, HeldError, Lock
from llm_fed.runs.reading import FORMAT, REOPENED, saved_config
from llm_fed.runs.records import check_beginning, read_records, recall, time_of_day
from llm_fed.settings import paths
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict, flat, from_dict

# What may differ between the commands that start and continue a run: it changes no number, or (network) decides who is
# late, which no run repeats anyway. `extend` has what may differ although it changes numbers.
_FREE_KEYS = ("checkpoint.", "engine.", "export.", "report.", "track.", "network.", "eval.base", "eval.cross")

SAMPLES = "samples.jsonl"  # sample predictions, see `experiment/finish.py`
BAD_ROWS = "bad_rows.jsonl"  # rows of the data that were left out, see `tasks/collected.py`
CROSS = "cross.json"  # every personal model on every client's examples, see `experiment/cross.py`
EXAMPLES = "test_scores.jsonl"  # the score of each test example, see `experiment/watching.py`
WARNINGS = "warnings.json"  # what is wrong, as in summary.json, see `eval/warning.py`
ENDED = "ended.json"  # after which round a finished run has ended before its last one, and why
CONTINUED = "continued.json"  # from which such round the user has let it go on, although its stop rule ended it
SPLITS = "splits.json"  # in which split each row has been, see `experiment/splits.py`

# What a finished run has handed out, and all that a run writes, in the order in which `fresh` deletes it: a crash in
# between leaves no folder that seems complete.
_RESULTS = ("summary.json", "report.html", SAMPLES, CROSS, EXAMPLES, WARNINGS, "adapters")
WRITTEN = (
    *_RESULTS, REOPENED, "trackers", "environment.json", "start.json", ENDED, CONTINUED, BAD_ROWS, inputs.FILE,
    digests.DELIVERED, "timing.jsonl", digests.FILE, "metrics.jsonl", SPLITS, "network.json", secrecy.FILE,
    "config.yaml", "checkpoints", "needs",
)  # fmt: skip

_PARTIAL = re.compile(r"\..*\.partial")  # what a kill may leave of a file that is written


def _print(text: str) -> None:
    print(f"llm-fed: {printable(text)}", file=sys.stderr)


class Run:
    """The run folder, opened for writing. Use as a context manager: it holds the folder's lock.

    Entering checks the folder and changes nothing in it; `begin` takes it over, once all else is known to be right.

    Args:
        config: its paths become absolute ones, and `base.dtype: auto` what it has meant in a run that is continued.
        fresh: delete what an earlier run left there.
        listen: is given each line of metrics.jsonl as it is written.
        note: is told why it takes a while to get the folder's lock.
        contents: of the files that the configuration names, where they may have been read already.

    Raises:
        UserError: the folder belongs to a run of another configuration, or is no run folder.
        RunError: another process writes to it.

    Attributes:
        before: the configuration that a run which is continued had until now; None: it has not changed.
        changes: what has changed in its data, one line for each time that it went on with others.
        scored_rows: a checksum of the rows that are scored in training; empty where it is not known.
    """

    checkpoints: Checkpoints  # from `begin` on
    digests: digests.Digests  # from `begin` on
    saved: dict[str, Any] | None = None  # the configuration with which the run was begun or continued last
    before: Config | None = None  # the same, where it is continued with another one
    changes: Sequence[str] = ()
    continues = False  # the folder holds a run that goes on
    reached = 0  # the round of its newest checkpoint
    scored_rows: str = ""
    moved: Sequence[str] = ()  # keys of paths under which the same files lie now
    _reopened = False  # the end of a finished run is done again
    _goes_on = False  # a run that has ended before its last round goes on

    def __init__(
        self,
        folder: Path,
        config: Config,
        fresh: bool = False,
        listen: Callable[[Mapping[str, Any]], None] = lambda record: None,
        note: Callable[[str], None] = _print,
        contents: Contents | None = None,
    ):
        folder = folder.absolute()  # another thread may go to another folder meanwhile
        self.folder, self.config, self._listen, self._note = folder, paths.absolute(config), listen, note
        self._fresh, self._lap, self.contents = fresh, time.perf_counter(), contents or Contents()
        self.metrics_file, self._timing_file = folder / "metrics.jsonl", folder / "timing.jsonl"
        try:
            self._is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from error
        self._lock = Lock(folder)

    def __enter__(self) -> Run:
        try:
            with writing(self.folder / NAME):
                self._lock.acquire(self._note)
            self._check()
        except HeldError:
            raise
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Delete a new folder where nothing was begun, and release the lock."""
        if self._is_new and all(path.name.startswith(NAME) for path in self.folder.iterdir()):
            shutil.rmtree(self.folder)
        self._lock.release()

    def _check(self) -> None:
        names = {path.name for path in self.folder.iterdir() if not path.name.startswith(NAME)}
        held = {name for name in names if not _PARTIAL.fullmatch(name)} - {secrecy.FILE}
        if held - {"checkpoints"} and not {"config.yaml", "checkpoints"} <= held:
            raise UserError(
                f"{self.folder} is not a run folder: it holds {min(held - {'checkpoints'})} but not both of "
                "config.yaml and checkpoints; give another --out"
            )
        if names and not self._fresh:
            beside = [*_linked_away(self.folder / "trackers"), *(self.folder / "needs").glob("*")]
            for path in [*(self.folder / name for name in WRITTEN), *beside]:
                check_unlinked(path)
        if "config.yaml" in names and not self._fresh:
            self.saved = saved_config(self.folder)
            self._compare(self.saved)
        if "config.yaml" in names and not self._fresh:  # which may have turned out to hold nothing
            self.continues = True
            self.reached = max(rounds_in(self.folder / "checkpoints"), default=0)

    def begin(self) -> None:
        """Take the folder over: write the configuration, open the checkpoints, delete what `fresh` says, and of a
        finished run that goes on what is no longer true. RunError: the disk is full or cannot be written."""
        secret = self.secret if self.config.privacy.draws else None
        gone: Sequence[str] = () if self.continues else WRITTEN
        if self.continues and self._reopened:  # what it handed out stays until there is something new
            self.remember(REOPENED, {"round": self.reached})
            gone = [ENDED] if self._goes_on else ()
        there = [path.name for path in self.folder.iterdir()]
        for name in [*(name for name in gone if name in there), *filter(_PARTIAL.fullmatch, there)]:
            remove(self.folder / name)
        with writing(self.folder / "checkpoints"):
            self.checkpoints = Checkpoints(self.folder / "checkpoints")
        self.digests = digests.Digests(self.folder / digests.FILE, self._append)
        if secret is not None:
            self._write(secrecy.FILE, f"{secret.key}\n".encode(), private=True)
        self._write("config.yaml", config_text(self.config).encode())
        if self._timing_file.exists():  # a power failure may have left half a line
            with writing(self._timing_file):
                cut_file(self._timing_file, read_file(self._timing_file).rfind(b"\n") + 1)

    def _compare(self, saved: dict[str, Any]) -> None:
        if holds_results(self.folder) and self.config.base.dtype == "auto":  # it means what it has meant before
            self.config = replace(self.config, base=replace(self.config.base, dtype=saved["base"]["dtype"]))
        recorded = inputs.read(self.folder)
        self.moved = translated(saved, recorded, self.config, self.contents)
        before, now = flat(saved), flat(as_dict(self.config))
        if (self.folder / "start.json").exists() and now.get("adapter.start"):
            before["adapter.start"] = now["adapter.start"]  # the adapters there are compared, see `experiment/start.py`
        changes = {
            key: (before.get(key), now.get(key))
            for key in sorted(before.keys() | now.keys())
            if not (paths.same(key, before.get(key), now.get(key)) or key.startswith(_FREE_KEYS))
        }
        if changes and not holds_results(self.folder):
            self._fresh = True  # nothing to continue, and nothing to lose
            return
        revision = self.config.base.revision
        changed = [
            f"{key}: {old!r} -> {new!r}{inputs.words(key, new, revision, recorded, self.contents)}"
            for key, (old, new) in changes.items()
            if key not in extend.MAY_CHANGE
        ]
        if changed:
            free = (f"{key}*" if key.endswith(".") else key for key in _FREE_KEYS)
            raise UserError(
                f"{self.folder} holds a run of another configuration ({'; '.join(changed)}). Give the same "
                "configuration to continue it, another --out, or --fresh to start again. Only "
                f"{', '.join((*extend.MAY_CHANGE, *free))} may change."
            )
        if changes:
            ended = self.recall(ENDED)
            extend.check(self.folder, changes, ended, self.config.eval.of_last)
            self.before, self._reopened = from_dict(saved), extend.reopens(changes, ended)
            self._goes_on = ended is not None and extend.goes_on(changes, ended)

    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json where the run is finished, and what is asked of it has not changed."""
        is_open = not self.continues or self._reopened or (self.folder / REOPENED).exists()
        return None if is_open else self.recall("summary.json")

    @cached_property
    def secret(self) -> Secret:
        """What hides data is drawn from it; `begin` writes it down. One that lies in a folder without a run is used.
        RunError: it is damaged, or of a run that goes on it is not there."""
        if not self.config.privacy.draws:
            return Secret.fresh()  # nothing is drawn from it
        if self.continues and holds_results(self.folder) and (why := secrecy.missing(self.folder)):
            raise RunError(f"{why}; put the file back, or start again with --fresh")
        replaced = not self.continues and (self.folder / "config.yaml").exists()
        return (None if replaced else secrecy.read(self.folder)) or Secret.fresh()

    @property
    def ended(self) -> dict[str, Any] | None:
        """After which `round` this run has ended before its last one, and `why`; None where it has not, or goes on."""
        return None if self._fresh or self._goes_on else self.recall(ENDED)

    @property
    def continued(self) -> int:
        """The round from which the user has let the run go on although its stop rule had ended it; 0: none."""
        return int((self.recall(CONTINUED) or {"round": 0})["round"])

    def go_on(self) -> None:
        """Let a finished run that has ended before its last round go on, after `begin`."""
        if (ended := self.ended) is None:
            return
        if extend.by_rule(ended):  # the rule counts anew, while a run that the user ended is as if it had not been
            self.remember(CONTINUED, {"round": ended["round"]})
        self._reopened = self._goes_on = True

    def log(self, record: Mapping[str, Json]) -> None:
        """Append one line to metrics.jsonl. It holds nothing that differs between equal runs."""
        self._append(self.metrics_file, record)
        self._listen(record)

    def say(self, text: str) -> None:
        """One line for whoever watches the run; in no file."""
        self._note(text)

    def lap(self, part: str | None = None) -> None:
        """Seconds since the run was opened, or since the last lap, go into timing.jsonl as this part of the run; None:
        they are not kept, as what they went to has lines of its own."""
        now = time.perf_counter()
        if part is not None:
            seconds = round(now - self._lap, 4)
            self._append(self._timing_file, {"seconds": seconds, "parts": {part: seconds}, "ended": time_of_day()})
        self._lap = now

    def log_timing(self, record: Mapping[str, Json]) -> None:
        """Append one line to timing.jsonl."""
        self._append(self._timing_file, record)

    def _append(self, path: Path, record: Mapping[str, Json]) -> None:
        self._lock.check()
        with writing(path):
            append_file(path, json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def mark(self) -> int:
        """Bring metrics.jsonl safely to the disk; its length in bytes, which a checkpoint remembers."""
        self._lock.check()
        if not self.metrics_file.exists():
            return 0
        with writing(self.metrics_file):
            sync_folder(self.metrics_file)
            return self.metrics_file.stat().st_size

    def rewind(self, saved: Mapping[str, Any] | None = None) -> None:
        """Cut metrics.jsonl and digests.jsonl back to what they held at a checkpoint: later lines are written again.
        RunError: somebody else changed it, see `records.check_beginning`. `saved`: what the checkpoint knows of them;
        None: back to nothing."""
        saved = saved or {"metrics": 0}
        mark = saved["metrics"]
        if check_beginning(self.metrics_file, mark, saved.get("metrics_sha256", "")) > mark:
            cut_file(self.metrics_file, mark)
        self.digests.rewind(saved.get("digests", 0))

    def records(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        return read_records(self.metrics_file)

    def remember(self, name: str, value: Mapping[str, Json]) -> None:
        """Write a small JSON file of the folder with its checksum, whole or not at all. RunError: the disk is full."""
        self._write(name, _as_file(value))

    def conclude(self, summary: Mapping[str, Json]) -> None:
        """Take down the digests of all that the run hands out, and write summary.json, the last file: a folder that has
        it is complete. RunError if the disk is full."""
        data, now = _as_file(summary), digests.delivered(self.folder)
        now = now | {"summary.json": digests.digest(data)}
        now.pop(REOPENED, None)
        self.remember(digests.DELIVERED, {"files": now})
        self._write("summary.json", data)
        self.forget(REOPENED)

    def write_lines(self, name: str, lines: Iterable[Mapping[str, Json]]) -> None:
        """Write a JSONL file of the run folder, whole or not at all; RunError if the disk is full."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        self._write(name, text.encode(errors="replace"))  # a text may hold half of a character

    def forget(self, name: str) -> None:
        """Delete a file of the run folder that an earlier end of the run may have left."""
        (self.folder / name).unlink(missing_ok=True)

    def _write(self, name: str, data: bytes, *, private: bool = False) -> None:
        self._lock.check()
        with writing(self.folder / name):
            write_file(self.folder / name, data, private=private)

    def recall(self, name: str) -> dict[str, Any] | None:
        """What `remember` wrote, or None; RunError if it is damaged."""
        return recall(self.folder / name)


def config_text(config: Config) -> str:
    """The content of a run folder's config.yaml."""
    return checksum.commented(documents.dump({"format": FORMAT, **as_dict(config)}))


def take_down(folder: Path, changed: Mapping[str, str]) -> None:
    """Replace in delivered.json the digests of files that were written anew after the end of a run."""
    path = folder / digests.DELIVERED
    with suppress(RunError):  # an audit tells that it is damaged
        if known := recall(path):
            write_file(path, _as_file({"files": {**known["files"], **changed}}))


def _as_file(value: Mapping[str, Json]) -> bytes:
    text = json.dumps(checksum.added(value), indent=1, ensure_ascii=False)
    return text.encode(errors="backslashreplace")  # JSON's own escape for half of a character


def _linked_away(trackers: Path) -> Iterator[Path]:
    """What lies in the folder of trackers, without links from there into it, as Weights & Biases leaves some."""
    for path in trackers.rglob("*"):
        if not (path.is_symlink() and path.resolve().is_relative_to(trackers.resolve())):
            yield path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, a RunError says that a path cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "Make room" if full else "Let this user write there, or give another --out"
        raise RunError(
            f"cannot write {path}: {error.strerror or error}. {what}, then give the same command to continue."
        ) from error


def look(folder: Path, config: Config, fresh: bool, note: Callable[[str], None] = _print) -> tuple[int, bool, Config]:
    """(the round after which a run in this folder would go on, whether it is complete, its configuration there).
    Nothing there is changed. UserError, RunError: as entering a `Run`."""
    if not folder.exists():
        return 0, False, config
    lock = folder / NAME
    had_lock = lock.exists()
    try:
        with Run(folder, config, fresh, note=note) as run:
            return run.reached, run.summary() is not None, run.config
    finally:
        if not had_lock:
            lock.unlink(missing_ok=True)


def holds_results(folder: Path) -> bool:
    """Whether a round has ended in a run folder, or in one of a run that it needs; before that all may be refused."""
    names = ("metrics.jsonl", "summary.json", "checkpoints/round-*")
    return any(
        path.is_dir() or (path.is_file() and path.stat().st_size > 0) for name in names for path in folder.rglob(name)
    )


def log_failure(run: Run, round: int, client: str, error: Exception) -> None:
    log_event(run, round, client, "client failed", f"{type(error).__name__}: {error}")


def log_event(run: Run, round: int, client: str, event: str, reason: str) -> None:
    """A line of metrics.jsonl for what went wrong with one client in one round."""
    run.log({"kind": "event", "round": round, "client": client, "event": event, "reason": reason})
