"""The token that ends a turn in a chat template ends answers everywhere, also where the tokenizer's EOS is another."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_base
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_fed import load_client
from llm_fed.bench.build import prepare
from llm_fed.experiment import run as experiment
from llm_fed.kinds.language import load_base
from llm_fed.models.prompt import FILE, read_prompt, stop_tokens
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict

END = 30  # the word w30; the tokenizer's EOS is </s>, number 1
CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} w30 {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tiny_base.folder(tmp_path_factory.mktemp("ends") / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w30"]})
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[1, 3]).save_pretrained(folder)  # w3 is text, so it ends no answer
    return folder


@pytest.fixture(scope="module")
def run(small, base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ends") / "run"
    tree = small.tree(
        base={"name": str(base)}, rounds=1, local={"steps": 12}, task={"template": "chat", "max_length": 48},
        eval={"max_new_tokens": 5},
    )  # fmt: skip
    experiment.train(from_dict(tree), folder)
    return folder


def test_training_and_scoring_of_a_run(small, base):
    config = from_dict(small.tree(base={"name": str(base)}, task={"template": "chat", "max_length": 48}))
    built: Any = prepare(config, Reporter())
    for site in built.clients.values():
        assert all(example.answer[-1] == END for example in site.train)
        assert all(example.input_ids.count(1) == 0 for example in site.train)
    assert stop_tokens(built.base) == {1, END}
    text = prepare(from_dict(small.tree(base={"name": str(base)}, task={"max_length": 48})), Reporter())
    assert stop_tokens(text.base) == {1}  # type: ignore[arg-type]  # a template of text ends with EOS


def test_the_adapters_folder_says_so_and_a_chat_stops_there(run, base, monkeypatch):
    said = json.loads((run / "adapters/ada" / FILE).read_text())
    assert said["stop_token_ids"] == [1, END] and said["stop_tokens"] == ["</s>", "w30"]
    model: Any = load_client(run / "adapters/ada", str(base))
    assert stop_tokens(model.base) == {1, END}
    loaded = load_base(from_dict({"base": {"name": str(base), "dtype": "float32"}}).base, "cpu")
    plain, config, _ = loaded.as_said(from_dict({}), lambda: read_prompt(run / "adapters/ada"), ["task.template"])
    assert plain.prompt and plain.prompt.template.name == config.task.template == "alpaca-short"
    chat = loaded.prompt_of(from_dict({"task": {"template": "chat"}}))
    assert chat and chat.stop == (1, END)


def test_a_merged_model_stops_there_by_itself(run, base, llm_fed, tmp_path):
    assert llm_fed("export", run, tmp_path / "out", "--merged", "--client", "ada").code == 0
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out/ada").eval()
    assert whole.generation_config.eos_token_id == [1, END]
    with torch.no_grad():
        whole.lm_head.weight.zero_()[END] = 1e3 * torch.ones(24)
        whole.lm_head.weight[END + 1] = -1e3 * torch.ones(24)  # whatever the state's sign is, it is one of the two
    (answer,) = whole.generate(torch.tensor([[4, 5]]), max_new_tokens=4, do_sample=False)
    assert len(answer) <= 6


def test_doctor_names_it(base, llm_fed):
    said = llm_fed("doctor", "--base", base)
    assert "end-of-answer tokens: '</s>', 'w30'" in said.out
