"""Sample predictions of a finished run: whose they are, that they are what was scored, and where there are none."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_images
from small_run import CLIENTS, SIZES

from llm_fed.commands.quickstart import ASSETS
from llm_fed.experiment import finish
from llm_fed.experiment import run as experiment
from llm_fed.experiment.simulation import Simulation
from llm_fed.kinds.kind import Shown
from llm_fed.kinds.language import load_base
from llm_fed.runs.records import read_records
from llm_fed.scoring.scores import score
from llm_fed.settings.config import BaseConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.tasks.common import Example, Turn


def trained(small, folder: Path, **changes: Any) -> dict[str, Any]:
    return experiment.train(from_dict(small.tree(**{"rounds": 1, **changes})), folder)


def by_client(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in read_records(folder / "samples.jsonl"):
        found.setdefault(line["client"], []).append(line)
    return found


def test_the_samples_are_the_answers_that_were_scored(small, tmp_path):
    """With all test examples as samples, both scores can be computed from them alone."""
    said = trained(small, tmp_path / "run", eval={"base": True}, local={"steps": 8})
    found = by_client(tmp_path / "run")
    assert list(found) == list(CLIENTS) and {len(lines) for lines in found.values()} == {SIZES["test"]}
    assert found["ada"][0]["prompt"] == "w20 w21" and found["ada"][0]["references"] == ["w4 w5"]
    for key, scores in (("answer", said["scores"]), ("base", said["base"])):
        for client, lines in found.items():
            texts = [line[key] for line in lines]
            assert score("rouge1", texts, [line["references"] for line in lines]) == scores["clients"][client]
    assert any(line["answer"] != line["base"] for line in found["ada"])


CHAT = (
    "{% if messages[0].role != 'system' %}system: Be a clerk.\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = (Turn("user", "Who?"), Turn("assistant", "Ada."), Turn("user", "When?"))


@pytest.mark.parametrize(("prompt", "rendered", "parts"), [
    ("Who?", "Who?", {"text": "Who?", "template": "{prompt}"}),
    ("Who?", "Q: Who? A:", {"text": "Who?", "template": "Q: {prompt} A:"}),
    ("Who?", "When?", {}),
    ("Who?", "system: Be a clerk.\nuser: Who?\nassistant: ",
     {"text": "Who?", "template": "system: Be a clerk.\nuser: {prompt}\nassistant: "}),
    ((Turn("system", "No."), TALK[0]), "system: No.\nuser: Who?\nassistant: ",
     {"text": "Who?", "system": "No.", "template": "system: {system}\nuser: {prompt}\nassistant: "}),
    (TALK, "system: Be a clerk.\nuser: Who?\nassistant: Ada.\nuser: When?\nassistant: ",
     {"text": "user: Who?\nassistant: Ada.\nuser: When?",
      "template": "system: Be a clerk.\nuser: {prompt}\nassistant: "}),
])  # fmt: skip
def test_a_prompt_stands_apart_from_its_template(prompt, rendered, parts):
    base = load_base(BaseConfig(str(ASSETS / "tiny-base"), dtype="float32"), "cpu")
    base.tokenizer.chat_template = CHAT
    found = Shown(base)._parts(Example(prompt, ("",)), rendered)
    assert found == parts


def test_so_many_examples_of_so_many_clients(small, tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "_SAMPLED", 2)
    mode = Simulation()
    experiment.train(
        from_dict(small.tree(rounds=1, report={"samples": 1}, eval={"base": True})), tmp_path / "run", mode=mode
    )
    (base,) = mode.baselines._bases.values()
    assert {len(own) for own in base.answers.values()} == {1}  # what no page shows is not kept
    assert {client: len(lines) for client, lines in by_client(tmp_path / "run").items()} == {"ada": 1, "bob": 1}


@pytest.mark.parametrize("changes", [{"report": {"samples": 0}}, {"privacy": {"clip": 1.0}}])
def test_none_are_wanted(small, tmp_path, changes):
    trained(small, tmp_path / "run", **changes)
    assert not (tmp_path / "run/samples.jsonl").exists()


def test_none_of_images(tmp_path):
    experiment.train(from_dict(tiny_images.tree(tiny_images.npz(tmp_path / "small.npz"), rounds=1)), tmp_path / "run")
    assert not (tmp_path / "run/samples.jsonl").exists()


def test_options_are_shown_as_text(small, tmp_path):
    data = shutil.copytree(small.data, tmp_path / "data")
    for path in data.glob("*/*.jsonl"):
        rows = [json.loads(line) | {"options": ["w4 w5", "w7 w8", "w10 w11"]} for line in path.open()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"eval": {"metric": "option_accuracy"}, "task": {"path": str(data)}, "report": {"samples": 3}}
    said = trained(small, tmp_path / "run", local={"steps": 8}, **words)
    for client, lines in by_client(tmp_path / "run").items():
        assert {line[key] for line in lines for key in ("answer", "base")} <= {"w4 w5", "w7 w8", "w10 w11"}
        right = [100 * (line["answer"] in line["references"]) for line in lines]
        assert sum(right) / len(right) == pytest.approx(said["scores"]["clients"][client])


def test_another_number_is_no_other_run(small, tmp_path):
    """A finished run stays as it is; one that goes on has the new number at its end."""
    trained(small, tmp_path / "run", report={"samples": 1})
    trained(small, tmp_path / "run", report={"samples": 2})
    assert len(by_client(tmp_path / "run")["ada"]) == 1
    trained(small, tmp_path / "run", rounds=2, report={"samples": 2})
    assert len(by_client(tmp_path / "run")["ada"]) == 2
    trained(small, tmp_path / "run", rounds=3, report={"samples": 0})
    assert not (tmp_path / "run/samples.jsonl").exists()
