"""Clients on other machines: the server's side of a network, whatever carries the orders.

What a client is ordered to do, as JSON beside a packed message; `link` makes one message of all orders to a node, and
`node.Node` carries them out:

    train      run, round, lr, after, kept; message      -> examples, loss, steps, epsilon; upload
    evaluate   run, after, split; message                -> score, loss
    finish     run, after, name, given, spent; messages  -> score, loss, recipe

Before that `roster` asks each node who is there (hello). Time is real here: a round ends when everybody whom it asked
has answered, or enough have, or at its deadline. What comes later counts in the round that it reaches, with its
staleness.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, cast

from llm_fed.basics.documents import Json
from llm_fed.basics.names import rounded
from llm_fed.basics.rng import Secret
from llm_fed.federation.clients import Messages
from llm_fed.federation.privacy import spent
from llm_fed.federation.progress import InFlight, Progress
from llm_fed.federation.schedule import Poisson, cohort_size, sample
from llm_fed.method import Method
from llm_fed.method.client import Client
from llm_fed.network.link import LARGEST, Bundles, Link, Order, PendingOrder, Reply, flaw_of, summary_of
from llm_fed.network.roster import Roster
from llm_fed.runs.checkpoint import rounds_in
from llm_fed.runs.folder import Run, log_event
from llm_fed.runs.tracking import Watch
from llm_fed.scoring.scores import Summary
from llm_fed.settings.config import Config
from llm_fed.state.outline import size_of
from llm_fed.state.wire import Message, pack

_PAUSE = 0.5  # seconds between two looks for answers
_SLACK = 65536  # bytes by which an upload's names may be longer than expected before it is not even read


class Known(TypedDict):
    """What is known of the clients; checkpoints hold it."""

    answered: dict[str, int]  # by client the round of its last answer
    asked: dict[str, int]  # how often
    epsilon: dict[str, float | None]  # what it says it has spent
    kept: dict[str, dict[str, int]]  # `answered`, by the round of a checkpoint


def known_of(progress: Progress) -> Known:
    """What a checkpoint holds of the clients; at the beginning nothing is known."""
    if progress.elsewhere is None:
        progress.elsewhere = Known(answered={}, asked={}, epsilon={}, kept={})
    return cast(Known, progress.elsewhere)


class RemoteClients:
    """The clients of a federation over a network. `token`: of the run; nodes keep its memories under this name.
    `secret`: of sampling under central privacy, which clients must not know. `say`: tells the operator."""

    def __init__(self, link: Link, config: Config, token: str, secret: Secret, say: Callable[[str], None]):
        self.sites: dict[str, Client] = {}  # no client's memory is here
        self._secret, self._central = secret, config.privacy.central
        self._link, self._config, self._token, self._say = link, config, token, say
        self.roster = Roster(link, config.network, say)
        self._bundles = Bundles(link, lambda client: self.roster.node[client], config.network.patience)
        self._waiting: dict[str, PendingOrder] = {}
        self._known: Known
        self.names: tuple[str, ...] = ()

    def gather(self, base: str, known: Mapping[str, Any]) -> None:
        """Wait for the clients that the configuration names, or for as many as it says, and fix their order; see
        `Roster.gather`. `base`: the fingerprint that the base of every node must have. `known`: network.json: who took
        part when this run was begun (`clients`), at which of the `nodes` each was, and how many `examples` it said it
        had; with others it is not accepted."""
        self.roster.owners |= known["nodes"]
        self.roster.examples |= known["examples"]
        self.roster.base, configured, before = base, self._config.network.clients, known["clients"]
        if not isinstance(configured, int):
            configured = tuple(self.roster.homes)
        wanted = before or configured
        same = configured <= len(before) if isinstance(configured, int) else {*configured} == {*before}
        if before and not same:
            self._say(
                f"this run began with {', '.join(before)} and continues with them, whatever network.clients says now; "
                "fresh=true starts again"
            )
        self.names = self.roster.gather(wanted)
        self.roster.say_weights([name for name in self.names if name in self.roster.node])

    @property
    def cohort_size(self) -> int:
        """How many are asked in one round."""
        return cohort_size(self._config.participation, len(self.names))

    def exchange(self, method: Method, progress: Progress, lr: float, run: Run, watch: Watch) -> dict[str, Json]:
        self._remember(progress, run)
        with watch("broadcast"):
            messages = Messages(method, progress.state, self.names, self._config.transport)
            sent, failed = self._send(messages, progress.round, lr)
            self._asked(sent, run)
        with watch("local"):
            came = self._wait(progress.round)
        with watch("collect"):
            record = self._collect(run, progress, came, failed)
        return {"asked": len(sent), **record, "bytes_down": sum(map(len, sent.values()))}

    def evaluate(self, messages: Messages, split: str) -> Summary | None:
        """The scores of those who can be reached, each on its own data."""
        orders = {name: ({"split": split}, messages.packed(name)) for name in messages}
        return self._summary(self._call("evaluate", orders, self._config.network.deadline))

    def finish(
        self,
        messages: Mapping[str, Message],
        given: Mapping[str, Mapping[str, Mapping[str, Json]]],
        name: str,
        spent: Mapping[str, Json] | None,
        ended: int | None = None,
    ) -> tuple[Summary | None, dict[str, Reply]]:
        """Each client finishes, scores its personal model on its test split and writes it to its own disk.

        Args:
            messages: its `message`, and that of each run that the method starts from.
            given: by client, of each such run its token (`run`) and the memory to take there (`after`).
            name: of the folder for personal models.
            spent: what the run spent of its clients' privacy, for the models' cards.
            ended: the round after which the run has ended before its last one, if it has.
        """
        common: dict[str, Json] = {"name": name, "spent": spent} | ({} if ended is None else {"ended": ended})
        orders = {name: ({**common, "given": given.get(name, {})}, pack(sent)) for name, sent in messages.items()}
        # Without it there is no result, so who is slow is waited for, but not for long where the others have answered.
        network = self._config.network
        replies = self._call("finish", orders, network.patience, quiet=network.deadline)
        return self._summary(replies), replies

    def spent(self, config: Config, round: int) -> dict[str, Json]:
        """See `Clients`. Noisy steps are counted at the nodes, and the largest epsilon is what they say."""
        # Answers that never came count, since they were asked for.
        budget = spent(config, round, lambda rounds: max(self._known["asked"].values(), default=0), ())
        if config.privacy.by_example:
            known = [value for value in self._known["epsilon"].values() if value is not None]
            whole = len(known) == len(self._known["epsilon"])
            budget["epsilon"] = max(known, default=0.0) if whole else None
        return budget

    def answered(self, client: str) -> int:
        """The round of the client's last answer, hence the version of its memory; 0: none."""
        return self._known["answered"].get(client, 0)

    def take(self, progress: Progress) -> None:
        """Go on from this progress, e.g. that of the best round."""
        self._known = known_of(progress)

    def _remember(self, progress: Progress, run: Run) -> None:
        """Keep in mind the memories that this run's checkpoints refer to."""
        known = self._known = known_of(progress)
        known["kept"][str(progress.round - 1)] = dict(known["answered"])
        checkpoints = {str(round) for round in rounds_in(run.checkpoints.folder)}
        known["kept"] = {round: versions for round, versions in known["kept"].items() if round in checkpoints}

    def _asked(self, messages: Mapping[str, bytes], run: Run) -> None:
        """Take down who was asked, and what each was sent."""
        run.digests.sent(messages)
        for name in messages:
            self._known["asked"][name] = self._known["asked"].get(name, 0) + 1

    def _memory(self, client: str) -> dict[str, Json]:
        """Of an order to train: from which memory the client goes on, and which ones it must keep."""
        kept = {versions.get(client, 0) for versions in self._known["kept"].values()}
        return {"after": self.answered(client), "kept": sorted(kept)}

    def _cohort(self, round: int) -> list[str]:
        idle = self._idle(round)
        if self._central:
            drawn = Poisson(self.names, self._config.participation, self._secret).asks(round)
            return [ask.client for ask in drawn if ask.client in idle]
        return sample(self._config.training_seed, round, idle, self.cohort_size)

    def _idle(self, round: int) -> list[str]:
        """The clients that are there and not at work; waits until there is one, or one at work."""
        while True:
            self.roster.greet()
            nodes = self._link.nodes()
            busy = {requested.client for requested in self._waiting.values()}
            idle = [name for name in self.names if name not in busy and self.roster.node.get(name) in nodes]
            if idle or busy:
                return idle
            self.roster.say_once(f"no client is there for round {round}; waiting")
            time.sleep(_PAUSE)

    def _send(self, messages: Messages, round: int, lr: float) -> tuple[dict[str, bytes], list[tuple[str, str]]]:
        """Order the cohort of a round to train, and wait for its answers from now on; by client what it is sent, and
        who could not be sent it, and why."""
        sent, failed, orders, expected = dict[str, bytes](), [], [], []
        common: dict[str, Json] = {"kind": "train", "run": self._token, "round": round, "lr": lr}
        for name in self._cohort(round):
            content = sent[name] = messages.packed(name)
            given = messages.given(content, self.roster.examples[name])
            expected.append(given)
            orders.append(Order(name, {**common, **self._memory(name)}, content, size_of(given.skeleton)))
        asks, since = self._bundles.send(orders), time.monotonic()
        for order, given, ask in zip(orders, expected, asks, strict=True):
            if ask is None:
                failed.append((order.client, "the order could not be sent"))
                continue
            down, most = len(order.content), 2 * order.answer + _SLACK
            self._waiting[ask] = PendingOrder(order.client, round, ask, since, down, most, given)
        return sent, failed

    def _call(
        self, kind: str, asked: Mapping[str, tuple[Mapping[str, Json], bytes]], seconds: float, quiet: float = math.inf
    ) -> dict[str, Reply]:
        """By client, see `_replies`; who cannot be reached has a reply that says so."""
        nodes = set(self._link.nodes())
        common = {"kind": kind, "run": self._token}
        orders = [
            Order(name, {**common, "after": self.answered(name), **own}, content)
            for name, (own, content) in asked.items()
            if self.roster.node.get(name) in nodes
        ]
        replies = {name: Reply({"error": "it is not there"}) for name in asked}
        for order, reply in zip(orders, self._replies(self._bundles.send(orders), seconds, quiet), strict=True):
            if reply.error:
                self._forgot(order.client, reply)
                self._say(f"{order.client}: {kind}: {reply.error}")
            replies[order.client] = reply
        return replies

    def _replies(self, asks: Sequence[str | None], seconds: float, quiet: float = math.inf) -> list[Reply]:
        """The reply to each of these orders that comes in so many seconds, and at most `quiet` seconds after the last
        one, or one that says why there is none."""
        awaited = {ask for ask in asks if ask}
        came = self._await(awaited, time.monotonic() + seconds, quiet)
        self._bundles.forget(awaited - came.keys())
        replies = []
        for ask in asks:
            reply = came.get(ask or "", Reply({"error": f"no reply in {min(seconds, quiet):g} s"}))
            stale = not reply.error and reply.content.get("ask") != ask
            replies.append(Reply({"error": "a stale reply"}) if stale else reply)
        return replies

    def _await(
        self,
        asks: Collection[str],
        until: float,
        quiet: float = math.inf,
        enough: Callable[[Collection[str]], bool] = lambda came: False,
    ) -> dict[str, Reply]:
        """The replies that come until a time, `quiet` seconds after the last one, or until there are `enough`."""
        came: dict[str, Reply] = {}
        last = math.inf
        while True:
            new = self._bundles.receive(set(asks) - came.keys())
            came |= new
            now = time.monotonic()
            last = now if new else last
            if len(came) == len(asks) or enough(came) or now > min(until, last + quiet):
                return came
            time.sleep(_PAUSE)

    def _forgot(self, name: str, reply: Reply) -> None:
        """A client that has lost its memory begins again, as one that never answered."""
        if reply.content.get("code") == "forgot":
            self._known["answered"].pop(name, None)

    def _summary(self, replies: Mapping[str, Reply]) -> Summary | None:
        assert self._config.eval.metric is not None  # the server's driver fills the task's own in
        return summary_of(self._config.eval.metric, replies)

    def _wait(self, round: int) -> list[tuple[PendingOrder, Reply]]:
        """What comes before the round ends, of this round's answers and of earlier ones."""
        settings = self._config.network
        asks = {ask for ask, requested in self._waiting.items() if requested.round == round}

        def enough(came: Collection[str]) -> bool:
            return len(came) >= settings.enough if settings.enough else asks.issubset(came) and bool(came)

        came = self._await(self._waiting.keys(), time.monotonic() + settings.deadline, enough=enough)
        return [(self._waiting.pop(ask), reply) for ask, reply in came.items()]

    def _collect(
        self, run: Run, progress: Progress, came: list[tuple[PendingOrder, Reply]], failed: list[tuple[str, str]]
    ) -> dict[str, Json]:
        """Put what came on its way, and log each client's line, in the order of the names."""
        up = refused = 0
        losses = []
        for requested, reply in sorted(came, key=lambda item: (item[0].client, item[0].round)):
            if reply.error:
                self._forgot(requested.client, reply)
                failed.append((requested.client, reply.error))
                continue
            up += len(reply.answer)
            if flaw := flaw_of(requested, reply):
                refused += 1
                log_event(run, progress.round, requested.client, "refused upload", flaw)
                continue
            facts: dict[str, Json] = {"examples": requested.given.examples}
            if (loss := reply.number("loss", -LARGEST, LARGEST)) is not None:
                losses.append(loss)
                facts |= {"loss": loss, "steps": reply.content.get("steps")}
            if self._config.privacy.by_example:
                epsilon = reply.number("epsilon", 0, 1e9)  # None: infinite, or it does not say
                facts["epsilon"] = self._known["epsilon"][requested.client] = epsilon
            facts |= {"bytes_up": len(reply.answer), "bytes_down": requested.down}
            row, weight = run.checkpoints.store.row(reply.answer), self.roster.weight(requested.client, self.names)
            item = InFlight(requested.client, requested.round, progress.round, weight, row, requested.given)
            progress.send(item, run, facts)
            self._known["answered"][requested.client] = requested.round
        for name, reason in sorted(failed):
            log_event(run, progress.round, name, "client failed", reason)
        late = self._late(run, progress.round)
        counts = {"failed": len(failed), "dropped_out": 0, "bytes_up": up, "refused": refused, "late": late}
        return counts | ({"loss": rounded(sum(losses) / len(losses))} if losses else {})

    def _late(self, run: Run, round: int) -> int:
        """Log who has not answered this round in time, and give up those who have not for long; how many are late.
        Under central privacy nothing counts in a later round than that whose sample it is of."""
        settings, now = self._config.network, time.monotonic()
        late = sum(requested.round == round for requested in self._waiting.values())
        for ask, requested in list(self._waiting.items()):
            if self._central or now - requested.since > settings.patience:
                del self._waiting[ask]
                self._bundles.forget([ask])
                reason = f"nothing came in {now - requested.since:.0f} s for what round {requested.round} asked"
                log_event(run, round, requested.client, "given up", reason)
            elif requested.round == round:
                log_event(run, round, requested.client, "late", "the round ended without its answer")
        return late
