"""`llm-fed export --merged`: whole models that plain transformers loads, and that answer as base and adapter do; and
which exports others read: vLLM, LoRAX, transformers 4.57 and PEFT 0.18."""

import contextlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import every
import every_family
import peft
import pytest
import tiny
import tiny_base
import torch
import yaml
from reader import read_by
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llm_fed import load_client
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdapterBank
from llm_fed.export import merged, model_files, models, older, peft_folders
from llm_fed.export.card import model_card
from llm_fed.export.models import write
from llm_fed.export.serving import line
from llm_fed.export.tensors import read_json
from llm_fed.kinds.language import load_base
from llm_fed.kinds.wording import Model
from llm_fed.models.lora import Lora, targets
from llm_fed.models.prompt import FILE, Prompt, read_prompt
from llm_fed.settings.config import BaseConfig
from llm_fed.state import State
from llm_fed.tasks.common import Template
from llm_fed.testing.tiny import SPECIAL, VOCABULARY, tokenizer

IDS = torch.randint(2, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))
# What families that cannot be a base, or whose weights cannot hold a merged adapter, are told. Dory's head scales each
# logit, so no weight of it is base and adapter; what Moshi's `generate` answers is not what its logits say, with
# transformers 5.24; a Qwen 3.5 mixture's own tokenizer has none of the words of the tests.
REFUSED = re.compile(
    "cannot be a base: |cannot be loaded as a causal LM|cannot be saved; leave out --merged|"
    "a prompt has no tokens|only linear layers can be adapted|(dory-tied|moshi[a-z0-9-]*)/out/ada is not written"
)
NEAR = 2e-4  # the largest distance of logits, relative to their length
ROUNDED = {"apertus": 0.02}  # version 4 computes its activation in bfloat16, so that greedy answers differ, too


@dataclass
class Outcome:
    """What became of one model: `flaw` is empty if it is the one that was scored, wherever it was read."""

    name: str
    folder: Path
    flaw: str = ""
    needs: str = ""  # the version of transformers that the export names
    refused: str = ""  # why its family cannot be a base


def variants(family: str) -> dict[str, dict[str, Any]]:
    """By name changes of a family's configuration: its head tied to its embedding, and forms of rotary embeddings, of
    families for which an export translates them."""
    found = {family: {}, f"{family}-tied": {"tie_word_embeddings": True}}
    forms = every_family.variants(family) if family in older.FAMILIES else {}
    return found | {
        f"{family}-{name}": changes
        for name, changes in forms.items()
        if "rope_parameters" in changes and name != "dynamic"  # whose frequencies depend on the text
    }


def export(name: str, family: str, changes: dict[str, Any], work: Path) -> Outcome:
    """Fold a random adapter into a model and export it, which compares it; and note what it computes.

    Raises:
        Exception: of any kind, where no such model can be made.
    """
    model = every_family.noisy(family, **changes)
    with torch.no_grad():
        model(input_ids=IDS)
    place = work / name
    model.save_pretrained(place / "base")
    tokenizer(**SPECIAL).save_pretrained(place / "base")
    config, outcome = BaseConfig(name=str(place / "base"), dtype="float32"), Outcome(name, place / "out/ada")
    try:
        base = load_base(config, "cpu")
        structure = Lora(3, 6.0, 0.0, adapted(base.model, head="tied" in name))
        state = base.draw(structure, generator(1, name))
        state = State(state.layout, 0.3 * torch.randn(state.row.shape, generator=generator(2, name)))
        prompt = Prompt(Template("plain", "{prompt}"), (1,), 8)
        card = model_card(Model("base", prompt=prompt), client="ada", method="local", paper="", metrics={},
                          config="task: {name: files, path: null}")  # fmt: skip
        write(place / "ada", state, structure, base, card, prompt)
        list(merged.ExportPlan(config, {"ada": place / "ada"}, place / "out").write())
        outcome.needs = older.advice(model_files.settings_read(config)).partition("to load it takes ")[2]
    except (UserError, RunError) as error:
        if REFUSED.search(str(error)):
            outcome.refused = str(error)
        else:
            outcome.flaw = str(error)
        return outcome
    whole = AutoModelForCausalLM.from_pretrained(outcome.folder).eval()
    start = IDS[:1, :9]
    with torch.no_grad():
        output = whole.generate(input_ids=start, attention_mask=torch.ones_like(start), max_new_tokens=8)
        logits = whole(input_ids=IDS).logits.float().contiguous()
    found = {"ids": IDS, "logits": logits, "prompt": start[0].clone(), "answer": output[0, 9:].clone()}
    save_file(found, place / "expected.safetensors")
    return outcome


