"""Node: what one machine of a network does with the server's orders. Data, base and the clients' memories stay here.

A client's memory lies on this machine's disk, one version per round in which it answered, for each run. An order names
the version that it continues from - the last answer that the server has - so that a server that went back to a
checkpoint, a client that was killed at work, and an answer that got lost all continue as if nothing had happened.
"""

from __future__ import annotations

import re
import secrets
import statistics
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from llm_fed import plugins
from llm_fed.config import Config, Device, ServerConfig
from llm_fed.configfile import as_dict, from_dict
from llm_fed.errors import ClientError, RunError, UserError, lookup, one_line
from llm_fed.eval.clients import evaluate
from llm_fed.eval.scores import Summary
from llm_fed.experiment import bases, build, finish
from llm_fed.experiment.build import Experiment
from llm_fed.experiment.needed import needed_config
from llm_fed.export import models
from llm_fed.federation.clients import encoded_upload, reported_examples
from llm_fed.federation.privacy import check_elsewhere
from llm_fed.files import write_folders
from llm_fed.messages.wire import Message, WireError, unpack
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.folder import rounded
from llm_fed.runs.rows import Memory
from llm_fed.runs.tracking import Reporter
from llm_fed.site import Site

_NAME = re.compile(r"[\w.+-]*\w[\w.+-]*")  # of runs: they name folders here, and the server is another party


@dataclass(frozen=True)
class Place:
    """What this machine's operator says of it."""

    home: Path  # where memories and personal adapters lie
    path: str | None = None  # the data, in the place of task.path
    clients: tuple[str, ...] = ()  # those of the data's clients that are here; empty: all
    device: Device | None = None  # in the place of the configuration's
    allow: tuple[str, ...] = ()  # methods and tasks from outside that the server may name, which runs their code


