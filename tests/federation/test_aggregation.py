"""`server.aggregation` in rounds: which methods take it, what a liar does to each, and too few answers."""

import re
from typing import Any

import every
import pytest
import torch
import toy
from toy_rounds import go

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.federation.aggregation import averages, check, check_cohort, trust
from llm_fed.method import Method, Upload
from llm_fed.method.server import Server
from llm_fed.method.site import Data, Site
from llm_fed.methods.fedbuff import FedBuff
from llm_fed.methods.feddle import Feddle
from llm_fed.methods.fedmerge import FedMerge
from llm_fed.settings.config import ServerStepConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State

RULES = ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping"]
NAMES = tuple("abcdefg")  # seven clients, of whom the last one lies
OWN_STEP: dict[str, dict[str, Any]] = {  # methods whose server step is their own
    "fedit": {"name": "fedit"},
    "fedit of first answers": {"name": "fedit", "wait": "first_n"},
    "fed+ft": {"name": "fed+ft"},
    "hfcl": {"name": "hfcl"},
    "ifca": {"name": "ifca", "num_models": 1},
    "cfl": {"name": "cfl"},
    "fl-hc": {"name": "fl-hc"},
    "fedbuff": {"name": "fedbuff", "buffer": 7},
    "feddle": {"name": "feddle", "search_epochs": 0},
    "fedkd": {"name": "fedkd"},
    "feddyn": {"name": "feddyn"},
    "pfedme": {"name": "pfedme"},
    "fedavgm": {"name": "fedavgm"},
    "fedmerge": {"name": "fedmerge", "num_models": 3},
    "fedmerge by its gradient": {"name": "fedmerge", "num_models": 3, "soup_step": "gradient"},
    "fedmerge-fixed": {"name": "fedmerge-fixed", "num_models": 3, "models_per_client": 2},
}
ADAPTIVE = {"fedadagrad", "fedadam", "fedyogi"}  # their steps adapt to what arrives
OF_FACTORS = {"rolora", "fedsvd"}  # they need whole adapters: tests/methods/test_alternating_and_turning.py


def draw(generator: torch.Generator) -> State:
    entries = {f"small.layers.{k}.lora_A": torch.randn(2, 3, generator=generator).double() for k in range(2)}
    return State.of(entries, {"small.mean": torch.zeros(4).double(), "small.count": torch.tensor(0)})


def server_of(rule: str) -> Site:
    local = toy.server().local
    step = ServerStepConfig(rule, 0.2)  # type: ignore[arg-type]
    return Server("server", toy.STRUCTURE, local, 0, draw, Data([0, 0]), clients=NAMES, cohort=7, step=step)  # type: ignore[arg-type]


def answer(message: Any, generator: torch.Generator, scale: float) -> Any:
    """A message like this one, of random numbers."""
    if isinstance(message, State):
        numbers = torch.randn(message.layout.size, generator=generator, dtype=torch.float64)
        extras = {**message.extras, "small.mean": scale * torch.rand(4, generator=generator, dtype=torch.float64)}
        return State(message.layout, scale * numbers, extras)
    return {key: answer(v, generator, scale) if isinstance(v, State) else v for key, v in message.items()}


def moved(settings: dict[str, Any], rule: str, lie: float) -> float:
    """The largest number of what anybody is sent after a step in which one of seven answers is `lie` times as large."""
    method, server = methods.build(settings), server_of(rule)
    state = method.init(server)
    server.begin(1, 0.1)
    generator = torch.Generator().manual_seed(0)
    uploads = []
    for name in NAMES:
        like = method.upload_like(method.broadcast(state, name))
        uploads.append(Upload(name, 3, 0, answer(like, generator, lie if name == NAMES[-1] else 1.0)))
    runtime = toy.ToyRuntime({"server": 0.0})
    (state,) = runtime.run({"server": method.server_update(server, state, uploads)}).values()
    assert not isinstance(state, Exception) and not server.unmoved, state
    sent = method.broadcast(state, "a")
    if isinstance(sent, dict):
        sent = sent["models"][0] if "models" in sent else sent["model"]
    assert sent.extras["small.count"] == 0
    return max(float(values.abs().max()) for values in (sent.row, sent.extras["small.mean"]))


@pytest.mark.parametrize("name", OWN_STEP)
def test_a_liar_moves_the_mean_of_every_method_and_none_of_its_robust_means(name):
    assert averages(methods.build(OWN_STEP[name]))
    assert moved(OWN_STEP[name], "mean", 1e6) > 1e3
    every.passes(RULES, lambda rule: resists(name, rule))


def resists(name: str, rule: str) -> None:
    settings = OWN_STEP[name]
    if rule == "krum" and "fedmerge" in name:
        with pytest.raises(UserError, match="all models of the soup would move the same way"):
            moved(settings, rule, 1e6)
        return
    honest = moved(settings, rule, 1.0)
    assert moved(settings, rule, 1e6) < 30 and honest > 0.1


def test_which_methods_those_are():
    """The others have a step of their own that is none of these, or merge finished runs."""
    found = {name: averages(methods.build({"name": name})) for name in methods.BUILTIN}
    inherited = {name for name in found if found[name] and not methods.BUILTIN[name].robust}
    assert inherited == {
        "fedlora", "fedprox", "ffa", "fedsa", "feddpa", "fedbn", "fedmoe", "lg-fedavg", "fml", "fedapen", "pfedmoe",
        "fedem", "ditto", "fedrot-lora",
    }  # fmt: skip
    assert {name for name, takes in found.items() if not takes} == {
        "local", "scaffold", "fedalt", "hetlora", "flexlora", "flora", "fedex-lora", "fd", "fedproto",
        "fedasync", "ca2fl", "center", "pooled", "feddf", "potara",
        "fisher-merging", "mean", "grid", "task-arithmetic", "ties", "dare", "slerp",
    }  # fmt: skip
    of_their_own = {settings["name"] for settings in OWN_STEP.values()}
    assert of_their_own | ADAPTIVE | OF_FACTORS == {name for name in found if methods.BUILTIN[name].robust}


