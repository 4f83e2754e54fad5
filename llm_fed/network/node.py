"""Node: what one machine of a network does with the server's orders. Data, base and the clients' memories stay here.

A client's memory lies on this machine's disk, one version per round in which it answered, for each run. An order names
the version that it continues from - the last answer that the server has - so that a server that went back to a
checkpoint, a client that was killed at work, and an answer that got lost all continue as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import math
import signal
import statistics
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import cast

import numpy as np
from rich.console import Console

from llm_fed.basics import documents
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import ClientError, lookup, panics
from llm_fed.basics.files import write_folders
from llm_fed.basics.names import rounded
from llm_fed.basics.rng import Secret
from llm_fed.bench import bases, build, taking_part
from llm_fed.bench.build import Experiment
from llm_fed.bench.parents import config_of
from llm_fed.experiment import finish
from llm_fed.export import models
from llm_fed.federation import summing
from llm_fed.federation.clients import encoded_upload, reported_examples
from llm_fed.federation.privacy import at_clients, composed, noisy_steps, protected, released, shown
from llm_fed.federation.uploads import infinite_flaw
from llm_fed.method.client import NOISY_STEPS, Client
from llm_fed.network import limits, peers, policy
from llm_fed.network.ledger import Answer, Ledger, order_id
from llm_fed.network.link import PROTOCOL, RUN_NAME, MessageFields, OrderFields, content_of, joined
from llm_fed.network.node_folders import RowsAtNode, personal_folder, plain
from llm_fed.network.policy import Guard, Policy
from llm_fed.network.refusals import Refused, each, fused, told
from llm_fed.network.watching import Watched, measured, told_scores, watched
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.rows import Memory
from llm_fed.runs.tracking import Reporter
from llm_fed.scoring.evaluation import Personalize
from llm_fed.secure.cohort import Cohort, Terms
from llm_fed.settings import plugins
from llm_fed.settings.config import Config, Device, ServerConfig
from llm_fed.settings.configfile import as_dict, from_dict
from llm_fed.state import State
from llm_fed.state.wire import Message, WireError, pack, unpack

_EXPERIMENTS = 4  # that a node holds at once: those of a merge and of the two runs that it starts from, and one more
BUILT_IN = "built-in"  # as `path`: the node has no data of its own, and serves those that come with llm_fed
SUMMING = ("prepare", "reveal")  # kinds of orders that need nothing that is built
Outcomes = dict[str, Answer | Exception]  # by client the reply to its order and its content, or what ended it
Sites = dict[str, Client | Exception]  # by client its site, or why it cannot work


@dataclass(frozen=True)
class NodeSettings:
    """What this machine's operator says of it."""

    home: Path  # where memories and personal adapters lie
    path: str | None = None  # the data, instead of task.path; without it nothing is served
    clients: tuple[str, ...] = ()  # those of the data's clients that are here; without one nothing is served
    device: Device | None = None  # instead of the configuration's
    allow: tuple[str, ...] = ()  # methods and tasks from outside that the server may name, which runs their code
    policy: str | None = None  # the owner's file
    key: str | None = None  # with which Flower knows this node, and
    peers: str | None = None  # those of the others: files, for `privacy.secure`
    rules: Policy = Policy()  # what it says, once it is read


