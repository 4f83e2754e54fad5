"""The battery that every method must pass: add a row to `METHODS` and run tests/methods/test_battery.py.

A method needs a line in GOLDEN (`python tests/support/battery.py` prints it; see `test_golden_curve`), and one in
SETTINGS only where its defaults do not suit a run of three rounds. The federation is real, only small: adapters of a
LLaMA of two layers, or whole ResNets, in float64; three clients with different answers or classes and numbers of
examples, of which the server has two each; the local runtime, the round loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import tiny_images
import torch
import toy
from battery_kinds import OF_PICTURES, Kind
from safetensors.torch import load

from llm_fed import methods
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, federate
from llm_fed.federation.schedule import Schedule, Synchronous
from llm_fed.federation.uploads import skeleton
from llm_fed.messages.wire import pack, unpack
from llm_fed.method import Method, Upload
from llm_fed.runs.folder import Run, read_records
from llm_fed.runtime.local import LocalRuntime
from llm_fed.site import Site

SETTINGS: dict[str, dict[str, Any]] = {
    "fedlora": {"personal_steps": 2},
    "feddpa": {"personal_steps": 2, "anchors": 2},
    "fedem": {"num_models": 2},
    "ifca": {"num_models": 2, "warmup_rounds": 1},
    "fedmerge": {"num_models": 3, "weight_lr": 0.5},
    "fedmerge-fixed": {"num_models": 3, "models_per_client": 2},
    "fedbuff": {"buffer": 2},
    "ca2fl": {"buffer": 2},
    "fed+ft": {"server_lr": 0.01},
    "feddf": {"server_lr": 0.01},
    "feddle": {"search_lr": 0.1},
}
GOLDEN: dict[str, list[float]] = {
    "local": [4.17255, 3.73894, 3.15488],
    "fedit": [4.17255, 3.87809, 3.62014],
    "fedlora": [4.17255, 3.87809, 3.62014, 3.3938],
    "ffa": [4.20507, 4.07159, 3.84114],
    "fedsa": [4.17255, 3.79624, 3.38421],
    "feddpa": [4.26367, 3.95714, 3.44987],
    "fedalt": [4.26821, 3.81576, 3.19439],
    "pfedmoe": [4.19513, 3.73084, 3.17485],
    "fedem": [4.19513, 4.12342, 3.59871],
    "ifca": [4.17683, 3.72599, 3.29704],
    "fedmerge": [4.17736, 3.96176, 3.5027],
    "fedmerge-fixed": [4.12678, 3.85432, 3.36166],
    "fedasync": [4.17255, 4.00063, 3.60656],
    "fedbuff": [4.17255, 3.92626, 3.43734],
    "ca2fl": [4.17255, 3.92626, 3.42719],
    "fed+ft": [4.17255, 3.76244, 3.32709],
    "hfcl": [4.17255, 3.95755, 3.53962],
    "feddf": [4.17255, 3.89274, 3.66277],
    "feddle": [4.17255, 3.84059, 3.3978],
    "local of pictures": [1.02988, 0.397611, 0.231138],
    "fedit of pictures": [1.02988, 0.726773, 0.607449],
    "fedlora of pictures": [1.02988, 0.726773, 0.607449, 0.59952],
    "fedbn of pictures": [1.02988, 0.706019, 0.580236],
    "fedmoe of pictures": [1.05193, 0.438182, 0.212376],
    "lg-fedavg of pictures": [1.02988, 0.535666, 0.428366],
    "fd of pictures": [1.02988, 0.70657, 0.537344],
    "fedproto of pictures": [1.02988, 0.824846, 0.606829],
    "fml of pictures": [1.11952, 0.747436, 0.687723],
    "fedkd of pictures": [2.29868, 1.7768, 1.65082],
    "fedapen of pictures": [3.80134, 2.00772, 1.66068],
    "pfedmoe of pictures": [1.05193, 0.438182, 0.212376],
    "fedem of pictures": [1.05467, 0.740306, 0.638436],
    "ifca of pictures": [1.02334, 0.689332, 0.480341],
    "fedmerge of pictures": [1.05046, 0.730669, 0.602172],
    "fedmerge-fixed of pictures": [1.03296, 0.568307, 0.395243],
    "fedasync of pictures": [1.02988, 0.758655, 0.672325],
    "fedbuff of pictures": [1.02988, 0.759184, 0.578278],
    "ca2fl of pictures": [1.02988, 0.759184, 0.559716],
    "fed+ft of pictures": [1.02988, 0.90694, 0.856737],
    "hfcl of pictures": [1.02988, 0.770936, 0.660551],
    "feddf of pictures": [1.02988, 1.09137, 0.98939],
    "feddle of pictures": [1.02988, 0.720825, 0.602992],
}
# Those that start from other runs have no rounds, and a battery of their own in test_potara.py. The clients of `center`
# do nothing: see test_server_methods.py.
FEDERATED = [
    name for name, kind in methods.METHODS.items() if not kind.needs and not kind.whole_models and name != "center"
]
WHOLE_MODELS = [
    name + OF_PICTURES
    for name in methods.METHODS
    if name != "center" and not methods.build({"name": name}).adapters_only
]
ROUNDS = 3
SIZES = {"c0": 5, "c1": 3, "c2": 8}


@dataclass
class Outcome:
    """A federation after its last round."""

    name: str
    method: Method
    server: Site
    clients: dict[str, Site]
    runtime: LocalRuntime
    state: Any
    folder: Path

    @property
    def metrics(self) -> bytes:
        return (self.folder / "metrics.jsonl").read_bytes()

    @property
    def memories(self) -> dict[str, bytes]:
        return {site.id: pack(dict(site.memory)) for site in (self.server, *self.clients.values())}

    def losses(self) -> list[float]:
        return [line["loss"] for line in read_records(self.folder / "metrics.jsonl") if line["kind"] == "round"]

    def curve(self) -> list[float]:
        """The rounds' losses, and that of the training in `finish` where a method has some."""
        self.ask("finish", self.messages())
        last = [loss for site in self.clients.values() for loss in site.losses]
        return self.losses() + ([round(fmean(last), 5)] if last else [])

    def messages(self) -> dict[str, Any]:
        """What each client would be sent next, in memory of its own."""
        return {name: unpack(pack(self.method.broadcast(self.state, name))) for name in self.clients}

    @property
    def kind(self) -> Kind:
        return Kind.of(self.name)

    def ask(self, step: str, messages: Mapping[str, Any]) -> dict[str, Any]:
        """What an awaitable step of the method returns at every client, in the round after the last."""
        for site in self.clients.values():
            site.begin(ROUNDS + 1, self.kind.local.lr)
        work = {name: getattr(self.method, step)(site, messages[name]) for name, site in self.clients.items()}
        outcomes = self.runtime.run(work)
        for outcome in outcomes.values():
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def uploads(self) -> list[Upload]:
        answers = self.ask("client_update", self.messages())
        return [Upload(name, self.clients[name].num_examples, 0, answer) for name, answer in answers.items()]

    def serve(self, state: Any, uploads: list[Upload]) -> Any:
        """The server's step; its memory is put back."""
        self.server.begin(ROUNDS + 1, self.kind.local.lr)
        before = copy(self.server.memory)
        (outcome,) = self.runtime.run({"server": self.method.server_update(self.server, state, uploads)}).values()
        self.server.memory = before
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def built(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    plain = name.removesuffix(OF_PICTURES)
    return methods.build({"name": plain, **(SETTINGS.get(plain, {}) if settings is None else settings)})


def go(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    per_pass: int = len(SIZES),
    order: tuple[str, ...] = tuple(SIZES),
    stop_after: int | None = None,
    dtype: torch.dtype = torch.float64,
    settings: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
    rounds: int = ROUNDS,
) -> Outcome:
    """Run, or continue, the federation; with `stop_after` it dies in the middle of the next round that asks anybody."""
    kind, method = Kind.of(name), built(name, settings)
    model = kind.base(dtype)

    def site(id: str, train: list[Any]) -> Site:
        made = Site(id, kind.structure, kind.local, seed, partial(kind.draw, model, kind.structure, dtype), train=train)
        made.structure = method.wrap(kind.structure, None if id == "server" else made)
        made.draw = partial(kind.draw, model, made.structure, dtype)
        made.num_labels, made.rounds = tiny_images.CLASSES, rounds
        return made

    def listen(record: Mapping[str, Any]) -> None:
        if stop_after and record["kind"] == "client" and record["round"] > stop_after:
            raise KeyboardInterrupt

    clients = {id: site(id, kind.examples(int(id[1]), SIZES[id])) for id in order}
    runtime = LocalRuntime(kind.engine(model), per_pass)
    server = site("server", [example for client in range(len(SIZES)) for example in kind.examples(client, 2)])
    server.clients, server.cohort = tuple(sorted(order)), len(order)
    local = {"lr": kind.local.lr, "lr_end": kind.local.lr}
    with Run(folder, toy.config(seed=seed, rounds=rounds, local=local), listen=listen) as run:
        run.begin()
        clients_here = LocalClients(clients, schedule or Synchronous(order, seed=seed), runtime)
        progress = federate(Federation(method, clients_here, server, runtime), run)
    return Outcome(name, method, server, clients, runtime, progress.state, folder)


@pytest.fixture(scope="module", params=[*FEDERATED, *WHOLE_MODELS])
def whole(request, tmp_path_factory) -> Outcome:
    """An uninterrupted run of each method. Tests may ask it for more work, and leave its memories as they were."""
    return go(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def memories_are_put_back(request) -> Iterator[None]:
    if "whole" not in request.fixturenames:
        yield
        return
    clients = request.getfixturevalue("whole").clients
    before = {name: copy(site.memory) for name, site in clients.items()}
    yield
    for name, site in clients.items():
        site.memory = before[name]


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    """Two messages of one shape whose numbers differ by at most `tolerance`."""
    assert skeleton(one) == skeleton(other)
    others = load(pack(other))
    for key, tensor in load(pack(one)).items():
        torch.testing.assert_close(tensor, others[key], rtol=0, atol=tolerance)


def assert_close_runs(one: Outcome, other: Outcome, tolerance: float) -> None:
    assert_close(one.state, other.state, tolerance)
    personal, others = one.ask("personalize", one.messages()), other.ask("personalize", other.messages())
    for name, site in one.clients.items():
        assert_close(dict(site.memory), dict(other.clients[name].memory), tolerance)
        assert_close(personal[name], others[name], tolerance)
    assert_close(dict(sorted(one.server.memory.items())), dict(sorted(other.server.memory.items())), tolerance)


def assert_equal_runs(one: Outcome, other: Outcome) -> None:
    assert one.metrics == other.metrics
    assert pack(one.state) == pack(other.state)
    assert one.memories == other.memories


def test_every_message_survives_the_wire(whole):
    """Unpacked and packed again gives the same bytes: nothing is lost, and only messages are ever sent or kept."""
    sent = [whole.method.broadcast(whole.state, name) for name in whole.clients]
    for message in [whole.state, *sent, *(upload.content for upload in whole.uploads())]:
        assert pack(unpack(pack(message))) == pack(message)
    whole.ask("finish", whole.messages())
    for site in whole.clients.values():
        assert pack(unpack(pack(dict(site.memory)))) == pack(dict(site.memory))


def test_the_server_step_is_pure(whole):
    uploads = whole.uploads()
    before = pack([whole.state, [upload.content for upload in uploads]])
    settings = dict(vars(whole.method))
    first, second = whole.serve(whole.state, uploads), whole.serve(whole.state, uploads)
    assert pack(first) == pack(second)
    assert pack([whole.state, [upload.content for upload in uploads]]) == before
    assert vars(whole.method) == settings


def test_nothing_arrives(whole):
    """A round in which no upload arrives is a server step too, and one whose result can be saved and sent."""
    state = whole.serve(whole.state, [])
    for name in whole.clients:
        assert skeleton(whole.method.broadcast(state, name)) == skeleton(whole.method.broadcast(whole.state, name))


def test_the_order_of_uploads_does_not_matter(whole):
    uploads = whole.uploads()
    tolerance = 1e-6 if whole.name == "feddf" else 1e-12  # it adds up logits, which are float32
    assert_close(whole.serve(whole.state, uploads), whole.serve(whole.state, uploads[::-1]), tolerance)


def test_the_order_of_clients_does_not_matter(whole, tmp_path):
    assert_close_runs(go(whole.name, tmp_path, order=("c2", "c0", "c1")), whole, 1e-10)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(whole, tmp_path):
    assert_equal_runs(go(whole.name, tmp_path / "again"), whole)
    assert go(whole.name, tmp_path / "other", seed=1).losses() != whole.losses()


@pytest.mark.parametrize("stop", range(1, ROUNDS))
def test_continued_is_uninterrupted(whole, tmp_path, stop):
    with pytest.raises(KeyboardInterrupt):
        go(whole.name, tmp_path, stop_after=stop)
    assert_equal_runs(go(whole.name, tmp_path), whole)


@pytest.mark.parametrize("whole", FEDERATED, indirect=True, scope="module")
@pytest.mark.parametrize("per_pass", [1, 2])
def test_fused_is_one_by_one(whole, tmp_path, per_pass):
    assert_close_runs(go(whole.name, tmp_path, per_pass=per_pass), whole, 1e-10)


@pytest.mark.parametrize("whole", FEDERATED, indirect=True, scope="module")
def test_fused_is_one_by_one_in_float32(whole, tmp_path):
    fused = go(whole.name, tmp_path / "fused", dtype=torch.float32)
    alone = go(whole.name, tmp_path / "alone", dtype=torch.float32, per_pass=1)
    assert_close_runs(fused, alone, 2e-4)  # AdamW makes a step of up to lr of a gradient as small as its rounding


def test_the_loss_falls(whole):
    losses = whole.losses()
    assert losses[-1] < losses[0] - whole.kind.falls


def test_broadcast_depends_on_its_arguments_alone(whole):
    before = pack(whole.state)
    sent = {name: pack(whole.method.broadcast(whole.state, name)) for name in whole.clients}
    again = built(whole.name)
    state = unpack(before)
    for name in reversed(whole.clients):
        assert pack(again.broadcast(state, name)) == sent[name]
    assert pack(whole.state) == before


@pytest.mark.parametrize("finished", [False, True])
def test_personalize_only_computes(whole, finished):
    """No training, no memory written, the message left alone, and a state of what `wrap` built."""
    messages = whole.messages()
    if finished:
        whole.ask("finish", messages)
    before, memories = pack(messages), whole.memories
    whole.runtime.take_work()
    first, second = whole.ask("personalize", messages), whole.ask("personalize", messages)
    assert whole.runtime.take_work().tokens == 0
    assert (pack(messages), whole.memories) == (before, memories)
    assert pack(first) == pack(second)
    for name, site in whole.clients.items():
        assert first[name].layout == site.initial().layout


def test_finish_touches_memory_alone(whole):
    messages = whole.messages()
    before = pack([messages, whole.state])
    rest = {name: {**vars(site), "memory": None} for name, site in whole.clients.items()}
    assert set(whole.ask("finish", messages).values()) == {None}
    assert pack([messages, whole.state]) == before
    for name, site in whole.clients.items():
        changing = dict.fromkeys(("memory", "round", "losses", "_fits"))  # the loop's own notes on a round
        assert {**vars(site), **changing} == {**rest[name], **changing}


def test_bytes_are_those_of_the_messages(whole):
    """What is counted is what is sent; a method whose messages are empty shares nothing."""
    sent = [line for line in read_records(whole.folder / "metrics.jsonl") if line["kind"] == "client"]
    assert len(sent) == ROUNDS * len(whole.clients)
    messages, uploads = whole.messages(), whole.uploads()
    shares = messages["c0"] is not None
    varies = 0.1 if whole.name.startswith("fedkd") else 0  # as many factors as a round's updates need
    for upload in uploads:
        lines = [line for line in sent if line["client"] == upload.client]
        for key, content in (("bytes_down", messages[upload.client]), ("bytes_up", upload.content)):
            assert [line[key] for line in lines] == pytest.approx([len(pack(content))] * ROUNDS, rel=varies, abs=0)
        assert (upload.content is not None) == shares
        assert min(len(pack(upload.content)), len(pack(messages[upload.client]))) > (whole.kind.least if shares else 0)


def test_uploads_look_as_the_method_says(whole):
    rounds = [line for line in read_records(whole.folder / "metrics.jsonl") if line["kind"] == "round"]
    assert [(line["arrived"], line["refused"], line["failed"]) for line in rounds] == [(len(SIZES), 0, 0)] * ROUNDS
    for upload in whole.uploads():
        message = whole.method.broadcast(whole.state, upload.client)
        assert skeleton(whole.method.upload_like(message)) == skeleton(upload.content)


def test_a_paper_and_defaults_are_given(whole):
    name = whole.name.removesuffix(OF_PICTURES)
    (described,) = (entry for entry in methods.describe() if entry["name"] == name)
    assert described["paper"] and type(whole.method).__doc__
    assert methods.build({"name": name}) == type(whole.method)(**described["settings"])


def test_golden_curve(whole):
    """The mean training losses of the three rounds and of `finish`, as they were when the method was accepted.

    A change that moves them changes results: say so in CHANGELOG.md, run `python tests/support/battery.py`, and put the
    line that it prints for the method into GOLDEN. The tolerance leaves room for another CPU.
    """
    assert whole.curve() == pytest.approx(GOLDEN[whole.name], abs=1e-5)


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    for method in (*FEDERATED, *WHOLE_MODELS):
        with TemporaryDirectory() as folder:
            print(f'    "{method}": {go(method, Path(folder)).curve()},')
