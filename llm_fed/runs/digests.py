"""digests.jsonl: while a run goes on, a chain of digests of what its clients were sent, what came in, and what the
server made of it. `llm-fed audit` compares a replay with it.

A line holds the digest of the line before it, so that none can be changed alone. All digests are SHA-256 of packed
messages (`wire.pack`), in hexadecimal digits:

    begin   round, state                                 before the first round that is recorded
    round   round, sent, uploads, memory, state, due     after each round; whether it was to be scored
    end     round, adapters                              what was exported: by file

`sent`, `uploads` and `memory` are by client; `memory` is of those who were asked, and of the server where it has one.
Each line says as `metrics` how long metrics.jsonl was, and the digest of what was added to it since the line before.

delivered.json has the digests of all other files that a finished run hands out, by file. Some of them, such as
timing.jsonl, are not the same in equal runs, while digests.jsonl is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_fed.basics.documents import Json, load_json
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import cut_file, read_file, sync_folder
from llm_fed.runs import secrecy, shapes
from llm_fed.runs.records import check_beginning
from llm_fed.runs.rows import Memory
from llm_fed.state.wire import Message, pack

FILE = "digests.jsonl"
DELIVERED = "delivered.json"
_APART = {FILE, DELIVERED, "metrics.jsonl", secrecy.FILE}  # not in delivered.json
_OTHERS = ("trackers", "needs")  # logs of other programs, and runs with digests of their own: only that they are there
_PASSING = re.compile(r"\.lock(\.\d+|\.holder|\.lease)?|\..*\.(partial|replaced)")  # locks, and what a kill may leave
Write = Callable[[Path, Mapping[str, Json]], None]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of_memory(memory: Memory) -> str:
    """The digest of all that a site remembers; its rows are hashed once, by whoever comes first."""
    return digest(json.dumps(sorted((key, row.digest) for key, row in memory.rows.items())).encode())


def of_files(folder: Path) -> dict[str, str]:
    """By path below a run folder the digests of the weights that it has exported."""
    files = sorted((folder / "adapters").glob("[!.]*/**/*.safetensors"))
    return {str(path.relative_to(folder)): of_file(path) for path in files}


def of_file(path: Path) -> str:
    """The digest of what a file holds; of what is no file, or cannot be read, a word for that."""
    try:
        return digest(read_file(path))
    except OSError as error:
        return f"unreadable: {error.strerror}"


def delivered(folder: Path) -> dict[str, str]:
    """By path below a run folder the digests of all that it hands out, and of its checkpoints' manifests, which have
    those of what lies beside them."""
    found = {name: "has digests of its own, or none" for name in _OTHERS if (folder / name).exists()}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        apart = parts[0] in {*_APART, *_OTHERS} or any(map(_PASSING.fullmatch, parts))
        if not (apart or path.is_dir()):
            in_manifest = parts[0] == "checkpoints" and path.name != "manifest.json"
            found["/".join(parts)] = "in the manifest" if in_manifest else of_file(path)
    return found


@dataclass
class Digests:
    """Writes the chain of one run."""

    path: Path  # FILE of its folder
    write: Write  # appends a line to a file
    _sent: dict[str, str] = field(default_factory=dict)
    _last: dict[str, Any] = field(default_factory=dict)  # the line before, since `rewind`

    def mark(self) -> int:
        """Bring the file safely to the disk; its length in bytes."""
        if not self.path.exists():
            return 0
        sync_folder(self.path)
        return self.path.stat().st_size

    def rewind(self, mark: int) -> None:
        """Cut the file back to what it held at a checkpoint; 0 where that is of a version that kept none. RunError: the
        file is shorter than it was, or damaged (somebody else changed it)."""
        self._last = {}
        if not check_beginning(self.path, mark):
            return
        cut_file(self.path, mark)
        try:
            self._last = next(reversed(_lines(read_file(self.path))), {})
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.path} is damaged: {error}; start again with --fresh") from error

    def begin(self, round: int, state: Message) -> None:
        """Write the first line, unless there is one."""
        if not self._last:
            self._append({"kind": "begin", "round": round, "state": digest(pack(state))})

    def sent(self, messages: Mapping[str, bytes]) -> None:
        """Take down what the clients of this round are sent; many are sent the same bytes, which are hashed once."""
        digests = {key: digest(data) for key, data in {id(data): data for data in messages.values()}.items()}
        self._sent = {client: digests[id(data)] for client, data in messages.items()}

    @property
    def requested(self) -> Sequence[str]:
        """Who was sent something in this round."""
        return list(self._sent)

    def round(
        self, round: int, uploads: Mapping[str, str], memories: Mapping[str, Memory], state: Message, *, due: bool
    ) -> None:
        """Write a round's line. `memories`: of who was asked, and of the server. `due`: whether it was to be scored."""
        who = {"sent": self._sent, "uploads": uploads, "memory": {id: of_memory(own) for id, own in memories.items()}}
        self._append({"kind": "round", "round": round, **who, "state": digest(pack(state)), "due": due})
        self._sent = {}

    def end(self, round: int, folder: Path) -> None:
        self._append({"kind": "end", "round": round, "adapters": of_files(folder)})

    def _append(self, line: Mapping[str, Json]) -> None:
        start, _ = self._last.get("metrics", (0, ""))
        metrics = self.path.with_name("metrics.jsonl")
        added = read_file(metrics, start) if metrics.exists() else b""
        line = {**line, "metrics": [start + len(added), digest(added)]}
        self._last = {**line, "chain": _link(self._last.get("chain", ""), line)}
        self.write(self.path, self._last)


