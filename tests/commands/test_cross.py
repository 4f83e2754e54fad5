"""`llm-fed eval RUN --cross`: the model of each client on the examples of each client."""

import json
import shutil

import pytest

from llm_fed.basics.errors import UserError
from llm_fed.commands.cross import cross_scores
from llm_fed.commands.evaluate import evaluate_run


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_a_row_is_the_usual_evaluation_of_one_model_at_all_clients(run, tmp_path, llm_fed):
    """As where every client's folder holds that model."""
    said = llm_fed("eval", run, "--cross", "--json")
    found = json.loads(said.out)
    assert "3 models on the examples of 3 clients are 9 evaluations with 27 answers" in said.err
    assert found["clients"] == ["ada", "bob", "cyd"]
    for owner, row in zip(found["clients"], found["scores"], strict=True):
        copy = shutil.copytree(run, tmp_path / owner)
        for client in found["clients"]:
            if client != owner:
                shutil.rmtree(copy / "adapters" / client)
                shutil.copytree(copy / "adapters" / owner, copy / "adapters" / client)
        assert evaluate_run(copy).clients == pytest.approx(dict(zip(found["clients"], row, strict=True)), rel=1e-5)
    columns = [list(column) for column in zip(*found["scores"], strict=True)]
    assert columns != found["scores"]  # so that rows and columns cannot be confused
    assert json.loads((run / "cross.json").read_text()) == found
    page = (run / "report.html").read_text()
    assert "Every personal model on every client" in page and page.count('class="heat" style') == 12  # with the base


def test_a_limit_and_a_terminal(run, llm_fed):
    said = llm_fed("eval", run, "--cross", "--limit", 1)
    assert "9 evaluations with 9 answers" in said.err and "model of" in said.out and "cross.json" in said.out
    assert json.loads((run / "cross.json").read_text())["limit"] == 1
    assert "at most 1 examples each" in (run / "report.html").read_text()


def test_what_it_does_not_take(run, tmp_path, llm_fed):
    llm_fed("eval", "--base", tmp_path, "--cross").assert_refused("needs a run folder")
    with pytest.raises(UserError, match="--cross needs at least two clients with test examples, but the run has 1"):
        cross_scores(run, settings=["task.clients=1"])
