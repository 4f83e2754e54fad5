"""Several ranks: every method as in one process, shares of unequal work, and what travels. Ranks here are engines in
one process, all that they are told having become bytes; tests/runtime/test_launch.py has processes of their own."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import battery
import numpy as np
import outside
import pytest
import small_run
import tiny
import tiny_images
import torch
from equal_runs import assert_same
from image_runs import RUNS, configured
from rich.console import Console
from small_run import CLIENTS

from llm_fed import methods
from llm_fed.basics.errors import ClientError, RunError, UserError
from llm_fed.basics.rng import Secret
from llm_fed.bench.build import prepare
from llm_fed.commands import compare, section
from llm_fed.experiment import finish, run, simulation, splits
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Distillation, Features, Fit, Gradient, PerExample, Request
from llm_fed.method.site import Site
from llm_fed.models.lora import Lora
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.accelerate import Build, DistributedEngine, Shared, Worker, cost
from llm_fed.runtime.launch import Gloo, Ranks
from llm_fed.runtime.local import LocalRuntime
from llm_fed.runtime.portable import Codec, fingerprint, packages_of
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State, stack
from llm_fed.tasks.common import Encoded, Example, Picture
from llm_fed.tasks.record import TRAINING

LATE = {
    "delay": {"sigma": 0.8}, "rounds": 2, "local": {"steps": 2, "lr": 0.02, "lr_end": 0.02}, "eval": {"base": False},
}  # fmt: skip
SERVED = {"task": {"server": {"examples": 1, "each": True}}}
SETTINGS = {**battery.SETTINGS, "potara": {"samples": 2}, "fisher-merging": {"samples": 2}}
# `center` has no clients at work; those of whole models are among RUNS.
LORA_METHODS = [name for name, kind in methods.BUILTIN.items() if name not in battery.IDLE and not kind.whole_models]


class Loopback(Gloo):
    """Ranks above 0 in this process; what they are sent and answer are bytes."""

    def __init__(self, size: int, build: Callable[[], Build] = run.builder):
        self.size, self.sent = size, dict.fromkeys(range(1, size), 0)
        self.workers = {rank: Worker(build(), rank) for rank in self.sent}
        self._replies: dict[int, list[bytes]] = {rank: [] for rank in self.sent}

    def send(self, rank: int, data: bytes) -> None:
        self.sent[rank] += 1
        try:
            reply = self.workers[rank].answer(data)
        except Exception as error:
            raise AssertionError(f"rank {rank} would have died") from error
        assert reply is not None
        self._replies[rank].append(reply)

    def receive(self, rank: int) -> bytes:
        return self._replies[rank].pop(0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return tiny_images.of_two_domains(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def spread(monkeypatch) -> Callable[..., Loopback]:
    """From now on there are so many ranks."""
    monkeypatch.setattr(finish, "write_report", lambda folder: None)  # its pictures take most of the time

    def ranks(channel: Loopback | None) -> Loopback | None:
        found = Ranks(channel) if channel else None
        monkeypatch.setattr(simulation, "other_ranks", lambda: found)
        return channel

    return ranks


def some(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """As parameters, those of `quick` in every run of the tests, the others with `make long`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def in_one_and_in(size: int, config: Any, folder: Path, spread: Callable[..., Any]) -> Loopback:
    """Both runs, and that they are the same."""
    spread(None)
    run.train(config, folder / "one")
    channel = spread(Loopback(size))
    run.train(config, folder / "several")
    assert_same(folder / "one", folder / "several")
    return channel


@pytest.mark.parametrize("name", some(LORA_METHODS, ["feddpa", "feddf", "potara"]))
def test_every_method_as_in_one_process(small, tmp_path, spread, name):
    """Each kind of request, with late answers; POTARA's parents have settings of their own at the other ranks."""
    method = {"name": name, **SETTINGS.get(name, {})}
    served = {} if name in methods.MERGERS else SERVED
    local = {**LATE["local"], "optimizer": "sgd" if name == "scaffold" else "adamw"}
    config = from_dict(small.as_usual().tree(method=method, **{**LATE, "local": local}, **served))
    channel = in_one_and_in(3, config, tmp_path, spread)
    assert min(channel.sent.values()) > 2


@pytest.mark.parametrize("name", some(RUNS, ["fedproto"]))
def test_image_models_as_in_one_process_bit_by_bit(pictures, tmp_path, spread, name):
    channel = in_one_and_in(2, from_dict(configured(pictures, name, rounds=2)), tmp_path, spread)
    assert channel.sent[1] > 1 or name == "center"
    assert_same(tmp_path / "one", tmp_path / "several", tolerance=0)


