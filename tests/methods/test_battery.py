"""Every method passes the battery (`llm_fed.testing`), and its losses are what they were when it was accepted."""

from collections.abc import Iterable
from pathlib import Path

import every
import pytest
from battery import FEDERATED, GOLDEN, OF_PICTURES, SLACK, WHOLE_MODELS, go

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.methods import fields_of
from llm_fed.settings import range_of
from llm_fed.testing.battery import CHECKS, Slack

NAMES = [*FEDERATED, *WHOLE_MODELS]
# A method of each family, of adapters and of whole models: every run of the tests makes all checks of these, but for
# the rare ones. Of the other methods it makes what one run of their federation shows, and their golden curve; of those
# that train whole models as they train adapters, nothing. `make long` makes every check of every method.
FAMILIES = (
    "local", "fedlora", "scaffold", "ditto", "rolora", "feddpa", "flora", "fedem", "ifca", "fedmerge",
    "fedbuff", "feddf", "feddle", "lg-fedavg of pictures",
)  # fmt: skip
OF_WHOLE_MODELS = [name + OF_PICTURES for name in methods.METHODS if name + OF_PICTURES in NAMES and name not in NAMES]
# Each of these runs a federation again.
AGAIN = (
    "all clients at once is 1 at a time", "the order of clients does not matter",
    "killed in every round but the first and continued is uninterrupted",
)  # fmt: skip
# And these as a rule fail where another check fails, too: a method that draws anew when it is repeated does so when it
# is continued, and one whose clients mix does so when they train one by one.
RARE = (
    "the same seed gives the same run, another seed another", "all clients at once is 2 at a time",
    "all clients at once is 1 at a time in float32",
)  # fmt: skip
ALWAYS = ("fedmerge",)  # on which every run of the tests makes the rare ones, too
# What does not depend on the kind of model: of whole models it is tried on those in FAMILIES.
ALIKE = (
    "the server's step is pure", "a round in which nothing arrives is a step, too",
    "the order of uploads does not matter", "uploads look as upload_like says",
    "personalize only computes, after finish, too",
)  # fmt: skip


def rare(name: str) -> set[str]:
    """The checks of a method that `make long` makes."""
    if name in ALWAYS:
        return set()
    if name in FAMILIES:
        return {*RARE}
    return {*RARE, *AGAIN, *(ALIKE if OF_PICTURES in name else [])}


def pass_all(name: str, folder: Path, checks: Iterable[str], *, golden: bool) -> None:
    """The checks of a method that its federation has and, if wanted, its golden curve; one uninterrupted run serves
    them. They may ask it for more work, and leave its memories as they were."""
    whole, slack = go(name, folder / "whole"), SLACK.get(name, Slack())
    places = {says: folder / str(number) for number, says in enumerate(CHECKS)}

    def check(says: str) -> None:
        if says in CHECKS:
            CHECKS[says](whole, places[says], slack)
            return
        assert name in GOLDEN, f"add the line that `python tests/support/battery.py {name!r}` prints to GOLDEN there"
        with whole.undone():
            assert whole.curve() == pytest.approx(GOLDEN[name], abs=1.5e-5)  # one in the last digit

    its_own = [says for says in CHECKS if says in checks and (whole.setup.fused or not CHECKS[says].fused_only)]
    every.passes([*its_own, *(["the golden curve"] if golden else [])], check)


@pytest.mark.parametrize("name", every.quick(NAMES, [*FEDERATED, *OF_WHOLE_MODELS]))
def test_every_method(name, tmp_path):
    """The checks, and the golden curve: the mean training losses of the three rounds and of `finish`, as they were when
    the method was accepted.

    A change that moves a curve changes results: say so in CHANGELOG.md, run `python tests/support/battery.py NAME`, and
    put the line that it prints into GOLDEN. The tolerance leaves room for another CPU.
    """
    pass_all(name, tmp_path, {*CHECKS} - rare(name), golden=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALWAYS])
def test_every_method_in_every_check(name, tmp_path):
    pass_all(name, tmp_path, rare(name), golden=False)


def test_rare_checks_are_checks():
    assert {says for name in NAMES for says in rare(name)} < set(CHECKS)
    assert set(ALWAYS) < set(FAMILIES) < set(NAMES)


def test_the_list_of_methods_says_its_paper_and_defaults():
    for entry in methods.builtin():
        built = methods.build({"name": entry["name"]})
        assert entry["paper"] == built.paper and built == type(built)(**entry["settings"]), entry["name"]
    assert {name.removesuffix(OF_PICTURES) for name in NAMES} <= {entry["name"] for entry in methods.builtin()}


@pytest.mark.parametrize("name", methods.METHODS)
def test_settings_out_of_range_are_refused_by_their_names(name):
    for key, hint in fields_of(methods.METHODS[name]).items():
        said = range_of(hint)
        wrong: list[object] = [-1] if said.startswith(("at least", "above")) else ["nowhere"] if " or " in said else []
        wrong += [3] if "at most" in said or "below" in said else []
        for value in wrong:
            with pytest.raises(UserError, match=rf"method\.{key}\b"):
                methods.build({"name": name, key: value})