class Node:
    """The clients of one machine. Whatever is loaded for an order stays for the next."""

    def __init__(self) -> None:
        self._bases = bases.Bases()
        self._built: dict[str, tuple[Experiment, RowsAtNode]] = {}  # for a run, by the configuration's text
        self._stores: dict[Path, Checkpoints] = {}

    def answer(self, location: NodeSettings, config: str, message: MessageFields, content: bytes) -> Answer:
        """The reply to one message, and its content; what went wrong with all of it is in the reply's `error`, and what
        went wrong with one client's order in its own.

        Args:
            config: of the federation, as YAML.
            message: a greeting (`kind`: hello), or orders (`kind`: work), see `link` and `clients`.
            content: packed messages, one after another.
        """
        try:
            location = replace(location, rules=policy.read(location.policy))
            signal.alarm(math.ceil(3600 * location.rules.hours))  # ends this process; the next message starts another
            with plugins.only(location.allow), panics("this node's base"):
                return self._carry_out(location, config, message, content)
        except Exception as error:  # of any kind: the server is told, and the next message finds this machine at work
            return told(error), b""
        finally:
            signal.alarm(0)

    def _carry_out(self, location: NodeSettings, config: str, message: MessageFields, content: bytes) -> Answer:
        if message.get("protocol", 1) != PROTOCOL:
            raise Refused(
                "protocol",
                f"the server speaks version {message.get('protocol', 1)} of the protocol, and this node version "
                f"{PROTOCOL}: install the same llm_fed at both",
            )
        if not (location.path and location.clients):
            raise Refused("setup", "without path= and clients= in --node-config nothing is served")
        location.rules.check_text(config)
        settings = from_dict(documents.load(config))
        limits.check(settings)
        # The server says what `auto` means in its run.
        if settings.base.dtype == "auto" and "dtype" in message:
            settings = replace(settings, base=replace(settings.base, dtype=message["dtype"]))
        if "need" in message:
            settings = config_of(message["need"], settings)
        kinds = {"hello": self._hello, "work": self._work}
        return lookup("message", message["kind"], kinds)(location, settings, message, content)

    def _hello(self, location: NodeSettings, config: Config, message: MessageFields, content: bytes) -> Answer:
        built = self._experiment(location, config, [plain(message["run"])] if "run" in message else [])
        sizes = {name: reported_examples(site, config) for name, site in sorted(built.trainers.items())}
        said: dict[str, Json] = {"clients": sizes, "base": bases.identity(built.base), "protocol": PROTOCOL}
        if config.privacy.secure:
            said["certificates"] = peers.certificates(
                location.home, message["run"], [*sizes], location.key, location.peers
            )
        return {**said, "idle": [*built.only_tested, *built.left_out], "unscored": [*built.unscored]}, b""

    def _work(self, location: NodeSettings, config: Config, message: MessageFields, content: bytes) -> Answer:
        location.rules.check_room(location.home)
        replies, answers = [], []
        for _, orders in groupby(message["orders"], _common):
            alike = list(orders)
            work = _OrderGroup(location, config, {order["client"]: order for order in alike}, content)
            outcomes = self._answered(work)
            for order in alike:
                outcome = outcomes[order["client"]]
                reply, answer = (told(outcome), b"") if isinstance(outcome, Exception) else outcome
                replies.append({**reply, "ask": order["ask"]})
                answers.append(answer)
        entries, joint = joined(replies, answers, once=False)
        return {"replies": entries}, joint

    def _answered(self, work: _OrderGroup) -> Outcomes:
        """What an answer releases is in the ledger before it leaves; an order answered with noise is so again."""
        if work.common["kind"] in SUMMING:
            return self._towards_a_sum(work)
        kinds = {"train": self._train, "evaluate": self._evaluate, "finish": self._finish}
        carry_out = lookup("order", work.common["kind"], kinds)
        built = self._experiment(work.location, work.config, work.runs, requested=work.orders.keys())
        ledgers: dict[str, tuple[Ledger, str]] = {}

        def known(client: str, order: OrderFields) -> Answer | None:
            if client not in built.clients:
                raise Refused("client", f"this machine has no data of client {client} now")
            id = order_id(repr(work.config), order, content_of(order, work.content))
            ledgers[client] = ledger, _ = Ledger(work.location.home, client), id
            if (answer := ledger.answer(id)) is None and work.common["kind"] == "train":
                site = built.clients[client]
                size, steps = site.planned  # what it would release is refused before it is made
                work.location.rules.check_spent(ledger, released(work.config.privacy, size / site.num_examples, steps))
            return answer

        answers = each(work.orders, known)
        new = {client: work.orders[client] for client, answer in answers.items() if answer is None}
        outcomes = carry_out(replace(work, orders=new), built) if new else {}
        entered = each(outcomes, lambda client, its: self._entered(work, built, client, ledgers[client], its))
        return {client: entered[client] if answer is None else answer for client, answer in answers.items()}

    def _entered(
        self, work: _OrderGroup, built: Experiment, client: str, entry: tuple[Ledger, str], answer: Answer
    ) -> Answer:
        """The answer, once what it says of the client's training examples is in the ledger. Scores say nothing of
        these. Refused: it would spend more than the owner allows."""
        (ledger, order), private, run = entry, work.config.privacy, work.common["run"]
        if not private.by_example and work.common["kind"] != "train":
            return answer
        if releases := released(private, *noisy_steps(built.clients[client])):
            work.location.rules.check_spent(ledger, releases)
            if private.by_example:
                answer[0]["epsilon"] = shown(composed(ledger.released(run, releases), private.delta))
            digests = np.sort(built.record.digests) if built.record else np.empty(0)
            rows = hashlib.sha256(digests.tobytes()).hexdigest()
            ledger.write(order, run, rows, releases, answer if at_clients(private) else None)
        return answer

    def _train(self, work: _OrderGroup, built: Experiment) -> Outcomes:
        sites, messages = self._prepared(work, built)
        round = work.common["round"]
        working = _working(sites)
        for site in working.values():
            site.begin(round, work.common["lr"])
        updates = fused(built.runtime, sites, lambda site: built.method.client_update(site, messages[site.id]))

        def reply(client: str, update: Message) -> Answer:
            site, store, order = working[client], self._store(work, client), work.orders[client]
            # Noise that no other answer has: one that is requested again, from another message, must not share it.
            if work.config.privacy.secure:
                packed, more = self._masked(work, site, update)
            else:
                packed, more = encoded_upload(update, work.config, Secret.fresh(), round, client), {}
            assert isinstance(site.memory, Memory)
            store.save(round, None, {"memory": site.memory.rows})
            kept = {order["after"], *order["kept"], round}
            store.prune(lambda version: version in kept)
            said: dict[str, Json] = {"examples": reported_examples(site, work.config), **more}
            if site.losses and not work.config.privacy.draws:  # a loss would say what noise and masks are to hide
                said |= {"loss": rounded(statistics.fmean(site.losses)), "steps": len(site.losses)}
            return said, packed

        return each(updates, reply)

    def _masked(self, work: _OrderGroup, site: Client, update: Message) -> tuple[bytes, dict[str, Json]]:
        """The client's part of a sum, masked, and what proves it to its neighbours."""
        order, private = work.orders[site.id], work.config.privacy
        cohort, largest, secret = Cohort.of(order["cohort"]), int(order["largest"]), Secret.fresh()
        if why := infinite_flaw(update):
            raise ClientError(why)
        upload = protected(update, private, secret, order["round"], site.id)
        if said := summing.too_long(upload, private):
            print(f"{site.id}, round {order['round']}: {said}", flush=True)
        share = min(reported_examples(site, work.config), largest) / largest
        ring = summing.ring_of(private, len(cohort.names))
        part = summing.numbers(upload, private, ring, share, summing.rounding_key(secret, order["round"], site.id))
        sent = hashlib.sha256(content_of(order, work.content)).hexdigest()
        trained = hashlib.sha256(repr((work.config, order["lr"])).encode()).hexdigest()
        terms = Terms(cohort, tuple(order["present"]), sent, largest, trained)
        with peers.taking_part(work.location.home, order["run"], site.id, peers.read(work.location.peers)) as party:
            proofs = party.mask(part, terms, order["sealed"])
        return pack(part), {"proofs": proofs, "settings": trained}

    def _towards_a_sum(self, work: _OrderGroup) -> Outcomes:
        """The phases of `privacy.secure` before and after training."""
        identities = peers.read(work.location.peers)

        def step(client: str, order: OrderFields) -> Answer:
            cohort = Cohort.of(order["cohort"])
            with peers.taking_part(work.location.home, order["run"], client, identities) as party:
                if order["kind"] == "prepare":
                    return cast(dict[str, Json], party.prepare(cohort, order["certificates"])), b""
                return cast(dict[str, Json], party.reveal(cohort, order["alive"], order["proofs"])), b""

        return each(work.orders, step)

    def _evaluate(self, work: _OrderGroup, built: Experiment) -> Outcomes:
        sites, messages = self._prepared(work, built)
        found = measured(built, sites if work.answers else {}, _personal(built, messages), work.common["split"])
        return each(told_scores(built, sites, found), lambda client, score: (score, b""))

    def _finish(self, work: _OrderGroup, built: Experiment) -> Outcomes:
        sites, messages = self._prepared(work, built)
        merged = self._parents(work, messages)

        def begin(client: str, site: Client) -> Client:
            for state in merged[client].values():
                if isinstance(state, Exception):
                    raise state
            site.rounds = work.common.get("ended", built.config.rounds)
            site.begin(site.rounds + 1, work.config.local.lr)
            return site

        sites, failed = each(sites, begin), {}
        sent = {name: message["message"] for name, message in messages.items()}
        before = {name: copy(site.memory) for name, site in _working(sites).items()}
        done = fused(built.runtime, sites, lambda site: built.method.finish(site, merged[site.id] or sent[site.id]))
        for client, outcome in done.items():
            site = sites[client]
            if isinstance(outcome, ClientError) and not isinstance(site, Exception) and not merged[client]:
                site.memory, failed[client] = before[client], {"failed": told(outcome)["error"]}
            elif isinstance(outcome, Exception):
                sites[client] = outcome
        states = fused(built.runtime, sites, _personal(built, sent))
        known = {client: state for client, state in states.items() if not isinstance(state, Exception)}
        working = _working(sites)
        tested = each(states, lambda client, state: working[client])
        found = measured(built, tested if work.answers else {}, known, "test", examples=True)
        scores, more = told_scores(built, tested, found), watched(built, states, found)

        def reply(client: str, score: dict[str, Json]) -> Answer:
            self._export(built, work, working[client], known[client], score, more[client])
            recipe = built.method.recipe(working[client])
            return {**score, **more[client].said, "recipe": recipe, **failed.get(client, {})}, b""

        return each(scores, reply)

    def _parents(self, work: _OrderGroup, messages: Mapping[str, Message]) -> dict[str, dict[str, State | Exception]]:
        """By client and name of a parent, if the run is a merge: the client's model there, or why it has none."""
        given: dict[str, dict[str, State | Exception]] = {client: {} for client in messages}
        for need in dict.fromkeys(need for sent in messages.values() for need in sent["given"]):
            sent_there = {name: sent["given"][need] for name, sent in messages.items() if need in sent["given"]}
            orders = {name: work.orders[name] for name in sent_there}
            of_parent = {name: {**order, **order["given"][need], "given": {}} for name, order in orders.items()}
            config = config_of(need, work.config)
            its_work = replace(work, config=config, orders=cast(Mapping[str, OrderFields], of_parent))
            built = self._experiment(its_work.location, its_work.config, its_work.runs)
            states = fused(built.runtime, self._sites(built, its_work), _personal(built, sent_there))
            for client, state in states.items():
                given[client][need] = state
        return given

    def _export(
        self, built: Experiment, work: _OrderGroup, site: Client, state: State, score: Mapping[str, Json], more: Watched
    ) -> None:
        """Write a client's personal model to this machine's disk, where the configuration says so."""
        order = work.orders[site.id]
        answered = any(run["after"] for run in (order, *order["given"].values()))
        if models.chosen(work.config.export.clients, [site.id], [site.id] if answered else ()):
            folder = personal_folder(work.location.home, order["name"], order["run"]) / site.id
            text = documents.dump(as_dict(work.config))
            scores = {site.id: score["score"]} if isinstance(score["score"], int | float) else {}
            if work.config.privacy.by_example:  # its card counts the whole run, whatever the server went back to
                site = replace(site, memory={**site.memory, NOISY_STEPS: self._spent(work, site)})
            own = finish.contents(built, [site], {site.id: state}, scores, text, order["spent"], more.warnings)
            write_folders(((folder, files) for _, files in own), "a personal model")

    def _spent(self, work: _OrderGroup, site: Client) -> dict[str, float]:
        """What `NOISY_STEPS` is of a client after all of its answers in this run, and what it has done since."""
        rate, steps = noisy_steps(site)
        before = Ledger(work.location.home, site.id).released(work.common["run"])
        return {"rate": max([rate, *(rate for _, rate in before)]), "steps": steps + sum(before.values())}

    def _prepared(self, work: _OrderGroup, built: Experiment) -> tuple[Sites, dict[str, Message]]:
        """By client its site, and what it is sent."""
        messages: dict[str, Message] = {}

        def opened(client: str, site: Client) -> Client:
            messages[client] = unpack(content_of(work.orders[client], work.content))
            return site

        return each(self._sites(built, work), opened), messages

    def _sites(self, built: Experiment, work: _OrderGroup) -> Sites:
        """By client its site with the memory that its order says, or why it has none."""

        def remembering(client: str, order: OrderFields) -> Client:
            site, store, after = built.clients[client], self._store(work, client), order["after"]
            try:
                site.memory = store.load(after).memory("memory") if after else Memory(store.store)
            except WireError as error:
                raise Refused("forgot", f"{client}'s memory of round {after} is gone: {error}") from error
            site.memory.pop(NOISY_STEPS, None)  # counted for each order anew, and in the ledger
            if site.private is not None:
                site.private = replace(site.private, secret=Secret.fresh())
            return site

        return each(work.orders, remembering)

    def _store(self, work: _OrderGroup, client: str) -> Checkpoints:
        folder = work.location.home / "runs" / plain(work.orders[client]["run"]) / client
        if folder not in self._stores:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._stores[folder] = Checkpoints(folder)
        return self._stores[folder]

    def _experiment(
        self, location: NodeSettings, config: Config, runs: Sequence[str], requested: Set[str] = frozenset()
    ) -> Experiment:
        """What is built for a run, of which this machine keeps in which splits its rows are. If a client that is
        requested has nothing to train on in it, its data may have come back, and are looked for.
        `runs`: its token, and those of the runs that it starts from. `requested`: who trains or is scored now; until
        there is somebody, nothing is written."""
        location.rules.check(config)
        here = self._here(location, config)
        key = repr((here, location.allow, location.rules, runs))  # what was allowed once may not be now
        known = self._built.get(key)
        if known is None or not requested <= known[0].trainers.keys():
            try:
                rows = RowsAtNode(location.home, runs)
                built = self._build(here, rows, location.rules), rows
            except Exception as error:  # of any kind: the others' data are still good
                if known is None:
                    raise
                print(f"data that were missing cannot be read yet: {error}", flush=True)
                built = known
            others = [k for k, (its, _) in self._built.items() if its.config.base == here.base and k != key]
            self._built = {k: self._built[k] for k in others[1 - _EXPERIMENTS :]} | {key: built}
        experiment, rows = self._built[key]
        if requested:
            rows.keep(experiment.record)
        return experiment

    def _build(self, here: Config, rows: RowsAtNode, rules: Policy) -> Experiment:
        base, loaded = self._bases.of(here), self._bases.loads
        built = build.prepare(here, Reporter(Console(quiet=True)), base=base, everybody=False, known=rows.known)
        rules.check_built(built)
        built.runtime.engine = Guard(built.engine, rules)
        print(f"{here.method['name']} for {', '.join(built.clients)}; bases loaded so far: {loaded}", flush=True)
        reading = built.reading.for_people() if built.reading else {}
        lines = [f"{label}: {text}" for label, text in reading.items()]
        for line in [*lines, *taking_part.notes(built, everybody=False)]:
            print(line, flush=True)
        return built

    def _here(self, location: NodeSettings, config: Config) -> Config:
        """The configuration with this machine's data; who is asked, and when, is the server's affair."""
        task = replace(
            config.task, path=None if location.path == BUILT_IN else location.path, groups=location.clients,
            clients=None, server=ServerConfig(),
        )  # fmt: skip
        return replace(config, task=task, device=location.device or config.device)