def test_a_method_from_outside_and_its_own_loss_at_all_ranks(pictures, here, spread):
    """Its class and its functions travel by their names, those of other packages still do not."""
    outside.module(here, "lab.own", outside.SMOOTHED)
    tree = tiny_images.tree(pictures, rounds=2, method={"name": "lab.own:Smoothed", "amount": 0.3})
    channel = in_one_and_in(2, from_dict(tree), here, spread)
    assert channel.sent[1] > 2
    assert_same(here / "one", here / "several", tolerance=0)
    method = methods.find("lab.own:Smoothed")(amount=0.3)  # type: ignore[call-arg]
    assert packages_of(method) == ("lab",)
    packed = Codec((), ["lab"]).pack([method.loss, method])  # type: ignore[attr-defined]
    assert Codec((), ["lab"]).unpack(packed)[1] == method
    with pytest.raises(TypeError, match="lab.own:Smoothed.loss is of no package whose names may travel"):
        Codec().unpack(packed)
    for thing in (json.dumps, method):
        with pytest.raises(TypeError, match="cannot travel between processes: only .* of llm_fed or labs defines"):
            Codec((), ["labs"]).pack([thing])


def test_options_are_scored_by_all_ranks(tmp_path, small, spread):
    data = small_run.write_data(tmp_path / "data")
    for path in data.glob("*/*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "options": ["w4 w5", row["output"], "w3"]}) + "\n" for row in rows))
    task = {"path": str(data), "columns": {"options": "options"}}
    tree = small.tree(task=task, eval={"metric": "option_accuracy", "base": False}, rounds=1, method={"name": "local"})
    in_one_and_in(3, from_dict(tree), tmp_path, spread)


def test_the_base_alone_is_scored_by_all_ranks(small, tmp_path, spread):
    """With another structure than that of the method's experts."""
    changes = {**LATE, "rounds": 1, "eval": {"base": True}, "method": {"name": "pfedmoe"}}
    in_one_and_in(3, from_dict(small.tree(**changes)), tmp_path, spread)


def test_more_ranks_than_clients(small, tmp_path, spread):
    """Each client has a rank, two ranks have nothing to do but to build what they may be asked for."""
    channel = in_one_and_in(5, from_dict(small.tree(rounds=1, eval={"base": False})), tmp_path, spread)
    assert channel.sent[3] == channel.sent[4] == 1 < channel.sent[2]


def test_a_comparison_trains_its_rows_one_after_another_on_all_ranks(small, tmp_path, spread):
    config = small.config(tmp_path / "c.yaml", rounds=1, eval={"base": False})
    tables = []
    for size in (1, 2):
        channel = spread(Loopback(size) if size > 1 else None)
        table = compare.compare(section.read_rows(config, chosen=["local", "fedit"]), tmp_path / str(size))
        tables.append(table.as_json())
    assert channel.workers[1].answer(Codec().pack(["stop"])) is None
    scores = [[row["average"]["mean"] for row in table["rows"]] for table in tables]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_two_experiments_take_turns(small, spread):
    """With each its own settings at all ranks, and its own count of the work."""
    spread(None)
    ranks, found = Ranks(Loopback(3)), {}
    for optimizer in ("adamw", "sgd"):
        config = from_dict(small.tree(local={"optimizer": optimizer}))
        prepared = prepare(config, Reporter(Console(quiet=True)))
        for name, engine in (("local", None), ("spread", DistributedEngine(ranks, config, prepared.shared()))):
            runtime = LocalRuntime(engine or prepared.engine, 3)
            found[optimizer, name] = partial(trained, prepared.clients, runtime)
    for _ in range(2):
        for optimizer in ("adamw", "sgd"):
            states, tokens = found[optimizer, "local"]()
            others, counted = found[optimizer, "spread"]()
            torch.testing.assert_close(others, states, rtol=0, atol=1e-6)
            assert counted == tokens > 0


def trained(clients: dict[str, Site], runtime: LocalRuntime) -> tuple[torch.Tensor, int]:
    """The clients' adapters (K, P) after a round, and the tokens that this took."""
    for site in clients.values():
        site.begin(1, 0.1)
    states = runtime.run({id: site.fit(site.initial()) for id, site in clients.items()})
    return stack(states.values()), runtime.take_work().tokens


class Failing:
    """An engine at which one client's training fails, or everything does."""

    def __init__(self, engine: Any, client: str, error: Exception | None = None):
        self._engine, self._client, self._error = engine, client, error
        self.take_work = engine.take_work

    def execute(self, requests: Sequence[Request]) -> list[Any]:
        found = list(self._engine.execute(requests))
        for place, request in enumerate(requests):
            if isinstance(request, Fit) and request.site == self._client:
                if self._error:
                    raise self._error
                found[place] = ClientError(f"client {self._client}: no luck")
        return found


def failing_at(client: str, error: Exception | None = None) -> Build:
    build = run.builder()

    def built(config: Any, known: Any) -> Shared:
        shared = build(config, known)
        return replace(shared, engine=Failing(shared.engine, client, error))

    return built


def test_a_client_that_fails_at_another_rank_fails_alone(small, tmp_path, spread):
    spread(Loopback(3, lambda: failing_at("bob")))
    run.train(from_dict(small.tree(rounds=2, method={"name": "local"}, eval={"every": 0, "base": False})), tmp_path)
    lines = read_records(tmp_path / "metrics.jsonl")
    events = [(line["round"], line["client"], line["reason"]) for line in lines if line["kind"] == "event"]
    assert events == [(round, "bob", "ClientError: client bob: no luck") for round in (1, 2)]
    assert [line["failed"] for line in lines if line["kind"] == "round"] == [1, 1]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ZeroDivisionError("nothing"), RunError, r"^rank 1 on \S+ failed: ZeroDivisionError: nothing$"),
        (RunError("no memory"), RunError, "^no memory$"),
        (UserError("lora_C matches nothing"), UserError, "^lora_C matches nothing$"),
    ],
)
def test_what_ends_a_run_at_another_rank_ends_it_at_rank_0(small, tmp_path, spread, capfd, error, kind, text):
    """And the ranks stay in step: the next run of the same process is served."""
    channel = spread(Loopback(2, lambda: failing_at("bob", error)))
    config = from_dict(small.tree(rounds=1, eval={"every": 0, "base": False}))
    with pytest.raises(kind, match=text):
        run.train(config, tmp_path / "run")
    assert ("Traceback" in capfd.readouterr().err) == isinstance(error, ZeroDivisionError)
    channel.workers[1] = Worker(run.builder(), 1)
    run.train(config, tmp_path / "run")


