"""Compressed messages: what each form costs, how far off it is, and that a run computes from what arrives."""

from functools import partial

import pytest
import torch
import toy

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.experiment import run as experiment
from llm_fed.federation import clients
from llm_fed.federation.loop import Federation, federate
from llm_fed.federation.uploads import flaws
from llm_fed.methods.fedit import FedIT
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile
from llm_fed.state import State
from llm_fed.state.lowrank import truncated
from llm_fed.state.outline import skeleton
from llm_fed.state.roles import Given
from llm_fed.state.wire import pack, unpack

ENCODINGS = {"float16": 2**-11, "bfloat16": 2**-8}  # the largest relative error


def state(seed: int = 0) -> State:
    """Rows of very unlike sizes: a matrix, a convolution, a vector, a number, a row of zeros, an entry of no row."""
    draws = torch.Generator().manual_seed(seed)
    tensors = {
        "a": torch.randn(8, 64, generator=draws) * torch.logspace(-4, 3, 8)[:, None],
        "b": torch.randn(16, 3, 2, 2, generator=draws),
        "c": torch.randn(33, generator=draws),
        "d": torch.randn((), generator=draws),
        "e": torch.zeros(2, 5),
        "f": torch.zeros(0, 3),
    }
    return State.of(tensors)


def sent(message, encoding: str | None):
    return unpack(pack(message, encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_half_precision_is_off_by_half_a_unit_in_the_last_place(encoding):
    given = state()
    back = sent(given, encoding)
    assert back.layout == given.layout and back.row.dtype == torch.float32
    least = 2**-25 if encoding == "float16" else 0.0  # half the distance of subnormal numbers
    assert bool(((back.row - given.row).abs() <= ENCODINGS[encoding] * given.row.abs() + least).all())
    assert not torch.equal(back.row, given.row)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_arrived_arrives_again_unchanged(encoding):
    """Compression is idempotent, bit by bit, whatever the digits of the largest numbers."""
    largest = (1 + torch.arange(2**16) * 2**-16) * torch.tensor([[1.0], [2**7], [2**-90]])
    many = State.of({"x": torch.stack([largest.flatten(), 0.3 * largest.flatten()], 1)})
    for given in [many, *map(state, range(20))]:
        once = sent(given, encoding)
        assert sent(once, encoding).equal(once)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_nothing_but_float32_rows_is_compressed(encoding):
    numbers = torch.linspace(-1, 1, 7)
    extras = {"mean": numbers.clone(), "count": torch.tensor(3)}
    low = truncated(State.of({"w": torch.ones(8, 8) / 3, "v": numbers}), 0.5)
    assert low.factors
    kept = {
        "double": State.of({"x": numbers.double()}),
        "half": State.of({"x": numbers.bfloat16()}),
        "tensor": numbers,
        "plain": [1, 0.1, True, None, "text"],
        "low": low,
    }
    back = sent({**kept, "bare": State.of({"x": numbers}, extras)}, encoding)
    assert pack({name: back[name] for name in kept}) == pack(kept)
    assert not torch.equal(back["bare"].row, numbers)
    assert torch.equal(back["bare"].extras["mean"], numbers) and back["bare"].extras["count"] == 3


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_is_refused(encoding, value):
    given = state()
    given["a"][3, 5] = value
    back = sent(given, encoding)
    assert not back["a"][3].isfinite().all() and back["b"].isfinite().all()
    (flaw,) = flaws([back], [Given(skeleton(given))], None)
    assert "NaN or infinite" in flaw


def test_too_large_for_half_precision_is_refused_too():
    (flaw,) = flaws([sent(State.of({"x": torch.tensor([1e5])}), "float16")], [Given(skeleton(state()))], None)
    assert flaw and not sent(State.of({"x": torch.tensor([1e5])}), "float16").is_finite()


def draw(generator: torch.Generator) -> State:
    first = toy.draw(generator)
    return State(first.layout, first.row.float())


def go(folder, encoding: str | None, stop_after: int | None = None, rounds: int = 4):
    """The toy federation in float32."""
    sites, server = toy.clients(3), toy.server()
    for site in (server, *sites.values()):
        site.draw = draw
    server.clients = tuple(sites)
    runtime = toy.ToyRuntime({"c0": 1.0, "c1": 2.0, "c2": 4.0})
    config = toy.config(rounds=rounds, transport=encoding)

    def listen(record):
        if stop_after and record["round"] > stop_after:
            raise KeyboardInterrupt

    with Run(folder, config, False, listen) as run:
        run.begin()
        here = clients.LocalClients(sites, toy.everyone(sites), runtime)
        progress = federate(Federation(FedIT(), here, server, runtime), run)
    return progress.state


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_continued_run_is_uninterrupted(tmp_path, encoding):
    whole = go(tmp_path / "whole", encoding)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", encoding, stop_after=2)
    assert go(tmp_path / "cut", encoding).equal(whole)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_clients_compute_from_what_arrives(tmp_path):
    """One round: from x' = b(x), b for bfloat16, a client goes three quarters of the way to its target t (1, 2, 4), so
    it uploads b(3/4 (t - x')); with n = 1, 2, 3 the server adds (1 u_1 + 2 u_2 + 3 u_3) / 6 to its own x, not to x'."""
    x = toy.clients(1)["c0"].draw(generator(0, "initial"))
    x = State(x.layout, x.row.float())
    arrived = sent(x, "bfloat16")
    uploads = [sent(arrived.like(0.75 * (target - arrived.row)), "bfloat16") for target in (1.0, 2.0, 4.0)]
    expected = x.row + sum(n * upload.row for n, upload in zip((1, 2, 3), uploads, strict=True)) / 6
    found = go(tmp_path, "bfloat16", rounds=1)
    assert not torch.equal(arrived.row, x.row)
    torch.testing.assert_close(found.row, expected, rtol=0, atol=1e-5)
    assert float((x.row - arrived.row).abs().max()) > 1e-4  # what is computed from x itself is seen


def test_a_run_in_bfloat16_learns_and_counts_the_bytes_that_travel(small, tmp_path, monkeypatch):
    packed: list[tuple[str | None, int]] = []

    def counting(message, encoding=None):
        data = pack(message, encoding)
        packed.append((encoding, len(data)))
        return data

    monkeypatch.setattr(clients, "pack", counting)
    settings = {"rounds": 4, "eval": {"every": 0}, "local": {"steps": 4}}
    load = partial(small.config, tmp_path / "small.yaml", **settings)
    experiment.train(configfile.load(load(transport="bfloat16")), tmp_path / "half")
    lines = read_records(tmp_path / "half/metrics.jsonl")
    rounds, answers = ([line for line in lines if line["kind"] == kind] for kind in ("round", "client"))
    assert rounds[-1]["loss"] < rounds[0]["loss"] - 0.5
    # One message for all three and three uploads in each of four rounds; after the last one more, which is scored, and
    # one that is handed out.
    assert {encoding for encoding, _ in packed} == {"bfloat16"} and len(packed) == 4 * 4 + 2
    lengths = [length for _, length in packed]
    for at in range(4):
        down, *up = lengths[4 * at : 4 * at + 4]
        mine = [line for line in answers if line["round"] == at + 1]
        assert [line["bytes_up"] for line in mine] == up and {line["bytes_down"] for line in mine} == {down}
        assert (rounds[at]["bytes_up"], rounds[at]["bytes_down"]) == (sum(up), 3 * down)
    experiment.train(configfile.load(load()), tmp_path / "plain")
    plain = [line for line in read_records(tmp_path / "plain/metrics.jsonl") if line["kind"] == "round"]
    assert plain[-1]["loss"] == pytest.approx(rounds[-1]["loss"], abs=0.1)
    assert rounds[0]["bytes_up"] < plain[0]["bytes_up"] and plain[0]["loss"] != rounds[0]["loss"]


def test_an_unknown_form_is_refused(small, tmp_path):
    with pytest.raises(UserError, match="transport='int4' is unknown.*bfloat16"):
        configfile.load(small.config(tmp_path / "small.yaml", transport="int4"))
