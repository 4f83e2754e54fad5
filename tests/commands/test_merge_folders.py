"""`llm-fed merge A B C --method M` on PEFT folders of any rank, alpha and scaling, as stock PEFT wrote them."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from peft.utils.merge_utils import ties as peft_ties
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from llm_fed.mergers.karcher import coefficients

KINDS = {
    "plain": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {"r": 2, "lora_alpha": 4, "rank_pattern": {"layers.0.self_attn.q_proj": 3},
                 "alpha_pattern": {"v_proj": 16}, "target_modules": ["q_proj", "v_proj"]},
    "other": {"r": 1, "lora_alpha": 3, "target_modules": r".*\.k_proj"},
    "dora": {"r": 2, "use_dora": True, "target_modules": ["q_proj"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(small, tmp_path_factory) -> dict[str, Path]:
    """An adapter of each kind, with numbers in its B's, as PEFT saves it."""
    out = {}
    for seed, (name, settings) in enumerate(KINDS.items()):
        torch.manual_seed(seed)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(small.base), peft.LoraConfig(**settings))
        for entry, parameter in model.named_parameters():
            if "lora_B" in entry:
                torch.nn.init.normal_(parameter)
        out[name] = tmp_path_factory.mktemp("adapters") / name
        model.save_pretrained(out[name])
    return out


def added(small, folder: Path) -> dict[str, Tensor]:
    """By layer what PEFT adds to its weights."""
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small.base), folder)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    return {name: layer.get_delta_weight("default").detach() for name, layer in layers.items()}


NAMES = ("plain", "rslora", "patterns", "other")
SHARES = {"plain": 0.5, "rslora": -0.25, "patterns": 1.0, "other": 2.0}


def test_a_sum_is_exact_for_any_ranks_scalings_and_layers(small, folders, llm_fed, tmp_path):
    words = [folders[name] for name in NAMES]
    weights = ",".join(str(SHARES[name]) for name in NAMES)
    said = llm_fed("merge", *words, "--out", tmp_path / "out", f"--weights={weights}", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["weights"] == {str(folders[name]): SHARES[name] for name in NAMES}
    parts, found = {name: added(small, folders[name]) for name in NAMES}, added(small, tmp_path / "out")
    assert found.keys() == {layer for part in parts.values() for layer in part}
    for layer, value in found.items():
        wanted = sum(SHARES[name] * part[layer] for name, part in parts.items() if layer in part)
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 9 and not config["rank_pattern"]  # of layer 0: 2 + 4 + 3
    assert "weights:" in (tmp_path / "out/README.md").read_text()
    # What comes out goes in, here and as an adapter that is scored.
    assert llm_fed("merge", tmp_path / "out", words[0], "--out", tmp_path / "again", "--method", "svd").code == 0


def dense(small, paths: list[Path]) -> dict[str, Tensor]:
    parts = [added(small, path) for path in paths]
    return {layer: torch.stack([part[layer].double() for part in parts]) for layer in parts[0]}


@pytest.mark.parametrize("method", ["svd", "ties", "slerp", "karcher", "dare"])
def test_what_the_others_compute(small, folders, llm_fed, tmp_path, method):
    """Against the dense products; slerp and karcher of two are one direction, and half of nothing dropped the mean."""
    paths = [folders["plain"], folders["rslora"]]
    extra = {"svd": ("--rank", 3), "ties": ("--density", 0.5, "--rank", 24), "dare": ("--drop", 0)}.get(method, ())
    assert llm_fed("merge", *paths, "--out", tmp_path / "out", "--method", method, *extra).code == 0
    found = added(small, tmp_path / "out")
    for layer, both in dense(small, paths).items():
        if method == "svd":
            u, s, v = torch.linalg.svd(both.mean(0), full_matrices=False)
            wanted = (u[:, :3] * s[:3]) @ v[:3]
        elif method == "ties":
            wanted = peft_ties(list(both), torch.ones(2), 0.5)
        elif method == "dare":
            wanted = both.mean(0)
        else:
            wanted = sum(both / both.flatten(1).norm(dim=1)[:, None, None])
            cosine = torch.nn.functional.cosine_similarity(
                found[layer].double().flatten(), (both.sum(0) if method == "slerp" else wanted).flatten(), dim=0
            )
            length = both.flatten(1).norm(dim=1).mean()
            assert cosine == pytest.approx(1) and (method == "slerp" or found[layer].norm() == pytest.approx(length))
            continue
        torch.testing.assert_close(found[layer].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["slerp", "karcher", "linear"])
def test_all_weight_on_the_first_gives_the_first(small, folders, llm_fed, tmp_path, method):
    paths, shares = [folders["plain"], folders["rslora"]], ("--method", method, "--weights", "1,0")
    assert llm_fed("merge", *paths, "--out", tmp_path / "out", *shares).code == 0
    first, found = added(small, paths[0]), added(small, tmp_path / "out")
    for layer, value in first.items():
        torch.testing.assert_close(found[layer], value, rtol=1e-4, atol=1e-4)


def test_the_mean_of_directions_by_hand():
    """Of three axes the diagonal; of weights the nearer; a zero has no direction, and of opposites there is none."""
    assert coefficients(torch.eye(3).double(), [1, 1, 1]) == pytest.approx([3**-0.5] * 3)
    near, far = coefficients(torch.eye(2).double(), [2, 1])
    assert torch.tensor(near).acos() == pytest.approx(torch.pi / 6) and near**2 + far**2 == pytest.approx(1)
    half_as_long = coefficients(torch.tensor([[4.0, 0], [0, 0]]).double(), [1, 1])
    assert half_as_long == pytest.approx([0.5, 0])
    assert coefficients(torch.tensor([[1.0, -1], [-1, 1]]).double(), [1, 1]) == [0, 0]


def test_each_parent_and_the_merge_are_scored(small, folders, llm_fed, tmp_path):
    paths, data = [folders["plain"], folders["rslora"]], small.data / "ada/test.jsonl"
    words = ("--out", tmp_path / "out", "--data", data, "--template", "plain", "--base", small.base)
    said = llm_fed("merge", *paths, *words, "--json")
    assert said.code == 0, said.err
    assert [*json.loads(said.out)["scores"]] == [str(path) for path in (*paths, tmp_path / "out")]


def broken(folder: Path, target: Path, **settings: object) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | settings))
    return target