def test_a_failure_at_rank_0_leaves_the_others_in_step(small, spread):
    spread(None)
    config, ranks = from_dict(small.tree()), Ranks(Loopback(3))
    prepared = prepare(config, Reporter(Console(quiet=True)))
    shared = prepared.shared()
    broken = replace(shared, engine=Failing(shared.engine, "ada", RunError("not here")))
    for engine in (DistributedEngine(ranks, config, broken), DistributedEngine(ranks, config, shared)):
        with pytest.raises(RunError, match="not here") if engine._shared is broken else nullcontext():
            trained(prepared.clients, LocalRuntime(engine, 3))


def test_other_data_at_another_rank_is_refused_before_anything_is_written(small, tmp_path, spread):
    def elsewhere() -> Build:
        build = run.builder()
        task = {"max_length": 31, "template": "alpaca-short"}
        return lambda config, known: build(replace(config, task=replace(config.task, **task)), known)

    spread(Loopback(2, elsewhere))
    with pytest.raises(UserError, match="rank 1 on .* has other examples or another base"):
        run.train(from_dict(small.tree()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def encoded(length: int) -> Encoded:
    return Encoded(list(range(length)), [False] + [True] * (length - 1))


def distance(target: float, scale: float, value: float) -> float:
    return scale * abs(value - target)


def test_what_travels_comes_back(monkeypatch):
    examples = [encoded(4), encoded(4)]
    state = State.of({"a": torch.randn(2, 3), "b": torch.randn(4)}, {"n": torch.tensor(3), "empty": torch.zeros(0)})
    optimizer, batches = Optimizer(0.1, correction=state, lr_of={"a": 0.2}), [[examples[1], examples[0]], [encoded(2)]]
    job = tiny.fit_on("c0", LORA, state, batches, optimizer, mix=(0.25, 0.75), loss=Distillation([state]),
                 private=PerExample(1.0, 0.5, 4, Secret.fresh()))  # fmt: skip
    back = Codec(examples).unpack(Codec(examples).pack(job))
    assert back.batch(0) == [examples[1], examples[0]] and back.batch(0)[0] is examples[1]
    assert back.batch(1) == [encoded(2)] and (back.site, back.structure, back.mix) == ("c0", LORA, (0.25, 0.75))
    assert back.start.equal(state) and back.teachers[0].equal(state) and back.start is not state
    assert back.private == job.private
    assert back.optimizer.lr_of == {"a": 0.2} and back.optimizer.correction.equal(state)
    errors = Codec().unpack(Codec().pack([ClientError("a"), UserError("b")]))
    assert [(type(error), str(error)) for error in errors] == [(ClientError, "a"), (UserError, "b")]
    monkeypatch.setattr("llm_fed.basics.rng.distance", distance, raising=False)
    monkeypatch.setattr(distance, "__module__", "llm_fed.basics.rng")
    sent = Codec().pack([partial(distance, 2.0, scale=3.0), partial(Lora.only, expert="x"), LORA.only])
    loss, unbound, bound = Codec().unpack(sent)
    assert loss(value=5.0) == 9.0 and unbound(LORA) == bound("x") == LORA.only("x")


LORA = Lora(2, 4, 0.0, ("q_proj",))


def test_work_on_more_tokens_counts_for_more():
    requests = [Features("a", LORA, [encoded(7), encoded(5)]), Gradient("a", LORA, State.of({}), [encoded(9)])]
    assert [cost(request) for request in requests] == [12, 9]


@pytest.mark.parametrize("item", [object(), lambda: 0, json.dumps, Codec().pack, ValueError("a"), {1, 2}])
def test_what_cannot_travel_is_refused(item):
    with pytest.raises(TypeError, match="cannot travel"):
        Codec().pack([item])


def test_equal_states_travel_once_and_known_examples_not_at_all():
    start, examples = torch.randn(5000), [encoded(1000) for _ in range(20)]
    start[7] = math.nan
    one = len(Codec(examples).pack(State.of({"a": start})))
    equal = [tiny.fit_on(f"c{k}", LORA, State.of({"a": start.clone()}), [examples], Optimizer(0.1)) for k in range(8)]
    assert len(Codec(examples).pack(equal)) < one + 16000  # a second copy would be 20000
    signed = [State.of({"a": torch.zeros(2)}), State.of({"a": -torch.zeros(2)})]
    assert [math.copysign(1, state.row[0]) for state in Codec().unpack(Codec().pack(signed))] == [1, -1]
    rows = torch.randn(3, 4)
    views = Codec().unpack(Codec().pack([rows[0], rows, rows[2]]))
    assert torch.equal(views[1][0], views[0]) and torch.equal(views[1][2], views[2])


def test_fingerprints_differ_with_any_example_pixel_or_weight():
    picture = Picture(torch.zeros(1, 2, 2, dtype=torch.uint8), 0, "0")
    lit = Picture(torch.ones(1, 2, 2, dtype=torch.uint8), 0, "0")
    torch.manual_seed(0)
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    found = [
        fingerprint([encoded(3)]), fingerprint([encoded(4)]), fingerprint([picture]), fingerprint([lit]),
        fingerprint([], one), fingerprint([], other),
    ]  # fmt: skip
    assert len(set(found)) == 6 and fingerprint([encoded(3)]) == found[0]


def test_changed_data_are_divided_alike_at_all_ranks(small, tmp_path, spread):
    """By what the run knows of its rows, which rank 0 sends."""

    def write(numbers: list[int]) -> None:
        for client, (first, second) in CLIENTS.items():
            lines = [json.dumps({"instruction": f"w{n} w20", "output": f"w{first} w{second}"}) for n in numbers]
            (tmp_path / "data" / f"{client}.jsonl").write_text("\n".join(lines))

    (tmp_path / "data").mkdir()
    write(list(range(20)))
    tree = small.tree(rounds=1, task={"path": str(tmp_path / "data")})
    spread(None)
    run.train(from_dict(tree), tmp_path / "run")
    record = splits.recall(tmp_path / "run")
    trained = [n for n in range(20) if record.splits_of(
        np.array([Example(f"w{n} w20", ("w4 w5",)).digest], np.uint64)) == TRAINING]  # fmt: skip
    write([*trained, 40, 41])  # a new run would hold some of these out
    channel = spread(Loopback(2))
    run.train(from_dict(tree | {"rounds": 2}), tmp_path / "run")
    assert channel.sent[1] and len(splits.recall(tmp_path / "run").changes) == 1
