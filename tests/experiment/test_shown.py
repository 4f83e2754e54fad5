"""`llm-fed run CONFIG --dry-run --show N`: the first examples of each client, with what is trained."""

import json
import re
from pathlib import Path
from typing import Any

import tiny
import yaml
from odd_tokenizers import tokenizers

from llm_fed import tasks
from llm_fed.commands import api
from llm_fed.experiment import shown as module

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(folder: Path, **task: Any) -> Path:
    """A configuration of two clients on a base whose weights are absent."""
    base = folder / "base"
    tokenizer, _ = tokenizers()["bytes"]
    tokenizer.chat_template = CHAT
    tiny.build("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).config.save_pretrained(base)
    tokenizer.save_pretrained(base)
    for client in ("ada", "bob"):
        asked = [(f"Which bay, {client}?", "4"), ("[x]\x1b[2J", "é <|im_end|> 5")]
        asked += [(f"No {number}?", "x" * number) for number in range(1, 9)]
        rows = [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in asked
        ]
        (folder / "talks").mkdir(exist_ok=True)
        (folder / f"talks/{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "base": {"name": str(base)}, "method": {"name": "fedit"}, "seeds": {"federation": 0},
        "task": {"name": "files", "path": str(folder / "talks"), "template": "chat", "max_length": 64, **task},
    }  # fmt: skip
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return folder / "c.yaml"


def test_the_examples_as_json(tmp_path, llm_fed):
    """Without the base's weights: the tokenizer suffices."""
    found = llm_fed("run", written(tmp_path), "--dry-run", "--show", 2, "--json")
    assert found.code == 0, found.err
    said = json.loads(found.out)
    examples = said["examples"]
    settings = api.resolve(tmp_path / "c.yaml", [], None)
    data = tasks.load(settings.task, settings.federation_seed, settings.evaluation_seed)
    held = [
        (client, split, example)
        for client, given in data.clients.items()
        for split, rows in (("training", given.train), ("validation", given.validation), ("test", given.test))
        for example in rows[:2]
    ]
    assert {split for _, split, _ in held} == {"training", "validation", "test"}
    tokenizer, _ = tokenizers()["bytes"]
    for each, (client, split, example) in zip(examples, held, strict=True):
        assert (each["client"], each["split"]) == (client, split)
        (question,), (answer,) = example.prompt, example.answers
        assert f"user\n{question.content}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>" in each["text"]
        assert set(each) == {"client", "split", "text", "input_ids", "target", "stop_token_ids"}
        assert each["text"] == tokenizer.decode(each["input_ids"]) and len(each["target"]) == len(each["input_ids"])
        asked = "".join(each["text"].rpartition("<|im_start|>assistant\n")[:2])
        told = tokenizer.decode([id for id, one in zip(each["input_ids"], each["target"], strict=True) if one])
        assert each["text"] == f"{asked}{told}\n" and told.endswith("<|im_end|>")
        assert each["stop_token_ids"] == sorted(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    for split, counts in said["example_counts"].items():
        numbers = [len({"training": c.train, "validation": c.validation, "test": c.test}[split])
                   for c in data.clients.values()]  # fmt: skip
        assert counts == {"total": sum(numbers), "least": min(numbers), "most": max(numbers)}
    assert said["left_out"] == {} and said["note"] == ""
    assert not (tmp_path / "runs").exists()


def test_the_examples_in_a_terminal(tmp_path, llm_fed):
    """What is trained stands between marks, and what the data hold cannot steer the terminal."""
    found = llm_fed("run", written(tmp_path), "--dry-run", "--show", 9)
    assert found.code == 0, found.err
    shown = r"ada, (training|validation|test): 18 tokens, 2 of them (trained|asked for)\n"
    shown += re.escape("<|im_start|>user\nWhich bay, ada?<|im_end|>\n<|im_start|>assistant\n>>>4<|im_end|><<<\n")
    assert re.search(shown, found.out)
    assert ", training:" in found.out and ", validation:" in found.out and ", test:" in found.out
    assert "[x]?[2J<|im_end|>" in found.out and "\x1b" not in found.out
    assert ">>>é <|im_end|> 5<|im_end|><<<" in found.out and "asked for" in found.out
    assert "An answer ends at one of these tokens: <|im_end|>" in found.out


def test_what_counts_is_what_the_settings_say(tmp_path, llm_fed):
    config = written(tmp_path, loss_on="all")
    said = json.loads(llm_fed("run", config, "task.template=Q {prompt} A", "--dry-run", "--show", 1, "--json").out)
    assert said["examples"][0]["target"] == [False, *[True] * (len(said["examples"][0]["target"]) - 1)]
    tested = [each["target"] for each in said["examples"] if each["split"] == "test"]
    assert all(sum(target) < len(target) - 1 for target in tested)
    short = llm_fed("run", config, "task.max_length=9", "task.too_long=cut-start", "--dry-run", "--show", 1, "--json")
    cut = json.loads(short.out)
    assert len(cut["examples"][0]["input_ids"]) == 9


def test_refusals(tmp_path, llm_fed, small):
    config = written(tmp_path)
    llm_fed("run", config, "--show", 2).assert_refused("--show prints examples instead of training; give --dry-run")
    llm_fed("run", config, "--dry-run", "--show", 0).assert_refused()
    pictures = tmp_path / "p.yaml"
    pictures.write_text(yaml.safe_dump({"task": {"name": "cifar10"}, "method": {"name": "fedit"}}))
    llm_fed("run", pictures, "--dry-run", "--show", 2).assert_refused("this task trains image models; leave it out")


def test_a_run_says_the_same_tokens(small, finished):
    """Those that the run's own clients hold."""
    from llm_fed.bench.build import prepare
    from llm_fed.runs.reading import read_config
    from llm_fed.runs.tracking import Reporter

    config = read_config(finished)
    built = prepare(config, Reporter())
    found = module.shown(config, finished, 2)
    for client, site in built.clients.items():
        own = [each for each in found.examples if each.client == client]
        assert [(each.input_ids, each.target) for each in own if each.split == "training"] == [
            (each.input_ids, each.target) for each in site.train[:2]
        ]
        asked = site.data.queries["test"][:2]
        assert [each.input_ids[: len(query.prompt)] for each, query in zip(own[-len(asked) :], asked, strict=True)] == [
            query.prompt for query in asked
        ]
        assert own[0].stop_token_ids == sorted(built.base.prompt.stop)
