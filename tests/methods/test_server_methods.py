"""Methods that train at the server - Fed+FT, Center, Pooled, HFCL, FedDF - by hand, and distillation against plain
loops."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import small_run
import tiny
import tiny_images
import torch
import toy
from rich.console import Console
from torch import nn

from llm_fed.basics.errors import UserError
from llm_fed.bench.build import prepare
from llm_fed.engine.engine import Engine
from llm_fed.experiment import run
from llm_fed.method import Method, Upload, by_arrival
from llm_fed.method.client import Client
from llm_fed.method.requests import Distillation, Fit, Fitted
from llm_fed.method.server import Server
from llm_fed.method.site import Data, Site
from llm_fed.methods.feddf import FedDF
from llm_fed.methods.fedft import Center, FedFT
from llm_fed.methods.hfcl import HFCL
from llm_fed.methods.pooled import Pooled
from llm_fed.models.lora import draw
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.local import drive
from llm_fed.settings.config import EvalConfig, LocalConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State
from llm_fed.testing import federation

MAKERS: list[Callable[[], Method]] = [FedFT, Center, HFCL, FedDF]
NAMES = {FedFT: "fed+ft", Center: "center", HFCL: "hfcl", FedDF: "feddf"}


def upload(client: str, value: float, num_examples: int = 1, staleness: int = 0) -> Upload:
    return Upload(client, num_examples, staleness, toy.number(value))


class Toy:
    """Each step of a fit goes a tenth of the way to 100, or to the mean of the teachers; notes what was asked."""

    def __init__(self) -> None:
        self.jobs: list[Fit] = []

    def execute(self, requests: Any) -> list[Fitted]:
        return [self._fit(request) for request in requests]

    def _fit(self, job: Fit) -> Fitted:
        self.jobs.append(job)
        row, target = job.start.row, torch.tensor([100.0], dtype=torch.float64)
        if job.teachers:
            target = torch.stack([teacher.row for teacher in job.teachers]).mean(0)
        for _ in job.batches:
            row = row + 0.1 * (target - row)
        return Fitted(job.start.like(row), (0.0,) * len(job.batches))


def start(method: Method, examples: int = 4) -> tuple[Site, Any, Toy]:
    """A server with so many examples, in batches of two, around the number 10."""
    local = LocalConfig(steps=3, batch_size=2)
    server = Server("server", toy.STRUCTURE, local, 0, lambda generator: toy.number(10.0), Data(list(range(examples))))  # type: ignore[arg-type]
    server.begin(1, 0.25)
    return server, method.init(server), Toy()


def serve(method: Method, server: Server, state: Any, engine: Any, *uploads: Upload) -> Any:
    (outcome,) = drive({"server": method.server_update(server, state, list(uploads))}, engine.execute).values()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def test_fedft_averages_and_then_trains():
    """FedAvg: 10 + (1 * 2 + 3 * 6) / 4 = 15. Two epochs over four examples in twos are four steps: 100 - 85 * 0.9^4. In
    a round without arrivals the server trains all the same."""
    method = FedFT(server_epochs=2, server_lr=0.5)
    server, state, engine = start(method)
    state = serve(method, server, state, engine, upload("a", 2.0), upload("b", 6.0, 3, staleness=4))
    assert state.row.item() == pytest.approx(100 - 85 * 0.9**4, abs=1e-12)
    assert serve(method, server, state, engine).row.item() == pytest.approx(100 - 85 * 0.9**8, abs=1e-12)
    assert [(job.optimizer.lr, len(job.batches), job.site) for job in engine.jobs] == [(0.5, 4, "server")] * 2


def test_fedft_waits_for_the_first_answers_to_a_model():
    """One of two has come: no step, no training. With the second, which answers the same model: 10 + (2 + 6) / 2 = 14,
    and two steps, 100 - 86 * 0.9^2. What the first one then says to the old model changes nothing."""
    method = FedFT(wait="first_n")
    server, state, engine = start(method)
    server.cohort = 2
    state = serve(method, server, state, engine, upload("a", 2.0))
    assert method.broadcast(state, "a").equal(toy.number(10.0)) and not engine.jobs
    server.begin(2, 0.25)
    state = serve(method, server, state, engine, upload("b", 6.0, staleness=1))
    assert method.broadcast(state, "a").row.item() == pytest.approx(100 - 86 * 0.9**2, abs=1e-12)
    server.begin(3, 0.25)
    state = serve(method, server, state, engine, upload("a", 2.0, staleness=2), upload("b", 6.0, staleness=2))
    assert state["deltas"] == {} and len(engine.jobs) == 1


def test_center_trains_alone():
    """Whatever comes from clients; each of its two epochs is two steps."""
    method = Center(server_epochs=2, server_lr=0.5)
    server, state, engine = start(method)
    state = serve(method, server, state, engine, Upload("a", 5, 0, {}))
    assert state.row.item() == pytest.approx(100 - 90 * 0.9**4, abs=1e-12)
    assert engine.jobs[0].optimizer.lr == 0.5
    (answer,) = drive({"a": method.client_update(toy.clients(1)["c0"], state)}, engine.execute).values()
    assert answer == method.upload_like(state) == {} and len(engine.jobs) == 1


@pytest.mark.parametrize(
    "local, steps", [({"steps": 3}, 6), ({"steps": None}, 3), ({"steps": None, "epochs": 2}, 6)], ids=str
)
def test_pooled_takes_the_steps_of_those_who_were_asked(local, steps):
    """Two of them, with three examples and with one, in batches of two: an epoch is two steps and one. Its rate is the
    round's; without answers nothing happens."""
    server, state, engine = start(Pooled())
    server.local = LocalConfig(batch_size=2, **local)
    state = serve(Pooled(), server, state, engine, Upload("a", 3, 0, {}), Upload("b", 1, 2, {}))
    assert state.row.item() == pytest.approx(100 - 90 * 0.9**steps, abs=1e-12)
    assert serve(Pooled(), server, state, engine).equal(state)
    assert [(job.optimizer.lr, len(job.batches), job.site) for job in engine.jobs] == [(0.25, steps, "server")]
    with pytest.raises(UserError, match="the server was given none"):
        start(Pooled(), examples=0)


