"""Ledger: what a client has released, at its node. A server that goes back to an earlier round does not take it back.

`ledger/<client>/released.jsonl` in the node's home has a line for each answer that holds something of its examples:

    {"order": "9f2c...", "run": "4be1...", "rows": "77a0...", "noise": 0.5, "rate": 1.0, "times": 1}

Each is on the disk before its answer leaves. An order that was answered gets the same answer again, byte for byte, so
that its noise cannot be averaged away. All lines of a client count together, on whichever rows: rows that have changed
are for the most part those of before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError
from llm_fed.basics.files import append_file, cut_file, make_folder, read_file, remove, sync_folder, write_file
from llm_fed.network.link import OrderFields

KEPT = 64  # answers of a client that are kept; an older order would be answered anew, and counted again
Releases = Mapping[tuple[float, float], int]  # by noise multiplier and rate of sampling, how often
Answer = tuple[dict[str, Json], bytes]  # the reply to an order, and its content


class Ledger:
    """What one client has released; RunError where its file is damaged."""

    def __init__(self, home: Path, client: str):
        self._folder = home / "ledger" / client
        self._path = self._folder / "released.jsonl"
        data = read_file(self._path) if self._path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            cut_file(self._path, len(whole))  # a crash in the middle of a line: its answer has not left
        try:
            self._lines = [json.loads(line) for line in whole.splitlines()]
            self.released()
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self._path} is damaged, so it is not known what was released: {error}") from error

    def released(self, run: str | None = None, more: Releases = MappingProxyType({})) -> Releases:
        """What was released in one run, or in all, and `more`."""
        total = Counter(more)
        for line in self._lines:
            if run in (None, line["run"]):
                total[float(line["noise"]), float(line["rate"])] += int(line["times"])
        return total

    def answer(self, order: str) -> Answer | None:
        """What was answered to an order; None where it was not answered, or that is no longer kept."""
        if not any(line["order"] == order for line in self._lines[-KEPT:]):
            return None
        try:
            reply, _, content = (self._folder / order).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return json.loads(reply), content

    def write(self, order: str, run: str, rows: str, releases: Releases, answer: Answer | None) -> None:
        """Bring to the disk what an answer releases, and itself where its noise is in no other; then it may leave."""
        make_folder(self._folder, 0o700)
        if answer is not None:
            write_file(self._folder / order, json.dumps(answer[0]).encode() + b"\n" + answer[1], private=True)
        lines = [
            {"order": order, "run": run, "rows": rows, "noise": noise, "rate": rate, "times": times}
            for (noise, rate), times in releases.items()
        ]
        append_file(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        os.chmod(self._path, 0o600)
        sync_folder(self._path)
        sync_folder(self._folder)
        self._lines += lines
        for line in self._lines[-KEPT - len(lines) : -KEPT]:
            remove(self._folder / line["order"])


def order_id(config: str, order: OrderFields, content: bytes) -> str:
    """By which an order is known again, with its packed message and the configuration that it is carried out with; when
    it is sent, and which memories the server still needs, is no part."""
    says = {key: value for key, value in order.items() if key not in ("ask", "bytes", "kept")}
    text = json.dumps([config, says, hashlib.sha256(content).hexdigest()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