@pytest.mark.parametrize("name", sorted(ADAPTIVE))
def test_a_liar_does_not_rule_what_adaptive_servers_remember(name):
    """Their steps are bounded whatever arrives, but not their second moments, which set the length of later steps."""
    assert remembered(name, "mean", 1e6) > 1e6
    assert remembered(name, "median", 1e6) == pytest.approx(remembered(name, "median", 10.0), rel=3)


def remembered(name: str, rule: str, lie: float) -> float:
    method, server = methods.build({"name": name}), server_of(rule)
    state, generator = method.init(server), torch.Generator().manual_seed(0)
    server.begin(1, 0.1)
    uploads = [
        Upload(client, 3, 0, answer(state["model"], generator, lie if client == NAMES[-1] else 1.0)) for client in NAMES
    ]
    (state,) = toy.ToyRuntime({"server": 0.0}).run({"server": method.server_update(server, state, uploads)}).values()
    return float(state["second"].max())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": {"name": "scaffold"}},
            "averages the clients' updates, and scaffold does not; set server.aggregation=mean",
        ),
        ({"method": {"name": "potara"}}, "updates, and potara does not"),
        ({"method": {"name": "fedit"}, "privacy": {"clip": 1.0}}, "with privacy.where=server only their noisy"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    config = from_dict({**settings, "server": {"aggregation": "median"}})
    with pytest.raises(UserError, match=message):
        check(config, methods.build(config.method))
    check(from_dict(settings), methods.build(config.method))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": {"name": "fedit"}}, "One client .* server.aggregation=mean believes every one; multi-krum"),
        ({"method": {"name": "flora"}}, "One client .* flora has no rule of server.aggregation against it"),
        ({"method": {"name": "fedit"}, "privacy": {"clip": 1.0}}, "One client .* by more than privacy.clip at a time"),
        ({"method": {"name": "fedit"}, "server": {"aggregation": "median"}}, r"Up to the share 0.2 .*=median\)"),
        ({"method": {"name": "local"}}, "^$"),
    ],
)
def test_what_one_client_could_do_is_said(settings, said):
    config = from_dict(settings)
    assert re.search(said, trust(config, methods.build(config.method)))


def test_a_cohort_that_is_never_enough_is_refused_at_the_start():
    config = from_dict({"server": {"aggregation": "krum", "liars": 0.25}})
    with pytest.raises(UserError, match=r"needs at least 7 uploads for a mean, and there are 6, at most, in a round"):
        check_cohort(config, 6)
    check_cohort(config, 7)
    check_cohort(from_dict({}), 1)


def test_so_are_a_buffer_and_a_search_that_take_no_mean():
    with pytest.raises(UserError, match=r"and there are 4 in the buffer; set method\.buffer"):
        FedBuff(buffer=4).init(server_of("median"))
    with pytest.raises(UserError, match="takes no mean of the updates"):
        Feddle(search_epochs=0, fallback_start=False).init(server_of("median"))


THIRDS = {"server": {"aggregation": "median", "liars": 0.4}}  # three uploads are enough, two are not


def test_the_median_of_a_whole_run(tmp_path):
    """Targets 1, 2, 4, each client goes 3/4 of the way: the median is at 2 * (1 - 1/4^2) after two rounds. Client c2
    has 3 of 6 examples, which count as 0.4."""
    found, *_, lines = go(tmp_path, rounds=2, config=toy.config(rounds=2, **THIRDS))
    assert found.state["model.layers.1.q.lora_B"].flatten().tolist() == pytest.approx([1.875] * 6)
    assert not [line for line in lines if line["kind"] == "event"]


def test_a_round_with_too_few_answers_moves_nothing_and_says_so(tmp_path):
    """Client ci answers i rounds late, so that each round has one answer."""
    found, *_, lines = go(
        tmp_path, rounds=2, schedule=toy.LateSchedule(("c0", "c1", "c2")), config=toy.config(rounds=2, **THIRDS)
    )
    assert found.state.equal(toy.server().initial())
    events = [line for line in lines if line["kind"] == "event"]
    assert [(line["round"], line["client"], line["event"]) for line in events] == [
        (1, "server", "no mean"), (2, "server", "no mean"),
    ]  # fmt: skip
    assert events[0]["reason"].endswith("needs at least 3 uploads for a mean, and there are 1")


def test_fedmerge_does_not_move_either():
    method, server = FedMerge(num_models=2), server_of("median")
    state = method.init(server)
    server.begin(1, 0.1)
    uploads = [Upload("a", 1, 0, answer(method.broadcast(state, "a"), torch.Generator(), 1.0))]
    (after,) = toy.ToyRuntime({}).run({"server": method.server_update(server, state, uploads)}).values()
    assert after is state and len(server.unmoved) == 1
    server.begin(2, 0.1)
    assert not server.unmoved


@pytest.mark.parametrize("method", [FedBuff(buffer=3), FedMerge(num_models=2)], ids=["fedbuff", "fedmerge"])
def test_continued_is_uninterrupted(tmp_path, method: Method):
    """A buffer that is half full is in the checkpoint."""
    options = {"rounds": 5, "config": toy.config(rounds=5, participation=0.7, **THIRDS)}
    whole, *_ = go(tmp_path / "whole", method, **options)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", method, stop_after=2, **options)
    go(tmp_path / "cut", method, **options)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