@dataclass(frozen=True)
class Chain:
    """digests.jsonl as it was read."""

    lines: list[dict[str, Any]]
    flaws: list[tuple[int, str]]  # (round, what is wrong) with the chain itself or with metrics.jsonl
    digest: str = ""  # of the file

    @property
    def rounds(self) -> dict[int, dict[str, Any]]:
        return {line["round"]: line for line in self.lines if line["kind"] == "round"}

    @property
    def states(self) -> dict[int, str]:
        """The digest of the server's state after each round that is recorded."""
        return {line["round"]: line["state"] for line in self.lines if line["kind"] != "end"}

    @property
    def end(self) -> dict[str, Any] | None:
        return next((line for line in self.lines if line["kind"] == "end"), None)


def read(folder: Path, *, finished: bool) -> Chain:
    """The chain of a run folder, checked against itself and metrics.jsonl; without lines where there is none.
    UserError: it is no JSON."""
    path, metrics = folder / FILE, folder / "metrics.jsonl"
    if not path.exists():
        return Chain([], [])
    if metrics.exists() and not metrics.is_file():
        raise UserError(f"{metrics} is no file, so nothing can be compared with it")
    try:
        data = read_file(path)
        lines = _lines(data)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}; nothing can be compared with it") from error
    flaws, before, start, expected = [], "", 0, None
    for line in lines:
        round = line.get("round", 0)
        if line.get("chain") != _link(before, {key: value for key, value in line.items() if key != "chain"}):
            flaws.append((round, f"the line {line.get('kind')!r} of {FILE} does not follow from the line before it"))
        if expected is not None and line.get("kind") == "round" and round != expected:
            flaws.append((round, f"{FILE} goes from round {expected - 1} to round {round}"))
        end, known = line["metrics"]
        if digest(read_file(metrics, start, end) if metrics.exists() else b"") != known:
            flaws.append((round, f"metrics.jsonl is not what was written until this line ({line['kind']})"))
        before, start = line.get("chain", ""), end
        expected = round + 1
    if finished and not any(line["kind"] == "end" for line in lines):
        flaws.append((0, f"the run is finished, and {FILE} has no last line"))
    if finished and metrics.exists() and metrics.stat().st_size > start:
        flaws.append((0, "metrics.jsonl has lines that were added after the end of the run"))
    return Chain(lines, flaws, digest(data))


def _link(before: str, line: Mapping[str, Json]) -> str:
    text = before + json.dumps(line, ensure_ascii=False)
    return digest(text.encode(errors="surrogatepass"))  # JSON may hold half of a character, and UTF-8 may not


def _lines(data: bytes) -> list[dict[str, Any]]:
    """The lines of the file; an unfinished last one of a killed run is left out."""
    lines = [load_json(line) for line in data.split(b"\n")[:-1]]
    for line in lines:
        shapes.check(FILE, line)
    return lines
