"""A federation that trains on conversations, whose last turns are scored, and whose adapters answer in a chat."""

import json
import shutil

import pytest
from small_run import CLIENTS
from transformers import AutoTokenizer

from llm_fed import load_client
from llm_fed.experiment import run as experiment
from llm_fed.runs.records import read_records
from llm_fed.settings.configfile import from_dict

pytestmark = pytest.mark.usefixtures("quick")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %} {% endfor %}"


@pytest.fixture(scope="module")
def talks(small, tmp_path_factory):
    """The small federation's base with a chat template, and two turns in each of its rows."""
    folder = tmp_path_factory.mktemp("talks")
    shutil.copytree(small.base, folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    for client, (first, second) in CLIENTS.items():
        (folder / "data" / client).mkdir(parents=True)
        for split, size in {"train": 6, "validation": 2, "test": 3}.items():
            rows = []
            for i in range(size):
                words = [f"w{20 + i}", f"w{first}", f"w{21 + i}", f"w{second}"]
                roles = ["user", "assistant", "user", "assistant"]
                rows.append([{"role": role, "content": word} for role, word in zip(roles, words, strict=True)])
            text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
            (folder / "data" / client / f"{split}.jsonl").write_text(text)
    return folder


def test_a_federation_of_conversations(small, talks, tmp_path):
    task = {"path": str(talks / "data"), "template": "chat"}
    tree = small.tree(base={"name": str(talks / "base")}, task=task, local={"steps": 8}, method={"name": "local"})
    summary = experiment.train(from_dict(tree), tmp_path / "run")
    losses = [line["loss"] for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "round"]
    assert losses[-1] < losses[0] and set(summary["scores"]["clients"]) == set(CLIENTS)
    personal = load_client(tmp_path / "run/adapters/ada", str(talks / "base"))
    (answer,) = personal.generate(["w20"])
    assert answer.split()[:1] == ["w4"]  # the first turn of the assistant was trained on, too
    experiment.train(from_dict({**tree, "task": {**tree["task"], "template": "plain"}}), tmp_path / "plain")
    losses = [line["loss"] for line in read_records(tmp_path / "plain/metrics.jsonl") if line["kind"] == "round"]
    assert losses[-1] < losses[0]  # a template of text takes conversations, too
