"""What each part of an upload may hold: bounds of its role, beside what was sent and beside what the others send."""

import pytest
import torch

from llm_fed.basics.errors import UserError
from llm_fed.federation.bounds import ALONE, COORDINATE, LAYER
from llm_fed.federation.uploads import flaws
from llm_fed.methods import METHODS
from llm_fed.state import State, roles
from llm_fed.state.roles import Counts, Echo, Flags, Given, Index, Statistic, Weights, own_flaw
from llm_fed.state.wire import pack, unpack


def layer(mean=0.0, variance=1.0, counter=5) -> State:
    extras = {
        "bn.running_mean": torch.full((4,), float(mean)),
        "bn.running_var": torch.full((4,), float(variance)),
        "bn.num_batches_tracked": torch.tensor(counter),
    }
    return State.of({"w": torch.ones(3)}, extras)


def said(content, sends, like=None, examples=None) -> str:
    return own_flaw(content, sends, Given.of(content if like is None else like, examples))


COUNTED = {"prototypes": Statistic(rows="counts"), "counts": Counts()}


@pytest.mark.parametrize(
    "counts, reason",
    [
        ([2, 0, 3], ""),
        ([2, 0, 10**9], " adds up to 1000000002, and the client has 5 training examples"),
        ([-(10**6), 10**6, 5], " holds -1000000, and a count is 0 or more"),
        ([2**63 - 1, 1, 5], " adds up to 9223372036854775813, and"),  # not 5 more than a number that is below 0
        ([0, 0, 0], " adds up to 0, and"),
        ([0, 2, 3], ""),
    ],
)
def test_counts_are_of_what_the_client_has(counts, reason):
    means = torch.ones(3, 2) * (torch.tensor(counts) > 0)[:, None]
    found = said({"prototypes": means, "counts": torch.tensor(counts)}, COUNTED, examples=5)
    assert found.startswith(f"upload.counts{reason}") if reason else not found


def test_a_statistic_of_no_examples_is_zero():
    upload = {"prototypes": torch.ones(3, 2), "counts": torch.tensor([2, 0, 3])}
    assert said(upload, COUNTED, examples=5) == (
        "upload.prototypes has numbers in rows of which it has no examples (counts)"
    )


@pytest.mark.parametrize("number, good", [(0, True), (3, True), (4, False), (-1, False), (2**62, False)])
def test_an_index_is_one_of_those_that_there_are(number, good):
    found = said({"model": number}, {"model": Index()}, {"model": 3})
    assert found == ("" if good else f"upload.model is {number}, and it is 0 to 3")


def test_an_echo_is_what_was_sent_and_a_probability_is_one():
    assert not said({"version": 2}, {"version": Echo()}, {"version": 2})
    assert said({"version": 3}, {"version": Echo()}, {"version": 2}) == "upload.version is 3, and the client was sent 2"
    share = {"share": Statistic(least=0, most=1)}
    assert not said({"share": 0.5}, share) and said({"share": 1.5}, share) == "upload.share holds 1.5, and it is 0 to 1"
    seen = {"seen": Flags(some=True)}
    assert not said({"seen": torch.tensor([True, False])}, seen) and said({"seen": torch.tensor([False])}, seen)


@pytest.mark.parametrize(
    "changes, sent, upload, reason",
    [
        (True, layer(), layer(variance=-0.9), ""),  # 1 - 0.9
        (True, layer(), layer(variance=-1 - 5e-7), ""),  # rounding
        (True, layer(), layer(variance=-1001.0), ".extras.bn.running_var holds a variance of -1e+03"),
        (False, layer(), layer(variance=-0.9), ".extras.bn.running_var holds a variance of -0.9"),
        (False, layer(), layer(counter=-1), ".extras.bn.num_batches_tracked holds -1"),
        (False, layer(), layer(counter=2**62), ".extras.bn.num_batches_tracked holds 4611686018427387904"),
    ],
)
def test_a_variance_and_a_counter_are_0_or_more(changes, sent, upload, reason):
    found = said(upload, {"": Weights(changes=changes)}, sent)
    assert found.startswith(f"upload{reason}") if reason else not found