@dataclass(frozen=True)
class _OrderGroup:
    """Orders of one kind that are alike, where they are carried out, and for which configuration."""

    location: NodeSettings
    config: Config
    orders: Mapping[str, OrderFields]  # by client
    content: bytes  # of the whole message

    @property
    def runs(self) -> list[str]:
        """The tokens of the run and of those that it starts from; another name is refused where it is used."""
        given = [parent.get("run", "") for order in self.orders.values() for parent in order.get("given", {}).values()]
        return [run for run in dict.fromkeys([self.common["run"], *given]) if RUN_NAME.fullmatch(run)]

    @property
    def answers(self) -> bool:
        """Whether the owner lets anybody ask for answers."""
        return "answers" in self.location.rules.allowed

    @property
    def common(self) -> OrderFields:
        """What all of the orders say alike, beside what each says of its client."""
        return next(iter(self.orders.values()))


def _common(order: OrderFields) -> tuple[Json, ...]:
    """What orders that are carried out side by side say alike."""
    whose = order["kind"], order.get("run"), order.get("round"), order.get("lr")
    return *whose, order.get("split"), order.get("name"), order.get("ended")


def _personal(built: Experiment, sent: Mapping[str, Message]) -> Personalize:
    """How each client's personal model is made of what it is sent."""
    return lambda site: built.method.personalize(site, sent[site.id])


def _working(sites: Sites) -> dict[str, Client]:
    return {name: site for name, site in sites.items() if not isinstance(site, Exception)}
