"""Every method that trains adapters passes the battery on classifiers of texts, too."""

from collections.abc import Iterable
from pathlib import Path

import every
import pytest
from battery import FEDERATED, SETTINGS, SLACK

from llm_fed.testing import federation
from llm_fed.testing.battery import CHECKS, Slack
from llm_fed.testing.federation import CLASSIFIERS

QUICK = (  # what depends most on the kind of model
    "every message survives the wire",
    "killed in every round but the first and continued is uninterrupted",
    "the loss falls",
    "all clients at once is 1 at a time",
)
LOCAL = {"scaffold": ["local.optimizer=sgd", "local.lr=0.2", "local.lr_end=0.2"]}
NAMES = [name for name in FEDERATED if not name.endswith(" of pictures")]
# A correction, a model of one's own, clusters, stacked adapters.
FAMILIES = ("scaffold", "feddpa", "ifca", "flora")


def pass_all(name: str, checks: Iterable[str], folder: Path) -> None:
    """One uninterrupted run serves all checks of a method."""
    settings = {"name": name, **SETTINGS.get(name, {})}
    whole = federation.go(settings, CLASSIFIERS.training(LOCAL.get(name, ())), folder / "whole")
    slack, places = SLACK.get(name, Slack()), {says: folder / str(number) for number, says in enumerate(CHECKS)}
    every.passes(checks, lambda says: CHECKS[says](whole, places[says], slack))


@pytest.mark.parametrize("name", every.quick(NAMES, FAMILIES))
def test_every_method(name, tmp_path):
    pass_all(name, QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_method_in_every_check(name, tmp_path):
    pass_all(name, (says for says in CHECKS if says not in QUICK), tmp_path)


@pytest.mark.parametrize("name", ["fml", "fedproto", "fd", "fedapen", "fedkd", "fedmoe"])
def test_methods_of_whole_models_say_why_not(name):
    from llm_fed import methods

    said = CLASSIFIERS.refusal(methods.build({"name": name}), {"name": name})
    assert "whole image models; set adapter=null" in said