def adapted(model: PreTrainedModel, head: bool) -> tuple[str, ...]:
    """The last names of up to four kinds of linear layers that can have adapters, and of the head if it is wanted."""
    output = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not output
        and "vision" not in name
        and "Grouped" not in type(module).__name__  # they multiply in blocks, which no adapter does
    ]
    found = [each for each in dict.fromkeys(name.rpartition(".")[2] for name in names) if can_be_adapted(model, each)]
    found = found[:4]
    if head or not found:
        found.append(next(name for name, module in model.named_modules() if module is output))
    return tuple(found)


def can_be_adapted(model: PreTrainedModel, name: str) -> bool:
    """Whether layers of this last name may have adapters; those of a mixture of experts, for example, may not."""
    try:
        return bool(targets(model, Lora(3, 6.0, 0.0, (name,))))
    except UserError:
        return False


def read_elsewhere(outcomes: list[Outcome], libraries: Path, work: Path) -> None:
    """Let older libraries read the models, and note where they read others."""
    items = [{"folder": str(each.folder), "expected": str(each.folder.parents[1] / "expected.safetensors"),
              "text": "w5 w6 w7"} for each in outcomes]  # fmt: skip
    for each, said in zip(outcomes, read_by(libraries, items, work), strict=True):
        near = ROUNDED.get(each.name.partition("-")[0], NEAR)
        alike = said.get("tokens") == [5, 6, 7] and said["apart"] < near and (said["answer"] or near > NEAR)
        if not alike:
            each.flaw = f"transformers 4.57: {said}"


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


# Which folders vLLM and LoRAX can serve, and why not the others; docs/serving.md says the same


PLAIN = Lora(8, 16.0, 0.0, ("q_proj", "v_proj"))


def written(folder: Path, structure: Lora) -> Path:
    base = tiny_base.around(tiny.build("llama"))
    models.write(folder, base.draw(structure, generator(0)), structure, base, "")
    return folder


@pytest.mark.parametrize(("rank", "option"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_the_rank_that_vllm_is_to_be_given(tmp_path, rank, option):
    said = line([written(tmp_path / "ada", Lora(rank, 16.0, 0.0, ("q_proj",)))])
    assert said == f"vLLM and LoRAX can serve ada (vLLM with --max-lora-rank {option}); see docs/serving.md"


@pytest.mark.parametrize(
    ("structure", "why"),
    [
        (Lora(513, 16.0, 0.0, ("q_proj",)), "rank 513 is above vLLM's 512"),
        (PLAIN.with_experts("global", "local", gate="router"), "several adapters and a gate"),
    ],
)
def test_what_no_server_takes(tmp_path, structure, why):
    assert line([written(tmp_path / "ada", structure)]).startswith(f"vLLM and LoRAX not ada: {why}")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save is ["lm_head"]'),
        ({"use_dora": True}, "use_dora is true"),
        ({"bias": "lora_only"}, 'bias is "lora_only"'),
    ],
)
def test_what_other_trainers_may_save(tmp_path, settings: dict[str, Any], reason):
    model, folder = tiny.build("llama"), tmp_path / "a"
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], **settings)).save_pretrained(folder)
    assert f"not a: {reason};" in line([folder])


