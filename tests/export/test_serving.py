"""Which exported folders vLLM and LoRAX can serve, and why not the others; docs/serving.md says the same."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import tiny_base
from safetensors.torch import load_file, save_file

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.export import peft_folders
from llm_fed.export.serving import VLLM_RANKS, Servable, lines, servable
from llm_fed.models.lora import Lora
from llm_fed.models.origin import Origin

DOCS = Path(__file__).parents[2] / "docs/serving.md"
PLAIN = Lora(8, 16.0, 0.0, ("q_proj", "v_proj"))


def written(folder: Path, structure: Lora, kind: str = "llama") -> Servable:
    base = tiny_base.around(tiny.build(kind))
    peft_folders.write(folder, base.draw(structure, generator(0)), structure, base, "")
    return servable(folder)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), "all-linear", r".*\.(k_proj|down_proj)"])
def test_one_adapter_on_all_layers_is_for_both(tmp_path, targets):
    assert written(tmp_path / "a", Lora(8, 16.0, 0.1, targets)) == Servable("tiny", 8, {}, Origin("tiny"))


def test_layers_of_gpt2_have_numbers_too(tmp_path):
    assert not written(tmp_path / "a", Lora(8, 16.0, 0.0, "all-linear"), "gpt2").refused
    assert "c_attn" in written(tmp_path / "b", Lora(8, 16.0, 0.0, r".*\.1\.attn\.c_attn"), "gpt2").refused["LoRAX"]


def test_some_layers_only_are_not_for_lorax(tmp_path):
    """It takes the weights of a module from all layers or from none."""
    found = written(tmp_path / "a", Lora(8, 16.0, 0.0, r".*(\.1\..*q_proj|v_proj)"))
    assert found.refused.keys() == {"LoRAX"} and found.refused["LoRAX"].startswith("q_proj is adapted in some layers")


@pytest.mark.parametrize(("rank", "option"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_the_rank_that_vllm_is_to_be_given(tmp_path, rank, option):
    found = written(tmp_path / "a", Lora(rank, 16.0, 0.0, ("q_proj",)))
    (said, _) = lines({"ada": found})
    assert f" on tiny with --enable-lora --max-lora-rank {option} --generation-config vllm; " in said
    assert rank <= option and option in VLLM_RANKS


def test_a_rank_above_all_that_vllm_knows(tmp_path):
    found = written(tmp_path / "a", Lora(513, 16.0, 0.0, ("q_proj",)))
    assert found.refused == {"vLLM": "its rank is 513, but vLLM's --max-lora-rank is at most 512"}


def test_experts_are_for_nobody(tmp_path):
    found = written(tmp_path / "a", PLAIN.with_experts("global", "local", gate="router"))
    assert found.refused.keys() == {"vLLM", "LoRAX"} and "2 adapters and a gate" in found.refused["vLLM"]
    assert servable(tmp_path / "a/global") == Servable("tiny", 8, {}, Origin("tiny"))  # one adapter alone


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, 'its modules_to_save is ["lm_head"], where only null can be served'),
        ({"use_dora": True}, "its use_dora is true, where only false can be served"),
        ({"bias": "lora_only"}, 'its bias is "lora_only", where only "none" can be served'),
    ],
)
def test_what_other_trainers_may_save(tmp_path, settings: dict[str, Any], reason):
    model = tiny.build("llama")
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], **settings)).save_pretrained(tmp_path)
    assert servable(tmp_path).refused == {"vLLM": reason, "LoRAX": reason}


def test_a_whole_image_model_is_for_nobody(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "whole image model" in servable(tmp_path).refused["vLLM"]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_damage_is_named(tmp_path, name):
    written(tmp_path / "a", PLAIN)
    (tmp_path / "a" / name).write_bytes((tmp_path / "a" / name).read_bytes()[:40])
    with pytest.raises(UserError, match=r"the adapter .*/a is damaged .*; export it again"):
        servable(tmp_path / "a")


def test_clients_are_named_with_their_reasons():
    good, large = Servable("b/base", 8, {}), Servable("b/base", 600, {"vLLM": "too large"})
    assert lines({"ada": good, "bob": large, "cyd": good}) == [
        "vLLM can serve ada, cyd on b/base with --enable-lora --max-lora-rank 8 --generation-config vllm; "
        "see docs/serving.md",
        "vLLM cannot serve bob: too large",
        "LoRAX can serve all 3 adapters",
    ]
    unlike = lines({"ada": good, "bob": Servable("b/base", 9, {})})
    assert unlike[0].startswith("vLLM can serve all 2 adapters on b/base with --enable-lora --max-lora-rank 16 --gen")
    assert lines({"ada": good})[1] == "LoRAX can serve ada"
    assert lines({"ada": large, "bob": large})[0] == "vLLM can serve none of the 2 adapters: too large"
    for count, who in ((8, "0, 1, 2, 3, 4 and 3 more"), (6, "0, 1, 2, 3, 4 and 1 more"), (5, "0, 1, 2, 3, 4")):
        many = lines({str(number): large for number in range(count)} | {"ada": good})
        assert many[0] == f"vLLM cannot serve {who}: too large"


@pytest.mark.parametrize(
    ("origin", "vllm", "lorax"),
    [
        (Origin("b/base", "v1", dtype="float16"), " --revision v1 --dtype float16", " --revision v1 --dtype float16"),
        (Origin("b/base", quantization="nf4"), " --quantization bitsandbytes", " --quantize bitsandbytes-nf4"),
        (Origin("b/base", dtype="float32", quantization="int8"), " --dtype float32", " --quantize bitsandbytes"),
        (None, "", ""),
    ],
)
def test_the_base_is_to_be_loaded_as_in_training(origin, vllm, lorax):
    found = Servable("b/base", 8, {}, origin)
    assert (found.options("vLLM"), found.options("LoRAX")) == (vllm, lorax)
    said = lines({"ada": found})
    assert f"--generation-config vllm{vllm}; " in said[0]
    assert said[1] == "LoRAX can serve ada" + (f" on b/base with{lorax}" if lorax else "")


def test_export_says_it_beside_its_results(llm_fed, finished, tmp_path):
    said = llm_fed("export", finished, tmp_path / "out")
    assert said.out.split() == [str(tmp_path / "out" / client) for client in ("ada", "bob", "cyd")]
    assert said.err.splitlines() == [
        "vLLM can serve all 3 adapters on base with --enable-lora --max-lora-rank 8 --generation-config vllm "
        "--dtype float32; see docs/serving.md",
        "LoRAX can serve all 3 adapters",
    ]


def test_export_names_a_damaged_adapter(llm_fed, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run/adapters/bob/adapter_model.safetensors"
    save_file(load_file(path), path)  # a stranger's file has no checksum, and is as good
    assert llm_fed("export", tmp_path / "run", tmp_path / "out").code == 0
    path.write_bytes(path.read_bytes()[:9])
    said = llm_fed("export", tmp_path / "run", tmp_path / "out")
    assert said.code == 2 and f"the adapter {tmp_path / 'out/bob'} is damaged" in said.err


def test_the_page_names_the_methods_with_several_adapters():
    several = set()
    for name, kind in methods.BUILTIN.items():
        try:
            if not kind().wrap(PLAIN, None).plain:
                several.add(name)
        except UserError:
            continue  # it trains whole models alone
    assert several == {"feddpa", "pfedmoe", "fedem", "fedalt"}
    table = DOCS.read_text().split("| method |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == several
