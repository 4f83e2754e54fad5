"""Every method passes the battery (`llm_fed.testing`), and its losses are what they were when it was accepted."""

from __future__ import annotations

import pytest
from battery import FEDERATED, GOLDEN, LOCAL, OF_PICTURES, SLACK, WHOLE_MODELS, go, settings_of, setup_of

from llm_fed import methods
from llm_fed.testing import federation
from llm_fed.testing.battery import CHECKS, Slack
from llm_fed.testing.federation import Outcome

NAMES = [*FEDERATED, *WHOLE_MODELS]
PAIRS = [(name, says) for name in NAMES for says in CHECKS if setup_of(name).fused or not CHECKS[says].fused_only]


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory) -> Outcome:
    """An uninterrupted run of each method. Checks may ask it for more work, and leave its memories as they were."""
    return go(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("whole", "says"), PAIRS, indirect=["whole"], scope="module")
def test_every_method(whole, says, request, tmp_path):
    name = request.node.callspec.params["whole"]
    CHECKS[says](whole, tmp_path, SLACK.get(name, Slack()))


@pytest.mark.parametrize("whole", NAMES, indirect=True, scope="module")
def test_golden_curve(whole, request):
    """The mean training losses of the three rounds and of `finish`, as they were when the method was accepted.

    A change that moves them changes results: say so in CHANGELOG.md, run `python tests/support/battery.py`, and put the
    line that it prints for the method into GOLDEN. The tolerance leaves room for another CPU.
    """
    with whole.undone():
        assert whole.curve() == pytest.approx(GOLDEN[request.node.callspec.params["whole"]], abs=1e-5)


QUICK = ("fedit", "ifca", "feddpa")  # whose checks on pairs every run of the tests makes
SAYS = (
    "every message survives the wire", "all clients at once is 1 at a time", "the loss falls",
    "killed in every round but the first and continued is uninterrupted", "the order of clients does not matter",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FEDERATED]
)
def test_every_method_learns_from_pairs(name, tmp_path):
    whole = federation.go(settings_of(name), federation.PAIRS.training(LOCAL.get(name, ())), tmp_path / "whole")
    for number, says in enumerate(SAYS):
        CHECKS[says](whole, tmp_path / str(number), SLACK.get(name, Slack()))


@pytest.mark.parametrize("name", [*FEDERATED, *WHOLE_MODELS])
def test_the_list_of_methods_says_its_paper_and_defaults(name):
    plain = name.removesuffix(OF_PICTURES)
    (described,) = (entry for entry in methods.builtin() if entry["name"] == plain)
    built = methods.build({"name": plain})
    assert described["paper"] == built.paper and built == type(built)(**described["settings"])