def test_pooled_has_the_rows_of_all_clients_and_makes_one_model(small, tmp_path):
    """Those of a client without test rows, too; a client without training rows is scored."""
    data = small_run.write_data(tmp_path / "data")
    (data / "ada/test.jsonl").unlink()
    (data / "bob/train.jsonl").unlink()
    config = from_dict(small.tree(method={"name": "pooled"}, rounds=2, task={"path": str(data)}))
    built = prepare(config, Reporter(Console(quiet=True)))
    clients = built.clients.values()
    assert [*built.server.train] == [each for site in clients for each in site.train]
    assert len(built.server.train) == 12 and built.only_tested == ("bob",)
    summary = run.train(config, tmp_path / "run")
    assert summary["scores"]["clients"].keys() == {"bob", "cyd"}
    assert len({path.read_bytes() for path in tmp_path.glob("run/adapters/*/adapter_model.safetensors")}) == 1


def test_hfcl_counts_the_server_as_one_more_client():
    """It trains as clients do, three steps at the round's rate from the model that they were sent: its update is
    90 * (1 - 0.9^3) = 24.39. With its four examples: 10 + (1 * 2 + 3 * 6 + 4 * 24.39) / 8; alone: 10 + 24.39."""
    method = HFCL()
    server, state, engine = start(method)
    after = serve(method, server, state, engine, upload("a", 2.0), upload("b", 6.0, 3, staleness=4))
    assert after.row.item() == pytest.approx(10 + (20 + 4 * 24.39) / 8, abs=1e-12)
    assert serve(method, server, state, engine).row.item() == pytest.approx(10 + 24.39, abs=1e-12)
    assert [(job.optimizer.lr, len(job.batches)) for job in engine.jobs] == [(0.25, 3)] * 2


@pytest.mark.parametrize("cohort", [1, 2])
def test_hfcl_waits_for_clients_beside_the_server(cohort):
    """The server trains once per model, and is in the mean beside the first answers however many come at once; the
    one after them is not."""
    method = HFCL(wait="first_n")
    server, state, engine = start(method)
    server.cohort = cohort
    state = serve(method, server, state, engine)
    server.begin(2, 0.25)
    state = serve(method, server, state, engine)
    assert method.broadcast(state, "a").equal(toy.number(10.0)) and len(engine.jobs) == 1
    arrivals = [upload(name, value, 3, staleness=1) for name, value in zip("abc", (2.0, 6.0, 4.0), strict=True)]
    values = [item.content.row.item() for item in by_arrival(server, arrivals)][:cohort]
    state = serve(method, server, state, engine, *arrivals)
    expected = 10 + (3 * sum(values) + 4 * 24.39) / (3 * cohort + 4)
    assert method.broadcast(state, "a").row.item() == pytest.approx(expected, abs=1e-12)
    assert state["deltas"] == {} and len(engine.jobs) == 1


def test_feddf_averages_models_and_then_distils():
    """Of models 20 and 40, with one and three examples, the student starts at 35 and the teachers' mean is 30, since
    numbers of examples count in the average alone; four steps: 30 + 5 * 0.9^4. Without arrivals nothing changes."""
    method = FedDF(server_epochs=2, server_lr=0.5)
    server, state, engine = start(method)
    assert serve(method, server, state, engine).row.item() == 10
    after = serve(method, server, state, engine, upload("a", 20.0), upload("b", 40.0, 3, staleness=2))
    assert after.row.item() == pytest.approx(30 + 5 * 0.9**4, abs=1e-12)
    assert [(job.optimizer.lr, len(job.batches)) for job in engine.jobs] == [(0.5, 4)]


# Distillation


def distilled(engine: Any, server: Server, student: State, teachers: list[State]) -> State:
    server.begin(1, 0.02)
    return tiny_images.answer(engine, server.fit(student, epochs=2, loss=Distillation(teachers)))


