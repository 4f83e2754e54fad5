"""Runs whose clients have several experts: exported, scored again, copied and loaded for use."""

import json

import peft
import pytest
from transformers import AutoModelForCausalLM

from llm_fed import load_client
from llm_fed.experiment import run
from llm_fed.settings import configfile


@pytest.fixture(scope="module", params=["fedem", "feddpa"])
def composite(request, small, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    settings = {"fedem": {"num_models": 2}, "feddpa": {"anchors": 2}}[request.param]
    config = small.config(folder / "c.yaml", method={"name": request.param, **settings}, local={"steps": 8})
    result = run.train(configfile.load(config), folder / "run")
    return request.param, folder / "run", result


def test_a_client_is_a_folder_per_expert_and_a_gate(composite, small):
    method, folder, _ = composite
    experts = {"fedem": ["expert0", "expert1"], "feddpa": ["global", "local"]}[method]
    for client in ("ada", "bob", "cyd"):
        names = {path.name for path in (folder / "adapters" / client).iterdir()}
        assert names == {*experts, "gate.safetensors", "prompt.json", "README.md"}
        card = (folder / "adapters" / client / "README.md").read_text()
        assert "load_client" in card and "PeftModel.from_pretrained" not in card
        base = AutoModelForCausalLM.from_pretrained(small.base)
        for expert in experts:
            peft.PeftModel.from_pretrained(base, str(folder / "adapters" / client / expert))


def test_exported_scores_are_those_of_the_run(composite, llm_fed):
    _, folder, result = composite
    said = llm_fed("eval", folder, "--json")
    assert said.code == 0, said
    assert json.loads(said.out)["clients"] == result["scores"]["clients"]


def test_a_copy_is_loaded_and_answers(composite, llm_fed, small, tmp_path):
    _, folder, _ = composite
    assert llm_fed("export", folder, tmp_path / "out", "--client", "bob").code == 0
    again = llm_fed("export", folder, tmp_path / "out", "--client", "bob")  # what is there is replaced
    assert again.code == 0
    personal = load_client(tmp_path / "out" / "bob", str(small.base))
    texts = personal.generate(["w20 w21", "w21 w22"], template="plain", max_new_tokens=3)
    assert len(texts) == 2 and all(isinstance(text, str) for text in texts)
