"""Every method that trains adapters passes the battery on classifiers of texts, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from battery import FEDERATED, SETTINGS, SLACK

from llm_fed.testing import federation
from llm_fed.testing.battery import CHECKS, Slack
from llm_fed.testing.federation import CLASSIFIERS, Outcome

QUICK = (  # what depends most on the kind of model
    "every message survives the wire",
    "killed in every round but the first and continued is uninterrupted",
    "the loss falls",
    "all clients at once is 1 at a time",
)
LOCAL = {"scaffold": ["local.optimizer=sgd", "local.lr=0.2", "local.lr_end=0.2"]}
NAMES = [name for name in FEDERATED if not name.endswith(" of pictures")]


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory) -> Outcome:
    settings = {"name": request.param, **SETTINGS.get(request.param, {})}
    return federation.go(
        settings, CLASSIFIERS.training(LOCAL.get(request.param, ())), tmp_path_factory.mktemp(request.param)
    )


def checked(whole: Outcome, says: str, name: str, folder: Path) -> None:
    slack = SLACK.get(name, Slack())
    CHECKS[says](whole, folder, slack)


@pytest.mark.parametrize(("whole", "says"), [(n, says) for n in NAMES for says in QUICK], indirect=["whole"],
                         scope="module")  # fmt: skip
def test_every_method(whole, says, request, tmp_path):
    checked(whole, says, request.node.callspec.params["whole"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "says"), [(n, says) for n in NAMES for says in CHECKS if says not in QUICK],
                         indirect=["whole"], scope="module")  # fmt: skip
def test_every_method_in_every_check(whole, says, request, tmp_path):
    checked(whole, says, request.node.callspec.params["whole"], tmp_path)


@pytest.mark.parametrize("name", ["fml", "fedproto", "fd", "fedapen", "fedkd", "fedmoe"])
def test_methods_of_whole_models_say_why_not(name):
    from llm_fed import methods

    said = CLASSIFIERS.refusal(methods.build({"name": name}), {"name": name})
    assert "whole image models; set adapter=null" in said
