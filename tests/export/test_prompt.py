"""An adapter carries how its prompts are put: its folder, what reads it, and the snippet of its card."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_base
import torch
from transformers import AutoTokenizer, BitsAndBytesConfig, GenerationConfig

from llm_fed import load_client
from llm_fed.basics import checksum
from llm_fed.basics.errors import UserError
from llm_fed.commands.evaluate import evaluate_adapter, evaluate_run, reopen
from llm_fed.experiment import run as experiment
from llm_fed.export import peft_folders
from llm_fed.export.card import model_card
from llm_fed.kinds.wording import Model
from llm_fed.models.loading import quantization as quantised_as
from llm_fed.models.origin import weights_digest
from llm_fed.models.prompt import FILE, Prompt, read_prompt
from llm_fed.runs.reading import read_config
from llm_fed.settings.configfile import from_dict
from llm_fed.settings.plugins import NotAllowed, allowing
from llm_fed.tasks.common import TEMPLATES, Template
from llm_fed.tasks.templates import encode_prompt

CHAT = "{% for message in messages %}w9 {{ message.content }} {{ date_string }} {% endfor %}w8"
TEMPLATES_HERE = ("alpaca-short", "chat")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """One with a chat template, and with settings of generation that must not count."""
    folder = tiny_base.folder(tmp_path_factory.mktemp("prompt") / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.add_special_tokens({"additional_special_tokens": ["w3"]})
    tokenizer.save_pretrained(folder)
    settings = GenerationConfig(
        eos_token_id=[1, 3], repetition_penalty=5.0, do_sample=True, temperature=2.0, max_length=5
    )
    settings.save_pretrained(folder)
    return folder


def tree(small, base: Path, template: str, **changes: Any) -> dict[str, Any]:
    return small.tree(
        base={"name": str(base)}, rounds=1, local={"steps": 12}, task={"template": template, "max_length": 48},
        eval={"max_new_tokens": 5}, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(small, base, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name in TEMPLATES_HERE:
        experiment.train(from_dict(tree(small, base, name)), folder / name)
    experts = tree(small, base, "chat", method={"name": "fedem", "num_models": 2})
    experiment.train(from_dict(experts), folder / "fedem")
    return {path.name: path for path in folder.iterdir()}


def prompts(small, client: str = "ada") -> list[str]:
    return [json.loads(line)["instruction"] for line in (small.data / client / "test.jsonl").read_text().splitlines()]


def answers(run: Path, client: str, asked: list[str]) -> list[str]:
    """What the run's own evaluation answers."""
    built, states = reopen(run, read_config(run))
    site, template = built.clients[client], built.config.task.template
    tokens = [encode_prompt(prompt, built.base.tokenizer, template=template) for prompt in asked]
    (found,) = built.runtime.run({client: site.generate(states[client], tokens)}).values()
    return found


def snippet(folder: Path, base: Path, prompt: str) -> str:
    """What the card's Python prints, run as a user would run it: with their own folder, base and prompt."""
    code = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[0]
    for given, own in ((f"path/to/{base.name}", str(base)), ("path/to/this/folder", str(folder)), ("a prompt", prompt)):
        assert given in code
        code = code.replace(given, own)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "card", "exec"), {})
    return said.getvalue().removesuffix("\n")


@pytest.mark.parametrize("name", [*TEMPLATES_HERE, "fedem"])
def test_the_cards_snippet_answers_as_load_client_and_as_the_run_itself(runs, small, base, name):
    folder, asked = runs[name] / "adapters/ada", prompts(small)
    expected = answers(runs[name], "ada", asked)
    assert any(expected) and load_client(folder, str(base)).generate(asked) == expected
    assert [snippet(folder, base, prompt) for prompt in asked] == expected
    assert ("load_client" in (folder / "README.md").read_text()) is (name == "fedem")


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_quantised_base_is_quantised_in_the_snippet_as_in_the_run(quantization):
    """The call that the snippet makes gives the settings with which `load_base` loads."""
    prompt = Prompt(Template("plain", "{prompt}\n"), (2,), 8)
    card = model_card(
        Model("a/b", prompt=prompt, dtype="bfloat16", revision="v2", quantization=quantization),
        client="c", method="m", paper="-", metrics={}, config="task: {name: x, path: null}",
    )  # fmt: skip
    assert f"of `a/b` (revision `v2`, bfloat16, {quantization}), trained" in card
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    compile(code, "card", "exec")
    assert code.count("revision='v2'") == 2 and "dtype='bfloat16'" in code
    (call,) = re.findall(r"quantization_config=(BitsAndBytesConfig\(.*\))\)\n", code)
    expected = quantised_as(quantization, torch.bfloat16)
    assert expected and eval(call, {"BitsAndBytesConfig": BitsAndBytesConfig}).to_dict() == expected.to_dict()