@pytest.mark.parametrize("make", [tiny_images.cnn, tiny_images.resnet], ids=["cnn", "resnet"])
def test_distillation_of_images_is_a_plain_loop(make):
    """KL(softmax of the mean logits || student), the mean over a batch; teachers in evaluation mode. The labels play
    no part."""
    base = make()
    engine = Engine(base)
    server = tiny_images.party(base, tiny_images.pictures(12), "server")
    student, *teachers = (server.initial(label) for label in range(4))
    found = distilled(engine, server, student, teachers)
    modules = [tiny_images.loaded(base, state) for state in (student, *teachers)]
    student_module = modules[0].requires_grad_(True).train()
    optimizer = torch.optim.Adam(student_module.parameters(), lr=0.02)
    server.begin(1, 0.02)
    for batch in server.batches(epochs=2):
        inputs = base.prepare(torch.stack([picture.pixels for picture in batch]))
        outputs = [module(pixel_values=inputs) for module in modules]
        logits, *taught = (getattr(output, "logits", output) for output in outputs)
        wanted = torch.stack(taught).mean(0).softmax(-1)
        loss = (wanted * (wanted.log() - logits.log_softmax(-1))).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tiny_images.assert_state(found, student_module.state_dict(), 1e-11)
    server.data = replace(
        server.data,
        train=[replace(picture, label=(picture.label + 1) % tiny_images.CLASSES) for picture in server.train],
    )
    assert distilled(engine, server, student, teachers).equal(found)
    assert not tiny_images.answer(engine, server.fit(student, epochs=2)).equal(found)


def test_distillation_of_text_is_a_plain_loop():
    """The divergence at each target token, the mean over those of a batch, through stock PEFT."""
    base, structure = federation.language_base(), federation.STRUCTURE
    local = LocalConfig(batch_size=2, optimizer="sgd")
    engine = Engine(base, EvalConfig())
    server = Server("server", structure, local, 0, lambda g: draw(base.model, structure, g, torch.float64))
    server.data = replace(server.data, train=tiny.examples(5, [9, 6, 7, 5]))
    student, *teachers = (server.initial(label) for label in range(4))
    student, *teachers = (
        state.like(state.row + 0.2 * torch.randn(state.row.shape, generator=torch.Generator().manual_seed(i)))
        for i, state in enumerate((student, *teachers))
    )
    found = distilled(engine, server, student, teachers)
    models: list[nn.Module] = [tiny.stock_peft(base.model, structure, state).eval() for state in (student, *teachers)]
    entries = tiny.peft_entries(models[0])  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(entries.values(), lr=0.02)
    server.begin(1, 0.02)
    for batch in server.batches(epochs=2):
        total, count = torch.zeros(()), 0
        for example in batch:
            ids, target = torch.tensor([example.input_ids]), torch.tensor(example.target)[1:]
            logits, *taught = (model(input_ids=ids).logits[0, :-1][target] for model in models)
            wanted = torch.stack(taught).mean(0).detach().softmax(-1)
            total = total + (wanted * (wanted.log() - logits.log_softmax(-1))).sum()
            count += int(target.sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert (found.row - student.row).abs().max() > 1e-4
    tiny_images.assert_state(found, {name: p.detach() for name, p in entries.items()}, 1e-6)  # logits are float32


def test_each_fit_has_its_own_teachers():
    """Several sites that distil in one pass get what each would get alone, beside one that trains on labels."""
    base, structure = federation.language_base(), federation.STRUCTURE
    engine = Engine(base, EvalConfig())
    sites = {}
    for i, id in enumerate("abc"):
        sites[id] = Client(id, structure, LocalConfig(steps=2, batch_size=2), 0,
                         lambda g: draw(base.model, structure, g, torch.float64),
                         Data(tiny.examples(i, [9, 6, 7])))  # fmt: skip
    student, *teachers = (sites["a"].initial(label) for label in range(3))
    taught = {"a": teachers[:1], "b": teachers, "c": []}

    def fits(*ids: str) -> dict[str, State]:
        for site in sites.values():
            site.begin(1, 0.02)
        return drive(
            {id: sites[id].fit(student, loss=Distillation(taught[id]) if taught[id] else None) for id in ids},
            engine.execute,
        )

    together = fits("a", "b", "c")
    for id in sites:
        torch.testing.assert_close(fits(id)[id].row, together[id].row, rtol=0, atol=1e-10)


# Mistakes


@pytest.mark.parametrize("make", MAKERS)
def test_server_examples_are_needed(make):
    with pytest.raises(UserError, match=rf"^{NAMES[make].replace('+', '.')} .*set task.server.examples"):  # type: ignore[index]
        start(make(), examples=0)


@pytest.mark.parametrize("make", MAKERS)
def test_examples_of_another_task_suit_distillation_alone(make):
    method = make()
    server, *_ = start(method)
    server.data = replace(server.data, foreign=True)
    if make is FedDF:
        assert method.init(server).equal(toy.number(10.0))
    else:
        with pytest.raises(UserError, match="needs server examples of the clients' own task; leave task.server.name"):
            method.init(server)
