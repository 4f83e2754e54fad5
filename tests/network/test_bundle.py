"""One message to each node: what lies in it, what may be wrong with a reply, and where it is cut."""

from typing import Any

import pytest

from llm_fed.network import link as link_module
from llm_fed.network.link import Bundles, Order, Reply, content_of, joined, separated


class FakeLink:
    """Keeps what is sent; what `replies` holds by id has come."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, Any], bytes]] = []
        self.replies: dict[str, Reply] = {}
        self.broken: set[int] = set()

    def nodes(self) -> dict[int, str]:
        return {1: "one", 2: "two"}

    def send(self, orders: Any, patience: float) -> list[str | None]:
        first = len(self.sent)
        self.sent += orders
        return [None if node in self.broken else str(first + at) for at, (node, _, _) in enumerate(orders)]

    def receive(self, ids: Any) -> dict[str, Reply]:
        return {id: self.replies.pop(id) for id in ids if id in self.replies}


NODE = {"ada": 1, "bob": 1, "cyd": 2}


def carried(link: FakeLink) -> Bundles:
    return Bundles(link, NODE.__getitem__, 1.0)


def order(client: str, content: bytes = b"", answer: int = 0, kind: str = "train") -> Order:
    return Order(client, {"kind": kind}, content, answer)


def test_a_node_gets_one_message_and_what_is_sent_alike_lies_in_it_once():
    link = FakeLink()
    orders = [order("ada", b"same"), order("cyd", b"same"), order("bob", b"other"), order("ada", b"same", kind="e")]
    asks = carried(link).send(orders)
    (one, first, content), (two, second, theirs) = link.sent
    assert (one, two, content, theirs) == (1, 2, b"sameother", b"same")
    assert [(o["kind"], o["client"], o["bytes"]) for o in first["orders"]] == [
        ("train", "ada", [0, 4]), ("train", "bob", [4, 9]), ("e", "ada", [0, 4])
    ]  # fmt: skip
    assert [content_of(o, content) for o in first["orders"]] == [b"same", b"other", b"same"]
    assert [o["ask"] for o in first["orders"]] == [asks[0], asks[2], asks[3]]
    assert [o["ask"] for o in second["orders"]] == [asks[1]] and len(set(asks)) == 4
    for where in (None, [0], [0, 99], [-1, 2], [3, 2], ["0", 2], [0, 2.0], 5):
        with pytest.raises(ValueError, match="its message cannot be at"):
            content_of({"bytes": where}, content)


@pytest.mark.parametrize(
    "where", [[0, 5], [2, 4], [5, 99], [6, 5], [-1, 5], ["5", 9], [5], {"a": 1}, [5.0, 9], [True, 9]], ids=str
)
def test_an_answer_that_cannot_be_where_it_says_is_its_clients_own_trouble(where):
    """Three answers of 5, 4 and 3 bytes; whatever the second says, the first and third are read, and the bytes of an
    answer are never given out twice."""
    entries, joint = joined([{"n": 1}, {"n": 2}, {"n": 3}], [b"first", b"next", b"end"], once=False)
    assert [reply.answer for reply in separated(entries, joint, 3, 7)] == [b"first", b"next", b"end"]
    entries[1]["bytes"] = where
    first, second, third = separated(entries, joint, 3, 7)
    assert (first.answer, third.answer, third.content["n"]) == (b"first", b"end", 3)
    assert "the message of its node 7 is wrong: its answer cannot be at" in second.error and second.answer == b""


def test_equal_answers_each_have_bytes_of_their_own():
    entries, joint = joined([{}, {}], [b"alike", b"alike"], once=False)
    assert joint == b"alikealike" and [reply.answer for reply in separated(entries, joint, 2, 1)] == [b"alike"] * 2


@pytest.mark.parametrize("replies", [None, "text", {"a": 1}, [], ["a"], [None]], ids=str)
def test_a_message_without_replies_has_none_for_anybody(replies):
    assert [reply.error for reply in separated(replies, b"", 2, 7)] == [
        "the message of its node 7 has no reply of it"
    ] * 2


def test_replies_are_given_out_once_and_an_error_of_all_is_of_each():
    link = FakeLink()
    bundles = carried(link)
    ada, cyd, bob = bundles.send([order("ada"), order("cyd"), order("bob")])
    assert bundles.receive([ada, bob, cyd]) == {}
    entries, joint = joined([{"n": 1}, {"n": 2}], [b"a", b"b"], once=False)
    link.replies = {"0": Reply({"replies": entries}, joint), "1": Reply({"error": "broken"})}
    assert bundles.receive([cyd])[cyd].error == "node 2: broken"
    assert bundles.receive([bob])[bob].answer == b"b"  # ada's has come as well, and waits
    assert bundles.receive([ada, bob])[ada].answer == b"a" and bundles.receive([ada, bob, cyd]) == {}


def test_an_order_that_cannot_be_sent_says_so():
    link = FakeLink()
    link.broken = {1}
    ada, bob, cyd = carried(link).send([order("ada"), order("bob"), order("cyd")])
    assert ada is None and bob is None and cyd is not None


@pytest.mark.parametrize(
    ("contents", "answer", "messages"),
    [
        ([b"a" * 6, b"b" * 6, b"c" * 6], 0, [["0"], ["1"], ["2"]]),
        ([b"a" * 4, b"b" * 4, b"c" * 4], 0, [["0", "1"], ["2"]]),
        ([b"a"] * 3, 4, [["0", "1"], ["2"]]),  # the answers would be too long
        ([b"a" * 99], 0, [["0"]]),  # one client's cannot be cut
    ],
)
def test_a_message_is_cut_between_clients_where_it_or_its_reply_would_be_too_long(
    monkeypatch, contents, answer, messages
):
    monkeypatch.setattr(link_module, "MOST", 10)
    link = FakeLink()
    orders = [Order(str(n), {"kind": kind}, content, answer if kind == "train" else 0)
              for kind in ("evaluate", "train") for n, content in enumerate(contents)]  # fmt: skip
    Bundles(link, lambda client: 1, 1.0).send(orders)
    found = [[o["client"] for o in message["orders"] if o["kind"] == "evaluate"] for _, message, _ in link.sent]
    assert found == messages
    assert found == [[o["client"] for o in message["orders"] if o["kind"] == "train"] for _, message, _ in link.sent]
    for _, message, content in link.sent:
        for one in message["orders"]:
            assert content_of(one, content) == contents[int(one["client"])]
