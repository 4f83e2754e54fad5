"""Which exported folders vLLM and LoRAX can serve, and why not the others; docs/serving.md says the same."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import tiny_base
from safetensors.torch import load_file, save_file

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.export import peft_folders
from llm_fed.export.serving import line
from llm_fed.models.lora import Lora

PLAIN = Lora(8, 16.0, 0.0, ("q_proj", "v_proj"))


def written(folder: Path, structure: Lora) -> Path:
    base = tiny_base.around(tiny.build("llama"))
    peft_folders.write(folder, base.draw(structure, generator(0)), structure, base, "")
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