def refused(uploads, sent=None, **options) -> list[str]:
    given = [Given.of(sent or layer(), 1)] * len(uploads)
    return flaws(uploads, given, 10.0, {"": Weights(changes=False)}, **options)


@pytest.mark.parametrize("odd", [3.4e38, 1.1 * LAYER])
def test_statistics_are_compared_with_the_usual_ones(odd):
    """Of three clients whose variances are 1 one has more than LAYER times as much, or one number over COORDINATE."""
    *others, found = refused([layer(), layer(), layer(variance=odd)])
    assert others == ["", ""] and found.startswith("upload.extras.bn.running_var holds") and "too far" in found
    assert refused([layer(), layer(), layer(variance=0.9 * LAYER)]) == [""] * 3
    *others, found = refused([layer(), layer(), layer(mean=-odd)])
    assert others == ["", ""] and found.startswith("upload.extras.bn.running_mean holds -")
    assert refused([layer(), layer(), layer(mean=-0.9 * LAYER)]) == [""] * 3


def test_one_number_is_compared_too():
    wide = [State.of({"w": torch.ones(1)}, {"bn.running_var": torch.ones(1000)}) for _ in range(3)]
    wide[2].extras["bn.running_var"][7] = 1.1 * COORDINATE
    assert [bool(flaw) for flaw in refused(wide, wide[0])] == [False, False, True]


def test_who_has_taken_few_steps_is_near_what_was_sent_and_is_not_refused():
    """The others' variances have fallen from 1 to 0.01; what has not moved is no further away than it was sent."""
    assert refused([layer(variance=0.01), layer(variance=0.01), layer(variance=0.99)]) == [""] * 3


def test_of_few_clients_each_is_compared_with_what_it_was_sent():
    assert refused([layer(variance=0.9 * ALONE)]) == [""]
    (found,) = refused([layer(variance=1.1 * ALONE)])
    assert "too far from what it was sent" in found


def test_a_row_of_prototypes_is_compared_with_all_rows():
    uploads = [{"prototypes": torch.ones(20, 2), "counts": torch.ones(20, dtype=torch.long)} for _ in range(3)]
    uploads[2]["prototypes"][3] = 35.0
    given = [Given.of(uploads[0], 20)] * 3
    *others, found = flaws(uploads, given, 10.0, COUNTED)
    assert others == ["", ""] and found.startswith("a row of upload.prototypes has norm 49.5, over 30 times")


def test_what_is_known_of_an_upload_outlives_a_checkpoint():
    given = Given.of({"delta": layer(), "model": 3, "nothing": None, "several": [layer(), 2]}, 7)
    again = Given(**unpack(pack(given.message())))
    assert again.examples == 7 and again.at("model") == 3 and again.at("several.1") == 2
    assert torch.equal(again.at("delta")["bn.running_var"], torch.ones(4))
    assert Given().at("delta.x") is None and Given().at("") is None


@pytest.mark.parametrize(
    "sends, like, reason",
    [
        ({}, {"counts": torch.ones(3).long()}, "counts .a tensor of whole numbers. without saying what it is"),
        ({}, {"delta": layer(), "loss": 1.5}, "loss .a float. without saying"),
        ({"counts": Counts()}, {"counts": torch.ones(3)}, "as Counts, which is a role of a tensor of whole numbers"),
        ({"model": Index()}, {"model": True}, "model .a bool. as Index"),
        ({"model": Index(), "extra": Index()}, {"model": 0}, "names a role of 'extra', which it does not send"),
        ({"x": Statistic(rows="n")}, {"x": torch.ones(1)}, "with rows='n', which is not sent beside it"),
    ],
)
def test_a_method_that_sends_something_without_a_role_is_refused(sends, like, reason):
    with pytest.raises(UserError, match=reason):
        roles.check("mine", sends, like)


def test_what_has_a_role_is_not_refused():
    like = {"delta": layer(), "counts": torch.ones(3).long(), "nothing": None, "seen": True, "version": 1}
    roles.check("mine", {"counts": Counts(), "seen": Flags(), "version": Echo()}, like)
    roles.check("mine", {}, layer())
    assert all(isinstance(role, roles.Role) for kind in METHODS.values() for role in kind.sends.values())
