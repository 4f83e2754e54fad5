"""`llm-fed export --merged`: whole models that plain transformers loads, and that answer as base and adapter do."""

import shutil
import sys
from pathlib import Path

import every
import peft
import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_fed import load_client
from llm_fed.export import peft_folders
from llm_fed.models.prompt import FILE, read_prompt

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
# By dtype: the largest difference of a logit. Of bfloat16 a folded weight keeps eight bits, and logits are about 3.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}


@pytest.fixture
def run(finished, small, tmp_path) -> Path:
    """A finished run of which two clients are left, on a copy of its base with a chat template and a dtype of one's
    choice."""
    shutil.copytree(small.base, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(small.base)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "base")
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/adapters/bob")
    based(tmp_path / "run", name=str(tmp_path / "base"))
    return tmp_path / "run"


def based(run: Path, **settings: object) -> None:
    """The run as if its base had had these settings."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["base"] |= settings
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("dtype", every.quick(TOLERANCE, ["float32"]))
def test_it_answers_as_base_and_adapter_do(run, llm_fed, small, tmp_path, dtype):
    based(run, dtype=dtype)
    said = llm_fed("export", run, tmp_path / "out", "--merged")
    assert (said.code, said.out.split()) == (0, [str(tmp_path / "out" / client) for client in ("ada", "cyd")]), said
    outputs = {}
    for client in ("ada", "cyd"):
        base = AutoModelForCausalLM.from_pretrained(small.base, dtype=getattr(torch, dtype))
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / client, dtype="auto")
        assert whole.dtype == base.dtype and not hasattr(whole, "peft_config")
        adapted = peft.PeftModel.from_pretrained(base, run / "adapters" / client).eval()
        with torch.no_grad():
            outputs[client] = whole(**tiny.inputs("llama", 2)).logits
            expected = adapted(**tiny.inputs("llama", 2)).logits
            with adapted.disable_adapter():
                alone = adapted(**tiny.inputs("llama", 2)).logits
        torch.testing.assert_close(outputs[client], expected, rtol=0, atol=TOLERANCE[dtype])
        assert (expected - alone).abs().max() > 3 * TOLERANCE[dtype]
    assert not torch.equal(outputs["ada"], outputs["cyd"])


def test_what_lies_beside_the_weights(run, llm_fed, tmp_path):
    assert llm_fed("export", run, tmp_path / "out", "--merged", "--client", "cyd").code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["cyd"]
    folder = tmp_path / "out/cyd"
    assert "adapter_config.json" not in {path.name for path in folder.iterdir()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT and tokenizer.encode("w20 w21") == [20, 21]
    assert read_prompt(folder) == read_prompt(run / "adapters/cyd") is not None
    for path in folder.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path
    assert folder.stat().st_mode & 0o077 == 0  # for its owner alone, as adapters are


def test_the_card_says_the_same_but_how_to_load_it(run, llm_fed, small, tmp_path, monkeypatch, capfd):
    assert llm_fed("export", run, tmp_path / "out", "--merged", "--client", "cyd").code == 0
    card, adapters = (tmp_path / "out/cyd/README.md").read_text(), (run / "adapters/cyd/README.md").read_text()
    header, theirs = (yaml.safe_load(text.split("---\n")[1]) for text in (card, adapters))
    assert header == {**theirs, "library_name": "transformers", "tags": ["llm_fed", "federated-learning"]}
    assert "# Model of client cyd" in card and "with a LoRA adapter folded into the weights, of `base`" in card
    for part in ("## Scores of this client", "## Configuration of the run"):
        assert card.split(part)[1] == adapters.split(part)[1]
    code = card.split("```python\n")[1].split("```")[0]
    script = code.replace("path/to/this/folder", str(tmp_path / "out/cyd")).replace("a prompt", "w20 w21")
    (answer,) = load_client(run / "adapters/cyd", str(small.base)).generate(["w20 w21"])
    monkeypatch.setitem(sys.modules, "peft", None)  # whoever imports it fails
    capfd.readouterr()
    exec(script, {})
    assert capfd.readouterr().out == f"{answer}\n" and answer


def test_what_cannot_be_folded_is_refused_before_anything_is_written(run, llm_fed, tmp_path):
    words = ("export", run, tmp_path / "out", "--merged")
    based(run, quantization="nf4")
    llm_fed(*words).assert_refused("base.quantization is nf4", "leave out --merged")
    based(run, quantization=None)
    ada = run / "adapters/ada"
    (ada / peft_folders.GATE).write_bytes(b"")
    llm_fed(*words).assert_refused("ada holds several adapters that a gate weighs", "leave out --merged")
    (ada / peft_folders.GATE).unlink()
    prompt = (ada / FILE).read_bytes()
    (ada / FILE).unlink()
    llm_fed(*words).assert_refused("ada is not an adapter of a language model", "leave out --merged")
    (ada / FILE).write_bytes(prompt)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out/cyd").mkdir(parents=True)
    llm_fed(*words).assert_refused("out/cyd already exists", "another folder")
    assert not (tmp_path / "out/ada").exists()


def test_a_damaged_adapter_and_one_that_is_too_large(run, llm_fed, tmp_path):
    """Clients before it are done; nothing is left of the one that fails."""
    weights = run / "adapters/cyd/adapter_model.safetensors"
    tensors = load_file(weights)
    large = {name: tensor * 1e4 for name, tensor in tensors.items()}
    save_file(large, weights)
    based(run, dtype="float16")
    said = llm_fed("export", run, tmp_path / "out", "--merged")
    assert said.code == 2 and "cyd cannot be merged into torch.float16 weights" in said.err
    weights.write_bytes(weights.read_bytes()[:-9])
    said = llm_fed("export", run, tmp_path / "more", "--merged")
    assert said.code == 2 and "damaged or cut short" in said.err
    for out in ("out", "more"):
        assert [path.name for path in (tmp_path / out).iterdir()] == ["ada"]


def test_a_full_disk(run, llm_fed, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    said = llm_fed("export", run, tmp_path / "out", "--merged", "--client", "ada")
    assert said.code == 1 and "cannot write" in said.err and "No space left on device" in said.err
    assert list((tmp_path / "out").iterdir()) == []