class Node:
    """The clients of one machine. Whatever is loaded for an order stays for the next."""

    def __init__(self) -> None:
        self._bases = bases.Bases()
        self._built: dict[str, Experiment] = {}  # by the configuration's text
        self._stores: dict[Path, Checkpoints] = {}

    def answer(
        self, place: Place, config: str, order: Mapping[str, Any], content: bytes
    ) -> tuple[dict[str, Any], bytes]:
        """The reply to one order, and its content; what went wrong is in the reply's `error`.

        Args:
            config: of the federation, as YAML.
            order: `kind` (hello, train, evaluate, finish) and what that needs, see `clients`.
            content: a packed message.
        """
        try:
            with plugins.only(place.allow):
                reply, answer = self._carry_out(place, config, order, content)
        except _Forgotten as error:
            return {"error": str(error), "forgot": True}, b""
        except plugins.NotAllowed as error:
            print(f"refused: {error}", flush=True)  # for this machine's operator; the server reads the reply
            return {"error": str(error)}, b""
        except (UserError, RunError, ClientError, WireError) as error:
            return {"error": str(error)}, b""
        except OSError as error:
            return {"error": f"{error.strerror or error}: {error.filename}" if error.filename else str(error)}, b""
        except Exception as error:
            traceback.print_exc()
            return {"error": one_line(f"{type(error).__name__}: {error}")}, b""
        return {**reply, "ask": order.get("ask")}, answer

    def _carry_out(
        self, place: Place, config: str, order: Mapping[str, Any], content: bytes
    ) -> tuple[dict[str, Any], bytes]:
        orders = {"hello": self._hello, "train": self._train, "evaluate": self._evaluate, "finish": self._finish}
        settings = _settings(config)
        check_elsewhere(settings.privacy)
        if settings.base.dtype == "auto" and "dtype" in order:  # the server says what this means in its run
            settings = replace(settings, base=replace(settings.base, dtype=order["dtype"]))
        if "need" in order:
            settings = needed_config(settings, order["need"])
        return lookup("order", order["kind"], orders)(_Work(place, settings, order), content)

    def _hello(self, work: _Work, content: bytes) -> tuple[dict[str, Any], bytes]:
        built = self._experiment(work.place, work.config)
        sizes = {name: reported_examples(site, work.config) for name, site in sorted(built.clients.items())}
        return {"clients": sizes, "base": bases.identity(built.base)}, b""

    def _train(self, work: _Work, content: bytes) -> tuple[dict[str, Any], bytes]:
        built, site, store = self._site(work)
        round, kept = work.order["round"], {work.order["after"], *work.order["kept"]}
        site.begin(round, work.order["lr"])
        answer = _alone(built, site, built.method.client_update(site, unpack(content)))
        # Noise that no other answer has: one that is asked for again, from another message, must not share it.
        packed = encoded_upload(answer, work.config, secrets.randbits(63), round, site.id)
        assert isinstance(site.memory, Memory)
        store.save(round, None, {"memory": site.memory.rows})
        store.prune(lambda version: version in kept or version == round)
        told = site.losses and work.config.privacy.clip is None  # a loss would say what the noise is to hide
        loss = {"loss": rounded(statistics.fmean(site.losses)), "steps": len(site.losses)} if told else {}
        return {"examples": reported_examples(site, work.config), **loss}, packed

    def _evaluate(self, work: _Work, content: bytes) -> tuple[dict[str, Any], bytes]:
        built, site, _ = self._site(work)
        return self._scores(work, self._score(built, site, unpack(content), work.order["split"])), b""

    def _finish(self, work: _Work, content: bytes) -> tuple[dict[str, Any], bytes]:
        built, site, _ = self._site(work)
        sent = unpack(content)
        site.given = {need: self._needed(work, need, message) for need, message in sent["given"].items()}
        site.begin(work.config.rounds + 1, work.config.local.lr)
        failed = {}
        before = dict(site.memory)
        try:
            _alone(built, site, built.method.finish(site, sent["message"]))
        except ClientError as error:
            if built.method.needs:
                raise
            site.memory, failed = before, {"failed": str(error)}
        summary = self._score(built, site, sent["message"], "test")
        answered = any(order["after"] for order in (work.order, *work.order["given"].values()))
        if models.chosen(work.config.export.clients, [site.id], [site.id] if answered else ()):
            state = _alone(built, site, built.method.personalize(site, sent["message"]))
            folder = work.place.home / "adapters" / _plain(work.order["name"]) / site.id
            text = yaml.safe_dump(as_dict(work.config), sort_keys=False)
            scores = {site.id: summary.mean} if summary else {}
            own = finish.contents(built, [site], {site.id: state}, scores, text, work.order["spent"])
            write_folders(((folder, files) for _, files in own), "a personal model")
        return {**self._scores(work, summary), "recipe": built.method.recipe(site), **failed}, b""

    def _needed(self, work: _Work, need: str, message: Message) -> Message:
        """This client's model in a run that the method starts from."""
        there = {**work.order, **work.order["given"][need]}
        built, site, _ = self._site(_Work(work.place, needed_config(work.config, need), there))
        return _alone(built, site, built.method.personalize(site, message))

    def _score(self, built: Experiment, site: Site, message: Message, split: str) -> Summary | None:
        return evaluate(
            lambda site: built.method.personalize(site, message), {site.id: site}, built.runtime,
            split=split, metric=built.metric, limit=built.config.eval.limit,
        )  # fmt: skip

    def _scores(self, work: _Work, summary: Summary | None) -> dict[str, Any]:
        """What the server is told of them; with privacy on no loss, as of training."""
        if summary is None:
            return {"score": None}
        told = summary.losses and work.config.privacy.clip is None
        return {"score": summary.mean, **({"loss": summary.loss} if told else {})}

    def _site(self, work: _Work) -> tuple[Experiment, Site, Checkpoints]:
        """The client that the order is for, with the memory that it says."""
        built = self._experiment(work.place, work.config)
        site = lookup("client", work.order["client"], built.clients)
        folder = work.place.home / "runs" / _plain(work.order["run"]) / site.id
        if folder not in self._stores:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._stores[folder] = Checkpoints(folder, work.config.checkpoint.memory_limit * 2**30)
        store, after = self._stores[folder], work.order["after"]
        try:
            site.memory = store.load(after).memory("memory") if after else Memory(store.store)
        except WireError as error:
            raise _Forgotten(f"its memory of round {after} is gone, so it begins again: {error}") from error
        return built, site, store

    def _experiment(self, place: Place, config: Config) -> Experiment:
        here = self._here(place, config)
        key = repr((here, place.allow))  # what was allowed once may not be now
        if key not in self._built:
            self._built = {k: built for k, built in self._built.items() if built.config.base == here.base}
            base, loaded = self._bases.of(here), self._bases.loads
            self._built[key] = build.prepare(here, Reporter(Console(quiet=True)), base=base, everybody=False)
            print(
                f"{config.method['name']} for {', '.join(self._built[key].clients)}; bases loaded so far: {loaded}",
                flush=True,
            )
        return self._built[key]

    def _here(self, place: Place, config: Config) -> Config:
        """The configuration with this machine's data; who is asked, and when, is the server's affair."""
        task = replace(
            config.task, path=place.path or config.task.path, groups=place.clients or None, clients=None,
            server=ServerConfig(),
        )  # fmt: skip
        return replace(config, task=task, device=place.device or config.device)


class _Forgotten(Exception):
    """A client's disk does not have the memory that the server counts on."""


@dataclass(frozen=True)
class _Work:
    """An order, where it is carried out, and for which configuration."""

    place: Place
    config: Config
    order: Mapping[str, Any]


@lru_cache(maxsize=16)
def _settings(text: str) -> Config:
    """A federation's configuration; its orders all bring the same text, which takes longer to read than some work."""
    return from_dict(yaml.safe_load(text))


def _alone(built: Experiment, site: Site, work: Any) -> Any:
    """What one site's coroutine returns."""
    (outcome,) = built.runtime.run({site.id: work}).values()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _plain(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(f"the server's name {name!r} cannot name a folder here")
    return name
