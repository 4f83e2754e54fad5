"""A registered node that does not keep to the rules: it can neither stop a run, nor own it, nor take others' names."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import every
import pytest
import torch
from network import HELLO, NETWORK, NetworkInProcess, federate, lines, only, tree

from llm_fed.basics.errors import UserError
from llm_fed.network import clients
from llm_fed.network.link import Reply
from llm_fed.network.roster import Roster, homes
from llm_fed.state import Layout, State
from llm_fed.state.wire import pack, unpack

pytestmark = pytest.mark.usefixtures("quick")


def answers(change: Callable[[State], Any]) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(reply.content, pack(change(unpack(reply.answer))))


def says(**content: Any) -> Callable[[Reply], Reply]:
    return lambda reply: Reply({**reply.content, **content}, reply.answer)


def _permuted(state: State) -> State:
    return State(Layout(state.layout.names[::-1], state.layout.shapes[::-1]), state.row)


def _twice(state: State) -> State:
    return State(Layout((*state.layout.names, state.layout.names[0]), (*state.layout.shapes, (0,))), state.row)


SPOILT = [  # by round: what bob answers, and why it is refused
    (answers(lambda state: State(state.layout, state.row.to(torch.float8_e4m3fn))), "float8"),
    (answers(lambda state: State(state.layout, state.row.to(torch.int8))), "a row of torch.int8"),
    (answers(_permuted), "in another order"),
    (answers(_twice), "twice"),
    (answers(lambda state: state * 1000.0), "its norm"),
    (says(examples=10**15), "and was 6 when it joined"),
    (says(examples=10**400), "its number of examples"),
    (says(loss=10**400), "its loss"),
    (says(steps=-1), "its number of steps"),
    (says(ask=[[]]), "answers another order"),
    (lambda reply: Reply(reply.content, b"\xff" * 100), "not a message"),
    (lambda reply: Reply(reply.content, reply.answer[:-3]), "not a message"),
    (lambda reply: Reply(reply.content, reply.answer * 100), "bytes, and at most"),
    (answers(lambda state: state.pick(list(state.layout.names)[:-1])), "has no"),
    (answers(lambda state: state * float("nan")), "NaN or infinite"),
    (says(examples=-5), "number of examples is -5"),
    (says(loss=float("inf")), "loss is inf"),
]


def test_each_answer_ends_alone(small, tmp_path):
    """The first of a thousandfold norm is refused in the first round, too; the run goes on with the others."""
    order = [4, *(number for number in range(len(SPOILT)) if number != 4)]

    def spoil(asked, reply):
        bobs = asked["kind"] == "train" and asked["client"] == "bob"
        return SPOILT[order[asked["round"] - 1]][0](reply) if bobs else reply

    _, done = federate(tmp_path, small, tree(small, rounds=len(SPOILT), eval={"every": 0}), spoil=spoil)
    refused = [line for line in lines(tmp_path, "event") if line["event"] == "refused upload"]
    assert [(line["round"], line["client"]) for line in refused] == [(n, "bob") for n in range(1, len(SPOILT) + 1)]
    for line, number in zip(refused, order, strict=True):
        assert SPOILT[number][1] in line["reason"] and line["reason"].isprintable()
    assert [(line["arrived"], line["refused"]) for line in lines(tmp_path, "round")] == [(2, 1)] * len(SPOILT)
    assert done["round"] == len(SPOILT)


BESIDE: list[dict[str, Any]] = [
    {"error": "\ud800\x1b[2J"}, {"error": [[]]}, {"score": 10**400, "loss": [1]}, {"failed": {"a": "\ud800"}},
]  # fmt: skip
RECIPES: list[Any] = [
    "text", {"sweep": [1]}, {"lambda_fed": "x"}, {"grid": {"0.5": 1}}, {"a": float("nan")}, {"sweep": {}},
]  # fmt: skip


@pytest.mark.parametrize("said", every.quick(BESIDE, [BESIDE[0], BESIDE[2]]), ids=str)
def test_what_comes_beside_an_answer_ends_no_run(small, tmp_path, said):
    def spoil(order, reply):
        return reply if order["kind"] == "hello" or order["client"] != "bob" else says(**said)(reply)

    _, done = federate(tmp_path, small, tree(small, rounds=1), spoil=spoil)
    assert {"ada", "cyd"} <= set(done["scores"]["clients"])
    for line in lines(tmp_path, "event"):
        assert line["client"] == "bob" and line["reason"].isprintable()


@pytest.mark.parametrize("recipe", every.quick(RECIPES, [RECIPES[4]]), ids=str)
def test_a_recipe_of_another_form_is_refused_and_the_others_are_kept(small, tmp_path, recipe):
    spoil = only("bob", "finish", says(recipe=recipe))
    _, done = federate(tmp_path, small, tree(small, rounds=1, method={"name": "potara"}), spoil=spoil)
    assert [line["client"] for line in lines(tmp_path, "merge")] == ["ada", "cyd"]
    assert [(line["client"], line["event"]) for line in lines(tmp_path, "event")] == [("bob", "refused recipe")]
    assert set(done["scores"]["clients"]) == {"ada", "bob", "cyd"}


def roster(link: Any, said: list[str], **network: Any) -> Roster:
    found = Roster(link, replace(link.config.network, **network), said.append)
    found.base = Reply(link.workers[1].answer(link.places[1], link._text, HELLO, b"")[0]).content["base"]
    return found


def test_a_node_has_only_the_clients_that_the_operator_gives_it(small, tmp_path):
    """Bob's node, the first to answer, claims everybody's names and twenty more, and gets its own."""
    names = {name: 6 for name in ("ada", "bob", "cyd", *(f"extra-{number}" for number in range(20)))}

    def spoil(order, reply):
        return says(clients=names)(reply) if order["id"] == "1" else reply

    link, said = NetworkInProcess(tmp_path, small, tree(small), spoil), []
    link.names = {1: "bob", 2: "ada", 3: ""}  # 3 registered itself
    link.places[2], link.places[1] = link.places[1], link.places[2]
    found = roster(link, said, clients=3)
    found.greet()
    assert found.node == {"bob": 1, "ada": 2}
    assert "node 1, registered as 'bob', says that it has ada, cyd, extra-0 and 19 more" in said[0]
    assert said[1].endswith("if it should: cyd@NODE")
    given = roster(link, said := [], clients=("ada", "bob", "cyd@bob"))
    link.sent = 0
    given.greet()
    assert given.node == {"ada": 2, "bob": 1, "cyd": 1}


def test_where_a_client_is_is_said_once():
    assert homes(("ada", "bob@one", "a@b@two")) == {"ada": "ada", "bob": "one", "a@b": "two"} and homes(3) == {}
    with pytest.raises(UserError, match="network.clients has ada twice"):
        homes(("ada", "ada@two"))


def test_numbers_of_examples_are_those_of_the_beginning_and_count_so_far(small, tmp_path, capfd):
    """Of 6, 6 and 10**15 the last counts as ten times the median; with another number bob is not let in again."""
    many = 10**15

    def spoil(order, reply):
        if order["kind"] == "hello" and order["id"] == "2":
            return says(clients={"bob": many})(reply)
        return says(examples=many)(reply) if order["kind"] == "train" and order["client"] == "bob" else reply

    counted: list[Any] = []
    plain = clients.InFlight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "InFlight", lambda *item: counted.append((item[0], item[3])) or plain(*item))
        federate(tmp_path, small, tree(small, rounds=1), spoil=spoil)
    assert counted == [("ada", 6), ("bob", 60), ("cyd", 6)]
    assert "bob claims 1,000,000,000,000,000 examples; they count as 60" in capfd.readouterr().err
    assert json.loads((tmp_path / "run/network.json").read_text())["examples"] == {"ada": 6, "bob": many, "cyd": 6}
    link = NetworkInProcess(tmp_path, small, tree(small, network={**NETWORK, "clients": 2}))
    found = roster(link, said := [])
    found.examples["bob"] = many
    found.greet()
    assert found.node == {"ada": 1, "cyd": 3} and "node 2 says that bob has 6 examples" in said[0]
    everybody = ("ada", "bob", "cyd")
    assert [found.weight(name, everybody) for name in everybody] == [6, 60, 6]
    free = roster(link, [], weight_bound=None)
    free.examples = found.examples
    assert free.weight("bob", everybody) == many