def test_what_has_no_merge_is_refused(small, folders, llm_fed, tmp_path):
    plain, other, out = folders["plain"], folders["rslora"], ("--out", tmp_path / "out")
    strange = broken(plain, tmp_path / "strange")
    tensors = load_file(strange / "adapter_model.safetensors")
    save_file({**tensors, "base_model.model.lm_head.weight": torch.ones(2)}, strange / "adapter_model.safetensors")
    gate = broken(plain, tmp_path / "gate")
    (gate / "gate.safetensors").write_bytes(b"")
    moved = broken(plain, tmp_path / "moved", base_model_name_or_path="gpt2")
    cases = [
        ((plain,), "at least two"),
        ((plain, folders["dora"]), "DoRA", "merge_and_unload"),
        ((plain, gate), "a gate weighs"),
        ((plain, strange), "lm_head.weight, which is neither"),
        ((plain, moved), "one of 'gpt2'", "--base"),
        ((plain, broken(plain, tmp_path / "ranks", r=3)), "fit each other"),
        ((plain, broken(plain, tmp_path / "none", r=0)), "not the configuration of a LoRA adapter: r=0: "),
        ((plain, tmp_path), "not an adapter folder"),
        ((plain, other, "--weights", "1"), "1 numbers for 2"),
        ((plain, other, "--weights", "1,x"), "numbers with commas"),
        ((plain, other, "--method", "slerp", "--weights", "1,-1"), "shares of a way"),
        ((plain, other, moved, "--method", "slerp", "--base", "b"), "karcher takes any number"),
        ((plain, other, "--method", "potara"), "--method='potara' is unknown"),
        ((plain, other, "--drop", "0.1"), "--drop is not an option of linear"),
        ((plain, other, "--fed", plain), "give both"),
    ]  # fmt: skip
    for words, *parts in cases:
        llm_fed("merge", *words, *out).assert_refused(*parts)
    llm_fed("merge", plain, other, "--out", plain).assert_refused("is one of the adapters")
    assert not (tmp_path / "out").exists()