def test_clients_are_named_with_their_reasons(tmp_path):
    for name in "abcdefg":
        written(tmp_path / name, PLAIN)
    (tmp_path / "pictures").mkdir()
    folders = [tmp_path / name for name in (*"abcdefg", "pictures")]
    assert line(folders) == (
        "vLLM and LoRAX can serve a, b, c, d, e and 2 more (vLLM with --max-lora-rank 8); not pictures: a whole image "
        "model; see docs/serving.md"
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_damage_is_named(tmp_path, name):
    written(tmp_path / "a", PLAIN)
    (tmp_path / "a" / name).write_bytes((tmp_path / "a" / name).read_bytes()[:40])
    with pytest.raises(UserError, match=r"/a(/adapter_config.json)? is (absent or )?damaged .*; export it again"):
        line([tmp_path / "a"])


def test_export_names_a_damaged_adapter(llm_fed, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run/adapters/bob/adapter_model.safetensors"
    save_file(load_file(path), path)  # a stranger's file has no checksum, and is as good
    assert llm_fed("export", tmp_path / "run", tmp_path / "out").code == 0
    path.write_bytes(path.read_bytes()[:9])
    said = llm_fed("export", tmp_path / "run", tmp_path / "out")
    assert said.code == 2 and f"the adapter {tmp_path / 'out/bob'} is damaged" in said.err


# What other versions read


@pytest.mark.parametrize(
    "name", every.quick(["gemma3_text", "phi3-longrope", "gpt_neox-tied", "mixtral"], ["gpt_neox-tied", "mixtral"])
)
def test_families_that_are_merged(name, tmp_path):
    family = name.partition("-")[0]
    outcome = export(name, family, variants(family)[name], tmp_path)
    assert (outcome.flaw, outcome.needs) == ("", "")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_5_text", {}),
        ("laguna", {}),  # which reads no older keys of rotary embeddings
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ],
)
def test_what_version_4_does_not_read(family, changes, tmp_path):
    outcome = export("new", family, changes, tmp_path)
    assert not outcome.flaw and outcome.needs.startswith("5.")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("bigbird_pegasus", {"tie_word_embeddings": False}),  # its class ties none, whatever its configuration says
        ("got_ocr2", {"tie_word_embeddings": True}),  # its part for texts says another thing
        ("zamba2", {"layers_block_type": ["mamba", "hybrid", "mamba"]}),
    ],
)
def test_what_both_versions_read(family, expected, tmp_path):
    settings = read_json(export("new", family, {}, tmp_path).folder / "config.json")
    assert expected.items() <= settings.items() and expected.items() <= settings.get("text_config", expected).items()


@pytest.fixture
def libraries() -> Path:
    """A folder with older libraries, see reader.py."""
    if not (folder := os.environ.get("LLM_FED_OLDER")):
        pytest.skip("LLM_FED_OLDER names no folder with transformers 4.57 and PEFT 0.18, see reader.py")
    return Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_merged_models_that_older_libraries_read(libraries, tmp_path, part):
    made: list[Outcome] = []
    for family in every_family.FAMILIES[part::4]:
        with contextlib.suppress(Exception):  # it cannot be made so small
            for name, changes in variants(family).items():
                made.append(export(name, family, changes, tmp_path))
    readable = [each for each in made if not (each.flaw or each.needs or each.refused)]
    read_elsewhere(readable, libraries, tmp_path)
    assert len(readable) > 20 and not [each for each in made if each.flaw]


@pytest.mark.slow
def test_adapters_that_older_libraries_read(libraries, tmp_path):
    items = []
    for family in ("llama", "qwen3", "gpt2", "gemma2", "phi3", "gpt_neox", "mixtral", "opt", "qwen2"):
        place, base = tmp_path / family, tiny_base.around(every_family.noisy(family))
        structure = Lora(3, 6.0, 0.0, adapted(base.model, head=False))
        drawn = base.draw(structure, generator(1, family))
        state = drawn.like(0.3 * torch.randn(drawn.row.shape, generator=generator(2, family)))
        models.write(place / "ours", state, structure, base, "")
        base.model.save_pretrained(place / "base")
        bank = AdapterBank(base.model, structure, 1)
        bank.load(0, state)
        with torch.no_grad(), bank.attached(torch.tensor([0, 0])):
            logits = base.model(input_ids=IDS).logits.contiguous()
        save_file({"ids": IDS, "logits": logits}, place / "expected.safetensors")
        items.append({"folder": str(place / "base"), "adapter": str(place / "ours"),
                      "expected": str(place / "expected.safetensors")})  # fmt: skip
    said = read_by(libraries, items, tmp_path)
    assert all(one.get("apart", 1.0) < NEAR for one in said), said
