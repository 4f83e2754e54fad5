"""What every method must do, one check each, and their names: `examine` tries a method in the federations of
`federation`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from llm_fed import methods
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError
from llm_fed.methods import defaults_of
from llm_fed.settings.plugins import place_of
from llm_fed.state import State
from llm_fed.state.wire import pack, unpack
from llm_fed.testing.compare import Failed, alike, close, close_runs, equal_runs, same
from llm_fed.testing.federation import ADAPTERS, MODELS, ROUNDS, SIZES, Outcome, Setup, Stopped, go


@dataclass(frozen=True)
class Slack:
    """Where a method may differ from others by more than rounding."""

    order: float = 1e-12  # of the server's state, by the order of the uploads: more where it adds up float32
    bytes: float = 0.0  # of a message's size from round to round, as a share: where it depends on what was learned
    rounding: float = 2e-4  # of float32: AdamW makes a step of up to lr of a gradient as small as its rounding


@dataclass(frozen=True)
class Check:
    """One property of a method, tried on an uninterrupted run, which it leaves as it was."""

    run: Callable[[Outcome, Path, Slack], None]
    see: str  # where the property is described
    fused_only: bool = False  # it says something of federations alone that train fused

    def __call__(self, whole: Outcome, folder: Path, slack: Slack = Slack()) -> None:  # noqa: B008  frozen
        """Raises: Failed, or whatever the method raises."""
        with whole.undone():
            self.run(whole, folder, slack)


CHECKS: dict[str, Check] = {}  # by what they say


def check(says: str, see: str, fused_only: bool = False) -> Callable[[Callable[[Outcome, Path, Slack], None]], None]:
    """Enters a function into CHECKS."""

    def enter(run: Callable[[Outcome, Path, Slack], None]) -> None:
        CHECKS[says] = Check(run, see, fused_only)

    return enter


@check("every message survives the wire", "Message in llm_fed/state/wire.py")
def _wire(whole: Outcome, folder: Path, slack: Slack) -> None:
    """Unpacked and packed again gives the same bytes: nothing is lost, and only messages are ever sent or kept."""
    sent = {f"broadcast to {name}": whole.method.broadcast(whole.state, name) for name in whole.clients}
    uploads = {f"upload of {upload.client}": upload.content for upload in whole.uploads()}
    whole.ask("finish", whole.messages())
    memories = {f"memory of {name}": dict(site.memory) for name, site in whole.clients.items()}
    for what, message in {"server's state": whole.state, **sent, **uploads, **memories}.items():
        same(f"the {what}, unpacked and packed again", unpack(pack(message)), message)


@check("the server's step is pure", "Method.server_update: state goes in, state comes out")
def _purity(whole: Outcome, folder: Path, slack: Slack) -> None:
    uploads = whole.uploads()
    given = {"state": whole.state, "uploads": {upload.client: upload.content for upload in uploads}}
    before, settings = pack(given), deepcopy(vars(whole.method))  # with what is no field
    first, second = whole.serve(whole.state, uploads), whole.serve(whole.state, uploads)
    same("what server_update was given, after it", given, unpack(before))
    same("the result of the second of two equal calls of server_update", second, first)
    if vars(whole.method) != settings:
        raise Failed(f"server_update changed the method itself: it has {vars(whole.method)}, and had {settings}")


@check("a round in which nothing arrives is a step, too", "Method.server_update: uploads may be empty")
def _nothing(whole: Outcome, folder: Path, slack: Slack) -> None:
    state = whole.serve(whole.state, [])
    for name in whole.clients:
        sent, usual = whole.method.broadcast(state, name), whole.method.broadcast(whole.state, name)
        alike(f"what {name} is sent after a round without uploads", sent, usual)


@check("the order of uploads does not matter", "Method.server_update, and by_arrival where the order is to matter")
def _order_of_uploads(whole: Outcome, folder: Path, slack: Slack) -> None:
    uploads = whole.uploads()
    one, other = whole.serve(whole.state, uploads), whole.serve(whole.state, uploads[::-1])
    close("the state of uploads in reverse order", other, one, slack.order)


@check("the order of clients does not matter", "Site: draws depend on (seed, round, client) alone")
def _order_of_clients(whole: Outcome, folder: Path, slack: Slack) -> None:
    close_runs(whole.again(folder, order=("c2", "c0", "c1")), whole, 1e-10)


@check(
    "the same seed gives the same run, another seed another",
    "llm_fed/basics/rng.py: every draw comes from the run's seed",
)
def _replay(whole: Outcome, folder: Path, slack: Slack) -> None:
    equal_runs(whole.again(folder / "again"), whole)
    (first, *_), (other,) = whole.losses(), whole.again(folder / "other", seed=1, rounds=1).losses()
    if other == first:
        raise Failed(f"with seeds 0 and 1 the first round has the same loss, {first}")


@check(
    "killed in every round but the first and continued is uninterrupted",
    "Method: what survives a round is in the server's state or in client.memory",
)
def _resume(whole: Outcome, folder: Path, slack: Slack) -> None:
    """One run, which each time that it is continued dies a round later."""
    for stop in range(1, ROUNDS):
        try:
            whole.again(folder, stop_after=stop)
        except Stopped:
            continue
        raise Failed(f"no client was asked after round {stop}, so nothing could be stopped there")
    equal_runs(whole.again(folder), whole)


def _fused(per_pass: int, whole: Outcome, folder: Path, slack: Slack) -> None:
    close_runs(whole.again(folder, per_pass=per_pass), whole, 1e-10)


_ALONE = "Site: a client's work depends on its own data, memory and message alone"
for _per_pass in (1, 2):
    check(f"all clients at once is {_per_pass} at a time", _ALONE, fused_only=True)(partial(_fused, _per_pass))


@check("all clients at once is 1 at a time in float32", _ALONE, fused_only=True)
def _fused_in_float32(whole: Outcome, folder: Path, slack: Slack) -> None:
    fused = whole.again(folder / "fused", dtype=torch.float32)
    alone = whole.again(folder / "alone", dtype=torch.float32, per_pass=1)
    close_runs(fused, alone, slack.rounding)


@check("the loss falls", "Method.client_update")
def _falls(whole: Outcome, folder: Path, slack: Slack) -> None:
    losses = whole.losses()
    if len(losses) < ROUNDS:
        raise Failed(f"in {ROUNDS - len(losses)} of {ROUNDS} rounds no client trained (await client.fit)")
    if not losses[-1] < losses[0] - whole.setup.falls:
        raise Failed(f"the rounds' mean losses are {losses}; expected a fall by at least {whole.setup.falls}")


@check("broadcast depends on its arguments alone", "Method.broadcast")
def _broadcast(whole: Outcome, folder: Path, slack: Slack) -> None:
    before = pack(whole.state)
    sent = {name: whole.method.broadcast(whole.state, name) for name in whole.clients}
    again, state = methods.build(whole.settings), unpack(before)
    for name in reversed(whole.clients):
        same(f"what a new object sends {name}, asked in another order", again.broadcast(state, name), sent[name])
    same("the server's state after broadcast", whole.state, unpack(before))


def _personalize(finished: bool, whole: Outcome, folder: Path, slack: Slack) -> None:
    """No training, no memory written, the message left alone, and a state of what `wrap` built."""
    messages = whole.messages()
    if finished:
        whole.ask("finish", messages)
    before, memories = pack(messages), whole.memories
    whole.runtime.take_work()
    first, second = whole.ask("personalize", messages), whole.ask("personalize", messages)
    if tokens := whole.runtime.take_work().tokens:
        raise Failed(f"personalize trained, on {tokens} tokens or pictures")
    same("what personalize was sent, after it", messages, unpack(before))
    for name, memory in whole.memories.items():
        same(f"the memory of {name} after personalize", unpack(memory), unpack(memories[name]))
    same("the result of the second of two equal calls of personalize", second, first)
    for name, site in whole.clients.items():
        entries, expected = (State(state.layout, state.row) for state in (first[name], site.initial()))
        alike(f"what personalize gives {name}, for which client.assemble makes a whole state,", entries, expected)


for _finished in (False, True):
    check(
        f"personalize only computes{', after finish, too' if _finished else ''}",
        "Method.personalize: computes, never trains, never writes memory",
    )(partial(_personalize, _finished))


@check("finish touches memory alone", "Method.finish: what it learns goes into client.memory")
def _finish(whole: Outcome, folder: Path, slack: Slack) -> None:
    messages = whole.messages()
    given = {"messages": messages, "state": whole.state}
    before = pack(given)
    changing = dict.fromkeys(("memory", "round", "losses", "fits"))  # the loop's own notes on a round
    rest = {name: {**vars(site), **changing} for name, site in whole.clients.items()}
    for name, answer in whole.ask("finish", messages).items():
        if answer is not None:
            raise Failed(f"finish returns {answer!r:.60} at {name}; expected None")
    same("what there was before finish, after it", given, unpack(before))
    for name, site in whole.clients.items():
        changed = [key for key, value in vars(site).items() if key not in changing and value != rest[name].get(key)]
        if changed:
            raise Failed(f"finish changed {', '.join(changed)} of {name}")


@check("bytes are those of the messages", "Method.broadcast and client_update: what they return travels")
def _bytes(whole: Outcome, folder: Path, slack: Slack) -> None:
    """What is counted is what is sent; a method whose messages are empty shares nothing."""
    lines = whole.records("client")
    if len(lines) != ROUNDS * len(SIZES):
        raise Failed(f"{len(lines)} answers came; expected {ROUNDS * len(SIZES)}")
    messages, uploads = whole.messages(), whole.uploads()
    shares = messages["c0"] is not None
    for upload in uploads:
        sizes = {"bytes_down": len(pack(messages[upload.client])), "bytes_up": len(pack(upload.content))}
        for key, size in sizes.items():
            counted = [line[key] for line in lines if line["client"] == upload.client]
            if any(abs(each - size) > slack.bytes * size for each in counted):
                raise Failed(
                    f"{key} of {upload.client} were {counted} in the rounds, and are {size} after them; "
                    "expected equal sizes (or say --bytes-vary)"
                )
        if (upload.content is not None) != shares:
            does = "is sent something but sends nothing" if shares else "is sent nothing but sends something"
            raise Failed(f"{upload.client} {does}")
        if shares and min(sizes.values()) <= whole.setup.least:
            raise Failed(f"a message has {min(sizes.values())} bytes; expected more than {whole.setup.least}")


@check("uploads look as upload_like says", "Method.upload_like")
def _upload_like(whole: Outcome, folder: Path, slack: Slack) -> None:
    for line in whole.records("round"):
        counts = {key: line[key] for key in ("arrived", "refused", "failed")}
        if counts != {"arrived": len(SIZES), "refused": 0, "failed": 0}:
            why = "; ".join(f"{event['client']}: {event['reason']}" for event in whole.records("event")[:1])
            raise Failed(f"of {len(SIZES)} uploads of round {line['round']}: {counts} ({why})")
    for upload in whole.uploads():
        message = whole.method.broadcast(whole.state, upload.client)
        alike(f"the upload of {upload.client}", upload.content, whole.method.upload_like(message))


@check("it says its paper, what it does, and defaults", "Method.paper; fields with defaults, as in the paper")
def _described(whole: Outcome, folder: Path, slack: Slack) -> None:
    kind = type(whole.method)
    if not kind.paper:
        raise Failed('it has no paper; expected e.g. paper: ClassVar[str] = "FedAvg (McMahan et al. 2017)"')
    if not kind.__doc__ or kind.__doc__.startswith(f"{kind.__name__}("):  # which dataclass writes by itself
        raise Failed(f"{kind.__name__} has no docstring")
    given = {key: value for key, value in whole.settings.items() if key not in defaults_of(kind)}
    values = asdict(methods.build(given))
    for key, default in defaults_of(kind).items():
        if values[key] != default:
            raise Failed(f"{key} is {values[key]!r} where its default is {default!r}")


def examine(
    settings: Mapping[str, Json],
    local: Sequence[str] = (),
    slack: Slack = Slack(),  # noqa: B008  frozen
    say: Callable[[str], None] = print,
) -> bool:
    """Whether a method passes all checks in every federation whose models it trains; says each, and what is wrong.
    UserError: no such method or setting, or the method has no rounds or trains no models that the battery has.
    `settings`: of the method, with its name. `local`: `local.key=value` words about how clients train, for a method
    that asks for it."""
    method = methods.build(settings)
    if parents := " and ".join(parent.name for parent in method.parents):
        raise UserError(
            f"{settings['name']} merges runs of {parents} and has no rounds of its own, so the battery cannot test it"
        )
    results = []
    for setup in (ADAPTERS.training(local), MODELS.training(local)):
        if refused := setup.refusal(method, settings):
            say(f"{setup.words}: not tried, as the method refuses them: {refused}")
            continue
        say(f"{setup.words}:")
        results.append(all([*_tried(settings, setup, slack, say)]))
    if not results:
        raise UserError(f"{settings['name']} can train none of the battery's models")
    return all(results)


def _tried(settings: Mapping[str, Json], setup: Setup, slack: Slack, say: Callable[[str], None]) -> Iterator[bool]:
    """Whether each check passes; those of one federation."""

    def passes(says: str, see: str, run: Callable[[], object]) -> bool:
        try:
            run()
        except Exception as error:
            say(f"  FAIL  {says}: {_explained(error, settings)}; see {see}")
            return False
        say(f"  ok    {says}")
        return True

    with TemporaryDirectory() as folder:
        outcomes: list[Outcome] = []
        yield passes("it runs", "llm_fed/method/", lambda: outcomes.append(go(settings, setup, Path(folder, "whole"))))
        for number, (says, each) in enumerate(CHECKS.items() if outcomes else ()):
            if setup.fused or not each.fused_only:
                where = Path(folder, str(number))
                yield passes(says, each.see, lambda each=each, where=where: each(outcomes[0], where, slack))  # type: ignore[misc]


def _explained(error: Exception, settings: Mapping[str, Json]) -> str:
    """What a check found, or what the method raised, and where."""
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, Failed | UserError):
        cause = cause.__cause__
    if isinstance(cause, Failed | UserError):
        return str(cause)
    location = place_of(cause, methods.find(str(settings["name"])).__module__)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())} ({location})"