def test_what_the_folder_says(runs, base):
    said = json.loads((runs["alpaca-short"] / "adapters/ada" / FILE).read_text())
    assert said.pop("checksum") == checksum.of(said)
    assert said == {
        "template": "alpaca-short",
        "text": TEMPLATES["alpaca-short"],
        "stop_tokens": ["</s>", "w3"],
        "stop_token_ids": [1, 3],
        "max_new_tokens": 5,
        "base": {"name": str(base), "dtype": "float32", "weights": weights_digest(base)},
    }
    for name in ("chat", "fedem"):
        said = json.loads((runs[name] / "adapters/ada" / FILE).read_text())
        assert said["template"] == "chat" and "text" not in said
        assert (said["chat_template"], said["date_string"]) == (CHAT, "26 Jul 2024")


def edited(folder: Path, target: Path, **values: Any) -> Path:
    shutil.copytree(folder, target)
    path = target / FILE
    path.write_text(json.dumps(checksum.added({**json.loads(path.read_text()), **values})))
    return target


def test_the_folders_text_stop_tokens_and_length_count(runs, small, base, tmp_path):
    """Also of a template whose name nobody knows here."""
    asked = prompts(small)
    own = edited(runs["alpaca-short"] / "adapters/ada", tmp_path / "a", template="ours", text="w9 {prompt} w7 w7")
    client = load_client(own, str(base))
    wrapped = [f"w9 {prompt} w7 w7" for prompt in asked]
    plain = load_client(own, str(base)).generate([f"{text}" for text in wrapped], template="plain")
    assert client.generate(asked) == plain  # the tiny tokenizer does not see the newline of `plain`
    assert client.generate(asked, template="alpaca-short") != plain
    first = plain[0].split()[0]
    stopping = edited(own, tmp_path / "b", stop_token_ids=[int(first[1:])])
    assert load_client(stopping, str(base)).generate(asked[:1]) == [""]
    short = edited(own, tmp_path / "c", max_new_tokens=1)
    assert load_client(short, str(base)).generate(asked[:1]) == [first]
    assert len(load_client(short, str(base)).generate(asked[:1], max_new_tokens=3)[0].split()) > 1


def test_a_changed_chat_template_of_the_base_changes_nothing(runs, small, base, tmp_path):
    asked, folder = prompts(small), runs["chat"] / "adapters/ada"
    shutil.copytree(base, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    tokenizer.chat_template = "w30 {{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(NotAllowed, match="--allow prompt.json"):  # to this base the run's is another's
        load_client(folder, str(tmp_path / "other"))
    with allowing([FILE]):
        moved = load_client(folder, str(tmp_path / "other"))  # of the same weights, so there is nothing to warn of
    expected = load_client(folder, str(base)).generate(asked)
    assert moved.generate(asked) == expected != moved.generate(asked, template="chat")


def test_a_folder_that_does_not_say_is_warned_of(runs, small, base, tmp_path, capsys):
    folder = edited(runs["alpaca-short"] / "adapters/ada", tmp_path / "a")
    (folder / FILE).unlink()
    client, data = load_client(folder, str(base)), small.data / "ada/test.jsonl"
    with pytest.warns(peft_folders.AdapterWarning, match="does not say.*alpaca-short is used"):
        assumed = client.generate(prompts(small), max_new_tokens=5)
    assert assumed == load_client(runs["alpaca-short"] / "adapters/ada", str(base)).generate(prompts(small))
    client.generate(["w4"], template="alpaca-short")  # nothing to warn of
    evaluate_adapter(str(base), folder, [f"task.path={data}"])
    assert "does not name its prompt template, so alpaca-short is used" in capsys.readouterr().err
    evaluate_adapter(str(base), folder, [f"task.path={data}", "task.template=plain"])
    assert "does not name" not in capsys.readouterr().err


@pytest.mark.parametrize("name", TEMPLATES_HERE)
def test_eval_of_a_folder_scores_as_the_run(runs, small, base, name, capsys):
    given = evaluate_run(runs[name])["scores"]["clients"]["ada"]
    data, folder = small.data / "ada/test.jsonl", runs[name] / "adapters/ada"
    words = [f"task.path={data}", "eval.metric=rouge1"]
    assert evaluate_adapter(str(base), folder, words).mean == given and "does not name" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-5], "is damaged"),
        (lambda text: "[1]", "is damaged"),
        (lambda text: text.replace('"stop_token_ids"', '"stops"'), "it has no 'stop_token_ids'"),
        (lambda text: text.replace("{prompt}", "prompt"), "no {prompt}"),
        (lambda text: text.replace('"max_new_tokens": 5', '"max_new_tokens": 0'), "max_new_tokens is"),
        (lambda text: text.replace('"max_new_tokens": 5', '"max_new_tokens": true'), "max_new_tokens is"),
        (lambda text: re.sub(r'"stop_token_ids": \[[^]]*\]', '"stop_token_ids": ["</s>"]', text), "stop_token_ids is"),
        (lambda text: re.sub(r'"text": "[^"]*"', '"text": 5', text), "is damaged"),
        (lambda text: text.replace('"alpaca-short"', "7"), "are texts"),
        (lambda text: text.replace('"max_new_tokens": 5', '"max_new_tokens": 4'), "does not match its checksum"),
    ],
)
def test_a_damaged_file_is_named(runs, base, tmp_path, damage, message):
    folder = edited(runs["alpaca-short"] / "adapters/ada", tmp_path / "a")
    text = (folder / FILE).read_text()
    (folder / FILE).write_text(damage(text))
    assert (folder / FILE).read_text() != text
    with pytest.raises(UserError, match=message) as caught:
        load_client(folder, str(base))
    assert str(folder / FILE) in str(caught.value)


