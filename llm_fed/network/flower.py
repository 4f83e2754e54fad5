"""Flower as the carrier: the same methods behind its ServerApp and ClientApp, over SuperLink and SuperNodes.

Nothing here trains, and nothing heavy is imported before the server's run begins: Flower starts a process for every
message, which hands the order to this machine's worker (`worker.py`) and ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from llm_fed.basics.documents import Json, load_json, names_of
from llm_fed.basics.errors import RunError, UserError
from llm_fed.network import worker
from llm_fed.network.refusals import told
from llm_fed.settings import PositiveFloat, coerce
from llm_fed.settings.config import Device

if TYPE_CHECKING:
    from llm_fed.network.link import Reply

_SIDE_BY_SIDE = 64  # look-ups that begin at once; the next begin when these have ended, or at the end of PATIENCE
PATIENCE = 2.0  # seconds that `look` waits for look-ups that have begun
_KEPT = 600.0  # seconds that a look-up is kept which nobody asks for any more
_STYPE = "llm_fed.message"  # safetensors with our header; never numpy, never pickle


Result = TypeVar("Result")


def server_app(module: str) -> ServerApp:
    """The ServerApp of the app folder whose server.py is `module` (`__file__`)."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from llm_fed.experiment import run
        from llm_fed.network.server import train
        from llm_fed.settings import configfile

        run.quiet()
        settings = context.run_config
        words = [f"task.path={settings['path']}"] if settings.get("path") else []
        try:
            config = configfile.load(_config(module), words)
            asked = [key for key in ("fresh", "finish", "continue") if settings.get(key)]
            if len(asked) > 1:
                raise UserError(f"{' and '.join(asked)} do not go together; set one of them")
            train(
                config, Path(str(settings["out"])), FlowerLink(grid), fresh="fresh" in asked, finish="finish" in asked,
                goes_on="continue" in asked,
            )  # fmt: skip
        except (UserError, RunError) as error:
            print(f"llm-fed: {error}", flush=True)
            raise SystemExit(2 if isinstance(error, UserError) else 1) from error

    return app


def client_app(module: str) -> ClientApp:
    """The ClientApp of the app folder whose client.py is `module` (`__file__`)."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            order, content = _opened(message.content)
            location = _place(context)
            idle = float(location.pop("idle", worker.IDLE))
            request = {"place": location, "config": _config(module).read_text(encoding="utf-8"), "order": order}
            reply, answer = worker.call(Path(location["home"]), request, content, idle)
        except Exception as error:  # of any kind: Flower would send its text
            reply, answer = told(error), b""
        return Message(_record(reply, answer), reply_to=message)

    return app


class FlowerLink:
    """Carries orders through a SuperLink."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._pulls = Pulls(self._pulled)  # one by one: what Flower cannot read raises, and would take others along

    def nodes(self) -> Mapping[int, str]:
        # The SuperLink's own records: the operator gave the name with the key (`flwr supernode register --name`), and a
        # node has no say in either. One that registered itself, where keys are not requested, has no name.
        return {node.node_id: node.name for node in self._grid.get_nodes()}

    def send(self, orders: Sequence[tuple[int, Mapping[str, Json], bytes]], patience: float) -> list[str | None]:
        messages = [
            Message(_record(order, content), dst_node_id=node, message_type="train", ttl=patience)
            for node, order, content in orders
        ]
        return [id or None for id in self._grid.push_messages(messages)] if messages else []

    def receive(self, ids: Collection[str]) -> dict[str, Reply]:
        return self._pulls.look(ids)

    def _pulled(self, id: str) -> Reply | None:
        """The reply of this id, or why it cannot be read; None where none has come. A node may let it hang."""
        from llm_fed.network.link import Reply

        try:
            for message in self._grid.pull_messages([id]):
                if message.has_error():
                    raise UserError(f"Flower's error {message.error.code}: {message.error.reason}")
                return Reply(*_opened(message.content))
        except Exception as error:  # of any kind: whatever one node answers ends that answer alone
            if isinstance(error, OSError | RuntimeError) and not isinstance(error, RecursionError):
                raise  # the SuperLink itself does not answer
            return Reply({"error": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"})
        return None


def _record(order: Mapping[str, Json], content: bytes) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(content),), stype=_STYPE, data=content)
    return RecordDict({"order": ConfigRecord({"json": json.dumps(order)}), "content": ArrayRecord({"message": array})})


def _opened(record: RecordDict) -> tuple[dict[str, Any], bytes]:
    """What `_record` was made of. UserError: it is something else."""
    try:
        order = load_json(str(record.config_records["order"]["json"]))
        array = record.array_records["content"]["message"]
        if not isinstance(order, dict) or array.stype != _STYPE:
            raise ValueError(f"an array of {array.stype}")
        return order, array.data
    except (KeyError, ValueError, RecursionError) as error:
        raise UserError(f"not an order or reply of llm_fed: {error}") from error


def _place(context: Context) -> dict[str, Any]:
    """What `--node-config` says."""
    given = dict(context.node_config)
    known = ("home", "path", "clients", "device", "idle", "allow", "policy", "key", "peers")
    if unknown := given.keys() - {*known, "partition-id", "num-partitions"}:
        raise UserError(f"--node-config has {min(unknown)!r}; known: {', '.join(known)}")
    if not given.get("home"):
        raise UserError('--node-config needs home="FOLDER": where this machine\'s memories and personal models lie')
    location: dict[str, Any] = {key: given[key] for key in known if key in given}
    for key, hint in {"device": Device, "idle": PositiveFloat}.items():
        if key in location:
            location[key] = coerce(location[key], hint, f"--node-config {key}")
    return location | {key: names_of(f"--node-config {key}", str(given.get(key, ""))) for key in ("clients", "allow")}


def _config(module: str) -> Path:
    return Path(module).with_name("config.yaml")


class Pulls(Generic[Result]):
    """Looks things up by their ids, each in a thread that ends with the process, so that one that hangs holds up nobody
    else. `pull`: of an id what there is, or None where there is nothing yet. What it raises is raised by `look`."""

    def __init__(self, pull: Callable[[str], Result | None]):
        self._pull = pull
        self._begun: dict[str, tuple[Future[Result | None], float]] = {}  # and when it was asked for last

    def look(self, ids: Collection[str]) -> dict[str, Result]:
        """What there is of these by now, each given out once; returns within PATIENCE, or little more."""
        now, asked = time.monotonic(), [*ids]
        for first in range(0, len(asked), _SIDE_BY_SIDE):
            for id in asked[first : first + _SIDE_BY_SIDE]:
                future, _ = self._begun.get(id) or (self._started(id), now)
                self._begun[id] = future, now
            wait([self._begun[id][0] for id in asked[first : first + _SIDE_BY_SIDE]], now + PATIENCE - time.monotonic())
        self._begun = {id: (future, then) for id, (future, then) in self._begun.items() if now - then < _KEPT}
        results = {id: self._begun.pop(id)[0].result() for id in asked if self._begun[id][0].done()}
        return {id: result for id, result in results.items() if result is not None}

    def _started(self, id: str) -> Future[Result | None]:
        future = Future[Result | None]()
        threading.Thread(target=self._look_up, args=[id, future], daemon=True).start()
        return future

    def _look_up(self, id: str, future: Future[Result | None]) -> None:
        try:
            future.set_result(self._pull(id))
        except BaseException as error:
            future.set_exception(error)
