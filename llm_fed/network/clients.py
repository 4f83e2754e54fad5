"""Clients on other machines: the server's side of a network, whatever carries the orders.

What a client is ordered to do, as JSON beside a packed message (`node.Node` does it):

    hello                                                             -> clients with their numbers of examples, base
    train      run, client, round, lr, after, kept, ask; message      -> examples, loss, steps; upload
    evaluate   run, client, after, split, ask; message                -> score, loss
    finish     run, client, after, name, given, spent, ask; messages  -> score, loss, recipe

Time is real here: a round ends when everybody whom it asked has answered, or enough have, or at its deadline. What
comes later counts in the round that it reaches, with its staleness.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llm_fed.config import Config
from llm_fed.eval.scores import Summary, summarize
from llm_fed.federation.clients import broadcast
from llm_fed.federation.privacy import central
from llm_fed.federation.progress import InFlight, Progress
from llm_fed.federation.schedule import Poisson, cohort_size, sample
from llm_fed.messages.outline import skeleton
from llm_fed.messages.wire import Message, pack, unpack
from llm_fed.method import Method
from llm_fed.network.link import Asked, Link, Reply, flaw_of
from llm_fed.network.roster import Roster
from llm_fed.runs.folder import Run, log_event, rounded
from llm_fed.runs.tracking import Watch

_PAUSE = 0.5  # seconds between two looks for answers
_SLACK = 65536  # bytes by which an upload's names may be longer than expected before it is not even read


def _nothing() -> dict[str, Any]:
    """What is known of the clients before the first round: by client the round of its last answer, and how often it was
    asked; by checkpoint those rounds."""
    return {"answered": {}, "asked": {}, "kept": {}}


class RemoteClients:
    """The clients of a federation over a network.

    Args:
        link: carries orders.
        config: the run's.
        token: of the run; nodes keep its memories under this name.
        secret: the seed of sampling under central privacy, which clients must not know.
        say: is told what an operator wants to know.
    """

    def __init__(
        self, link: Link, config: Config, token: str, secret: int, say: Callable[[str], None] = lambda text: None
    ):
        self.sites: dict[str, Any] = {}  # no client's memory is here
        self._secret, self._central = secret, central(config.privacy)
        self._link, self._config, self._token, self._say = link, config, token, say
        self.roster = Roster(link, config.network, say)
        self._waiting: dict[str, Asked] = {}
        self._asks = 0
        self._known: dict[str, Any] = {}
        self.names: tuple[str, ...] = ()

    def gather(
        self,
        base: str,
        before: Sequence[str] = (),
        owners: Mapping[str, int] | None = None,
        examples: Mapping[str, int] | None = None,
    ) -> None:
        """Wait for the clients that the configuration names, or for as many as it says, and fix their order.

        Args:
            base: the fingerprint that the base of every node must have.
            before: who took part when this run was begun.
            owners: at which node each client was then; from another one it is not accepted.
            examples: how many each client said then that it has; with another number it is not accepted.
        """
        self.roster.owners |= owners or {}
        self.roster.examples |= examples or {}
        self.roster.base, configured = base, self._config.network.clients
        if not isinstance(configured, int):
            configured = tuple(self.roster.homes)
        wanted = before or configured
        number = wanted if isinstance(wanted, int) else len(wanted)
        same = configured <= len(before) if isinstance(configured, int) else {*configured} == {*before}
        if before and not same:
            self._say(
                f"this run began with {', '.join(before)} and goes on with them, whatever network.clients says now; "
                "fresh=true begins anew"
            )
        told = -1
        while True:
            self.roster.greet()
            known = self.roster.node
            there = sorted(known) if isinstance(wanted, int) else [name for name in wanted if name in known]
            if len(there) >= number:
                self.names = tuple(there)
                self.roster.say_weights(there)
                return
            if told != len(there):
                told = len(there)
                missing = "" if isinstance(wanted, int) else f": {', '.join(n for n in wanted if n not in there)}"
                self._say(f"{len(there)} of {number} clients are there; waiting for the others{missing}")
            time.sleep(_PAUSE)

    @property
    def cohort_size(self) -> int:
        """How many are asked in one round."""
        return cohort_size(self._config.participation, len(self.names))

    def exchange(self, method: Method, progress: Progress, lr: float, run: Run, watch: Watch) -> dict[str, Any]:
        known, round = self._remember(progress, run), progress.round
        with watch("broadcast"):
            cohort = self._cohort(round)
            messages = broadcast(method, progress.state, cohort, self._config.transport.down)
            run.digests.sent(messages)
            for name in cohort:
                known["asked"][name] = known["asked"].get(name, 0) + 1
            orders = {
                name: {
                    "kind": "train", "run": self._token, "client": name, "round": round, "lr": lr,
                    "after": known["answered"].get(name, 0),
                    "kept": sorted({kept.get(name, 0) for kept in known["kept"].values()}),
                }
                for name in cohort
            }  # fmt: skip
        failed: list[tuple[str, str]] = []
        with watch("local"):
            for name, (id, ask, since) in self._send(orders, messages).items():
                if id is None:
                    failed.append((name, "the order could not be sent"))
                    continue
                like = method.upload_like(unpack(messages[name]))
                expected, most = skeleton(like), 2 * len(pack(like)) + _SLACK
                self._waiting[id] = Asked(
                    name, round, ask, since, len(messages[name]), expected, most, self.roster.examples[name]
                )
            came = self._wait(round)
        with watch("collect"):
            record = self._collect(run, progress, came, failed)
        return {"asked": len(cohort), **record, "bytes_down": sum(map(len, messages.values()))}

    def evaluate(self, messages: Mapping[str, Message], split: str) -> Summary | None:
        """The scores of those who can be reached, each on its own data."""
        replies = self._call(
            "evaluate", {n: {"split": split} for n in messages}, {n: pack(m) for n, m in messages.items()}
        )
        return self._summary(replies)

    def finish(
        self,
        messages: Mapping[str, Message],
        given: Mapping[str, Mapping[str, Any]],
        name: str,
        spent: Mapping[str, Any] | None,
    ) -> tuple[Summary | None, dict[str, Reply]]:
        """Each client finishes, scores its personal model on its test split and writes it to its own disk.

        Args:
            messages: what each client is sent: its `message`, and that of each run that the method starts from.
            given: by client, of each such run its token (`run`) and the memory to take there (`after`).
            name: of the folder for personal models.
            spent: what the run spent of its clients' privacy, for the models' cards.
        """
        orders = {client: {"name": name, "given": given.get(client, {}), "spent": spent} for client in messages}
        replies = self._call("finish", orders, {client: pack(sent) for client, sent in messages.items()})
        return self._summary(replies), replies

    def most_asked(self, rounds: int) -> int:
        """How often a client was asked until now, at most; answers that never came count, since they were sent."""
        return max(self._known["asked"].values(), default=0)

    def answered(self, client: str) -> int:
        """The round of the client's last answer, hence the version of its memory; 0: none."""
        return self._known["answered"].get(client, 0)

    def take(self, progress: Progress) -> None:
        """Go on from this progress, e.g. that of the best round."""
        self._known = progress.elsewhere or _nothing()

    def _remember(self, progress: Progress, run: Run) -> dict[str, Any]:
        """What is known of the clients, with the memories that this run's checkpoints refer to."""
        if progress.elsewhere is None:
            progress.elsewhere = _nothing()
        known = self._known = progress.elsewhere
        known["kept"][str(progress.round - 1)] = dict(known["answered"])
        checkpoints = {str(round) for round in run.checkpoints.rounds()}
        known["kept"] = {round: versions for round, versions in known["kept"].items() if round in checkpoints}
        return known

    def _cohort(self, round: int) -> list[str]:
        idle = self._idle()
        if self._central:
            drawn = Poisson(self.names, self._config.participation, self._secret).asks(round)
            return [ask.client for ask in drawn if ask.client in idle]
        return sample(self._config.training_seed, round, idle, self.cohort_size)

    def _idle(self) -> list[str]:
        """The clients that are there and not at work; waits until there is one, or one at work."""
        told = False
        while True:
            self.roster.greet()
            there = self._link.nodes()
            busy = {asked.client for asked in self._waiting.values()}
            idle = [name for name in self.names if name not in busy and self.roster.node.get(name) in there]
            if idle or busy:
                return idle
            if not told:
                told = True
                self._say("no client is there; waiting")
            time.sleep(_PAUSE)

    def _send(
        self, orders: Mapping[str, Mapping[str, Any]], contents: Mapping[str, bytes]
    ) -> dict[str, tuple[str | None, str, float]]:
        """By client the id of its order, what its reply must name as `ask`, and when it was sent."""
        asks = {}
        for name in orders:
            self._asks += 1
            asks[name] = f"{time.time_ns()}-{self._asks}"
        packed = [
            (self.roster.node[name], {**order, "ask": asks[name]}, contents[name]) for name, order in orders.items()
        ]
        ids, now = self._link.send(packed, self._config.network.patience), time.monotonic()
        return {name: (id, asks[name], now) for name, id in zip(orders, ids, strict=True)}

    def _await(self, ids: Collection[str], seconds: float) -> dict[str, Reply]:
        """The replies to these orders that come in so many seconds."""
        replies: dict[str, Reply] = {}
        until = time.monotonic() + seconds
        while len(replies) < len(ids):
            replies |= self._link.receive(set(ids) - replies.keys())
            if len(replies) == len(ids) or time.monotonic() > until:
                break
            time.sleep(_PAUSE)
        return replies

    def _call(
        self, kind: str, orders: Mapping[str, Mapping[str, Any]], contents: Mapping[str, bytes]
    ) -> dict[str, Reply]:
        """Replies by client; who cannot be reached, or does not reply by the deadline, has one that says so."""
        there = set(self._link.nodes())
        reached = {name: order for name, order in orders.items() if self.roster.node.get(name) in there}
        common = {"kind": kind, "run": self._token}
        sent = self._send(
            {
                name: {**common, "client": name, "after": self.answered(name), **order}
                for name, order in reached.items()
            },
            contents,
        )
        settings = self._config.network
        seconds = settings.patience if kind == "finish" else settings.deadline  # without the end there is no result
        found = self._await({id for id, _, _ in sent.values() if id}, seconds)
        replies = {name: Reply({"error": "it is not there"}) for name in orders}
        for name, (id, ask, _) in sent.items():
            reply = found.get(id or "", Reply({"error": f"no reply in {seconds:g} s"}))
            replies[name] = (
                reply if reply.error or reply.content.get("ask") == ask else Reply({"error": "a stale reply"})
            )
            if replies[name].error:
                self._forgot(name, replies[name])
                self._say(f"{name}: {kind}: {replies[name].error}")
        return replies

    def _forgot(self, name: str, reply: Reply) -> None:
        """A client that has lost its memory begins again, as one that never answered."""
        if reply.content.get("forgot") is True:
            self._known["answered"].pop(name, None)

    def _summary(self, replies: Mapping[str, Reply]) -> Summary | None:
        scores = {name: reply.score for name, reply in replies.items() if reply.score is not None}
        metric = self._config.eval.metric
        assert metric is not None  # the server's driver fills the task's own in
        losses = {name: replies[name].loss for name in scores if "loss" in replies[name].content}
        return summarize(metric, scores, losses) if scores else None

    def _wait(self, round: int) -> list[tuple[Asked, Reply]]:
        """What comes before the round ends, of this round's answers and of earlier ones.

        Under central privacy nothing counts in a later round than that whose sample it is of.
        """
        settings = self._config.network
        came: dict[str, Reply] = {}
        until = time.monotonic() + settings.deadline
        while True:
            came |= self._link.receive(self._waiting.keys() - came.keys())
            mine = {id for id, asked in self._waiting.items() if asked.round == round}
            enough = len(came) >= settings.enough if settings.enough else mine <= came.keys() and (mine or came)
            if enough or len(came) == len(self._waiting) or time.monotonic() > until:
                break
            time.sleep(_PAUSE)
        return [(self._waiting.pop(id), reply) for id, reply in came.items()]

    def _collect(
        self, run: Run, progress: Progress, came: list[tuple[Asked, Reply]], failed: list[tuple[str, str]]
    ) -> dict[str, Any]:
        """Put what came on its way, and log each client's line, in the order of the names."""
        up = refused = 0
        losses = []
        for asked, reply in sorted(came, key=lambda item: (item[0].client, item[0].round)):
            if reply.error:
                self._forgot(asked.client, reply)
                failed.append((asked.client, reply.error))
                continue
            up += len(reply.answer)
            flaw = flaw_of(asked, reply)
            if flaw:
                refused += 1
                log_event(run, progress.round, asked.client, "refused upload", flaw)
                continue
            loss = reply.content.get("loss")
            row = run.checkpoints.store.row(reply.answer)
            weight = self.roster.weight(asked.client, self.names)
            progress.in_flight.append(InFlight(asked.client, asked.round, progress.round, weight, row, asked.expected))
            self._known["answered"][asked.client] = asked.round
            record: dict[str, Any] = {"kind": "client", "round": asked.round, "client": asked.client}
            if loss is not None:
                losses.append(loss)
                record |= {"loss": loss, "steps": reply.content.get("steps")}
            record |= {"examples": asked.examples, "bytes_up": len(reply.answer), "bytes_down": asked.down}
            run.log(record | {"staleness": progress.round - asked.round})
        for name, reason in sorted(failed):
            log_event(run, progress.round, name, "client failed", reason)
        late = self._late(run, progress.round)
        record = {"failed": len(failed), "dropped_out": 0, "bytes_up": up, "refused": refused, "late": late}
        return record | ({"loss": rounded(sum(losses) / len(losses))} if losses else {})

    def _late(self, run: Run, round: int) -> int:
        """Log who has not answered this round in time, and give up those who have not for long; how many are late."""
        settings, now = self._config.network, time.monotonic()
        late = sum(asked.round == round for asked in self._waiting.values())
        for id, asked in list(self._waiting.items()):
            if self._central or now - asked.since > settings.patience:
                del self._waiting[id]
                reason = f"nothing came in {now - asked.since:.0f} s for what round {asked.round} asked"
                log_event(run, round, asked.client, "given up", reason)
            elif asked.round == round:
                log_event(run, round, asked.client, "late", "the round ended without its answer")
        return late