def test_a_chat_template_that_fails_is_named(runs, base, tmp_path):
    folder = edited(runs["chat"] / "adapters/ada", tmp_path / "a", chat_template="{% for message in %}")
    with allowing([FILE]), pytest.raises(UserError, match="chat template of .* cannot be applied"):
        load_client(folder, str(base)).generate(["w4"])


def merge_words(fed: Path, local: Path, out: Path) -> tuple[object, ...]:
    return "merge", "mean", "--fed", fed, "--local", local, "--out", out


def test_merged_adapters_carry_what_their_parents_say(runs, base, llm_fed, tmp_path):
    chat, short = runs["chat"] / "adapters/ada", runs["alpaca-short"] / "adapters/ada"
    assert llm_fed(*merge_words(chat, chat, tmp_path / "same")).code == 0
    assert read_prompt(tmp_path / "same/merged") == read_prompt(chat)
    refused = llm_fed(*merge_words(chat, short, tmp_path / "no"))
    refused.assert_refused("--fed", "'chat'", "--local", "'alpaca-short'", "--template")
    assert not (tmp_path / "no").exists()
    assert llm_fed(*merge_words(chat, short, tmp_path / "given"), "--template", "plain").code == 0
    given = read_prompt(tmp_path / "given/merged")
    assert given and given.template.name == "plain" and given.max_new_tokens == 5
    longer = edited(chat, tmp_path / "longer", max_new_tokens=9)
    said = llm_fed(*merge_words(chat, longer, tmp_path / "set"), "eval.max_new_tokens=7")
    assert said.code == 0 and "differ" not in said.err
    assert json.loads((tmp_path / "set/merged" / FILE).read_text())["max_new_tokens"] == 7
    origin = json.loads((chat / FILE).read_text())["base"] | {"quantization": "nf4"}
    other = edited(chat, tmp_path / "other", max_new_tokens=9, stop_token_ids=[3], base=origin)
    for words in (merge_words(chat, other, tmp_path / "two"), ("merge", chat, other, "--out", tmp_path / "folders")):
        said = llm_fed(*words)
        assert said.code == 0 and said.err.count("the adapters differ in ") == 3, said.err
        assert "eval.max_new_tokens: 5 of " in said.err and "base.quantization: full precision of " in said.err
    # The card's snippet works on a merged adapter, too.
    asked = ["w20 w21", "w22 w23"]
    expected = load_client(tmp_path / "same/merged", str(base)).generate(asked)
    assert [snippet(tmp_path / "same/merged", base, prompt) for prompt in asked] == expected


def test_a_merge_of_folders_that_do_not_say(runs, llm_fed, tmp_path):
    chat = runs["chat"] / "adapters/ada"
    silent = edited(chat, tmp_path / "silent")
    (silent / FILE).unlink()
    said = llm_fed(*merge_words(chat, silent, tmp_path / "one"))
    assert said.code == 0 and f"{silent} does not name its prompt template, so chat" in said.err
    assert read_prompt(tmp_path / "one/merged") == read_prompt(chat)
    said = llm_fed(*merge_words(silent, silent, tmp_path / "none"))
    assert said.code == 0 and "so alpaca-short is used" in said.err
    assert read_prompt(tmp_path / "none/merged") is None  # nobody knows, so nothing is claimed
    assert "load_client" in (tmp_path / "none/merged/README.md").read_text()


def test_every_client_has_the_same_file_without_a_path(runs, small):
    for run in runs.values():
        texts = [path.read_text() for path in run.glob(f"adapters/*/{FILE}")]
        assert len(texts) == 3 and len(set(texts)) == 1 and str(small.base.parent) not in texts[0]
