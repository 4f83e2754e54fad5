"""Adapters of a run in a vLLM server that goes on serving: each round under names that are never used again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError, UserError, one_line
from llm_fed.commands.evaluate import export
from llm_fed.experiment.rounds import opened
from llm_fed.export.peft_folders import WEIGHTS
from llm_fed.export.serving import looked_at
from llm_fed.runs.checkpoint import Place, rounds_in
from llm_fed.runs.reading import exported, finished

if TYPE_CHECKING:
    from llm_fed.commands.api import Result

_NAME = re.compile(r"(.+)@(\d+)")  # of what was published: client, round
SECONDS = 120  # in which an adapter is loaded, or answers


@dataclass
class Publisher:
    """Publishes a run's newest round to vLLM, on demand or as a callback of the run itself (`llm_fed.run(...,
    callbacks=[Publisher(...)])`): each round when the next one is trained, as it then has a checkpoint, and the
    result."""

    run: str  # its folder, or RUN@ROUND
    url: str  # of a server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=true on a machine that sees `out`
    out: Path | None = None  # for the copies that the server loads, `out/ROUND/CLIENT` (default: `RUN/published`)
    key: str = ""  # of the server, if it has one

    def on_round(self, line: Mapping[str, Json]) -> None:
        if rounds_in(Place.parse(self.run).folder / "checkpoints"):
            self.publish()

    def on_end(self, result: Result) -> None:
        self.publish()

    def publish(self) -> list[str]:
        """Load each client's adapter as `client@round`, and once all of them answer, unload those of earlier rounds;
        the new names. UserError: the run has no round yet, or adapters that vLLM cannot serve; or another run has taken
        a name. RunError: the server cannot be reached or refuses an adapter; what it served before stays."""
        with opened(self.run, everybody=True, latest=True) as view:
            folders, round = exported(view), finished(view)["round"]
            for client, folder in folders.items():
                if why := looked_at(folder)[0]:
                    raise UserError(f"vLLM cannot serve the adapter of {client}: {why}; see llm-fed serve")
            known, target = self._known(), (self.out or Place.parse(self.run).folder / "published") / str(round)
            names = {f"{client}@{round}": target / client for client in folders}
            for client, folder in folders.items():
                copy = target / client / WEIGHTS
                same = copy.is_file() and copy.read_bytes() == (folder / WEIGHTS).read_bytes()
                if f"{client}@{round}" in known and not same:
                    raise UserError(
                        f"{self.url} already serves another {client}@{round}, and might answer from what it has cached "
                        "of it; start the server anew"
                    )
            export(view, target)
        for name, folder in names.items():
            if name not in known:
                self._ask("POST", "load_lora_adapter", lora_name=name, lora_path=str(folder.resolve()))
        for name in names:
            self._ask("POST", "completions", model=name, prompt=".", max_tokens=1)
        for old in known:
            if (found := _NAME.fullmatch(old)) and found[1] in folders and int(found[2]) < round:
                self._ask("POST", "unload_lora_adapter", lora_name=old)
        return [*names]

    def _known(self) -> set[str]:
        """The names that the server knows."""
        try:
            return {str(model["id"]) for model in self._ask("GET", "models").json()["data"]}
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(f"{self.url}/v1/models is no list of models ({one_line(repr(error))})") from error

    def _ask(self, verb: str, route: str, **values: str | int) -> httpx.Response:
        where = f"{self.url.removesuffix('/')}/v1/{route}"
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            reply = httpx.request(verb, where, json=values or None, headers=headers, timeout=SECONDS)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise UserError(f"--vllm {self.url} is no address such as http://localhost:8000: {error}") from error
        except httpx.HTTPError as error:
            raise RunError(f"{where} cannot be reached: {one_line(str(error))}") from error
        if reply.status_code != 200:
            hint = "; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=true" if reply.status_code == 404 else ""
            raise RunError(f"{where} answers {reply.status_code}: {one_line(reply.text, 200)}{hint}")
        return reply
