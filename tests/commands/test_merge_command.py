"""`llm-fed merge` on runs, on PEFT folders, and on what does not belong together."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.commands import merge
from llm_fed.experiment import run as experiment
from llm_fed.experiment.simulation import Simulation
from llm_fed.merge.mean import mix_factors
from llm_fed.method.merge import Merged, Merger, kind_of
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile
from llm_fed.state import State

METHODS = ("fedit", "local")


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory) -> Path:
    """A folder with a run of FedIT, one of local training, and one of POTARA that starts from both."""
    folder = tmp_path_factory.mktemp("runs")
    for name in (*METHODS, "potara"):
        kept = {"checkpoint": {"keep_rounds": [2]}, "eval": {"cross": False, "max_new_tokens": 2}}
        config = small.config(folder / "c.yaml", method={"name": name}, **kept)
        experiment.train(
            configfile.load(config), folder / name, mode=Simulation({each: folder / each for each in METHODS})
        )
    return folder


def parents(runs: Path) -> tuple[str, ...]:
    return "--fed", str(runs / "fedit"), "--local", str(runs / "local")


def folders(runs: Path, client: str = "ada") -> tuple[str, ...]:
    return tuple(word for name, run in zip(("--fed", "--local"), METHODS, strict=True)
                 for word in (name, str(runs / run / "adapters" / client)))  # fmt: skip


def data(small) -> tuple[str, ...]:
    return "--data", str(small.data / "ada" / "train.jsonl"), "--template", "plain"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_two_runs_give_what_the_method_gives(runs, llm_fed, tmp_path):
    """Same parents, same examples, hence bit for bit the same adapters as the run of POTARA."""
    said = llm_fed("merge", "potara", *parents(runs), "--out", tmp_path, "method.grid=true", "--json")
    assert said.code == 0, said.err
    clients = json.loads(said.out)["clients"]
    logged = {x["client"]: x for x in read_records(runs / "potara" / "metrics.jsonl") if x["kind"] == "merge"}
    assert list(clients) == ["ada", "bob", "cyd"]
    for client, found in clients.items():
        for key in ("lambda_fed", "a", "b", "c", "sweep"):
            assert found[key] == logged[client][key]
        own, theirs = tensors(tmp_path / client), tensors(runs / "potara" / "adapters" / client)
        assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
        assert 0 < found["distance"] < 1
        card = (tmp_path / client / "README.md").read_text()
        assert "Recipe of the merge" in card and f"lambda_fed: {found['lambda_fed']}" in card and "fed: fedit" in card
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    said = llm_fed("audit", tmp_path)
    assert said.code == 3 and "audit the runs that a folder was merged from" in said.out, said


@pytest.mark.parametrize("method", ["fisher", "mean", "grid"])
def test_the_other_methods(runs, llm_fed, tmp_path, method):
    words = ("method.weight=0.25",) if method == "mean" else ()
    said = llm_fed("merge", method, *parents(runs), "--out", tmp_path, *words, "--json")
    assert said.code == 0, said.err
    fed, local, found = (tensors(folder / "bob") for folder in (
        runs / "fedit" / "adapters", runs / "local" / "adapters", tmp_path))  # fmt: skip
    if method == "mean":
        for name, value in found.items():
            torch.testing.assert_close(value, 0.25 * fed[name] + 0.75 * local[name])
    between = all(
        bool(((value >= torch.minimum(fed[name], local[name]) - 1e-6)
              & (value <= torch.maximum(fed[name], local[name]) + 1e-6)).all())
        for name, value in found.items()
    )  # fmt: skip
    assert between


@Merger(paper="none", data_free=True)
def halves(client: Any, fed: State, local: State, *, skew: float = 0.0) -> Merged:
    """A merger that merge.py has never heard of, with a setting of its own."""
    return fed + skew * local, {}


def test_every_merger_is_offered(monkeypatch):
    monkeypatch.setitem(methods.MERGERS, "halves", kind_of(halves))
    assert "skew" in methods.fields_of(methods.merger("halves"))
    with pytest.raises(UserError, match="^merge='fedit' is unknown.*known: fisher, potara, .*, halves$"):
        methods.merger("fedit")


def test_only_what_looks_at_no_example_is_data_free():
    found = [name for name, kind in methods.MERGERS.items() if kind.merger.data_free]
    assert found == ["mean", "task-arithmetic", "ties", "dare", "slerp"]


def test_a_run_at_a_round(runs, llm_fed, tmp_path):
    """With all the weight on it, the adapter of round 2 comes out; it is not the exported one."""
    fed = f"{runs / 'fedit'}@2"
    said = llm_fed(
        "merge", "mean", "--fed", fed, "--local", runs / "local", "--out", tmp_path, "method.weight=1", "--json"
    )
    assert said.code == 0 and json.loads(said.out)["clients"]["ada"]["fed"] == fed
    state = Checkpoints(runs / "fedit" / "checkpoints").load(2).state["state"]
    found = tensors(tmp_path / "ada")
    assert all(torch.equal(found[f"base_model.model.{name}.weight"], state[name]) for name in state)
    llm_fed(
        "merge", "mean", "--fed", f"{runs / 'fedit'}@7", "--local", runs / "local", "--out", tmp_path
    ).assert_refused("no checkpoint of round 7", "keep_rounds")


def test_two_peft_folders_and_a_file(runs, small, llm_fed, tmp_path):
    """The examples come from the file; the result loads in stock PEFT and computes the mixture."""
    words = (*folders(runs), *data(small), "--out", tmp_path, "--json")
    said = llm_fed("merge", "potara", *words, "method.samples=4", "method.space=delta")
    assert said.code == 0, said.err
    (found,) = json.loads(said.out)["clients"].values()
    weight = found["lambda_fed"]
    assert 0 < weight < 1 and found["samples"] == 4
    own, fed, local = (tensors(folder) for folder in (
        tmp_path / "train", runs / "fedit" / "adapters" / "ada", runs / "local" / "adapters" / "ada"))  # fmt: skip
    for name in fed:
        if "lora_A" in name:
            b = name.replace("lora_A", "lora_B")
            expected = weight * fed[b] @ fed[name] + (1 - weight) * local[b] @ local[name]
            torch.testing.assert_close(own[b] @ own[name], expected, rtol=0, atol=1e-5)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small.base), tmp_path / "train")
    assert model.peft_config["default"].r == 4


def test_a_weight_by_hand_needs_no_examples(runs, llm_fed, tmp_path):
    said = llm_fed("merge", "mean", *folders(runs), "method.weight=0.25", "--out", tmp_path)
    assert said.code == 0, said.err
    own, fed, local = (tensors(folder) for folder in (
        tmp_path / "merged", runs / "fedit" / "adapters" / "ada", runs / "local" / "adapters" / "ada"))  # fmt: skip
    for name in fed:
        torch.testing.assert_close(own[name], 0.25 * fed[name] + 0.75 * local[name], rtol=0, atol=1e-6)
    llm_fed("merge", "grid", *folders(runs), "--out", tmp_path).assert_refused("--data FILE")


def test_two_peft_folders_and_a_task(runs, small, llm_fed, tmp_path):
    words = ("merge", "potara", *folders(runs), "--task", "files", "--data", small.data, "--template", "plain")
    llm_fed(*words, "--out", tmp_path).assert_refused("--client", "ada, bob, cyd")
    llm_fed(*words, "--out", tmp_path, "--client", "adda").assert_refused("--client='adda'", "closest is 'ada'")
    assert llm_fed(*words, "--out", tmp_path, "--client", "ada", "--json").code == 0
    assert (tmp_path / "ada" / "adapter_config.json").is_file()


def copy(runs: Path, tmp_path: Path, **settings: Any) -> Path:
    """A local adapter with another configuration."""
    target = tmp_path / "other"
    shutil.copytree(runs / "local" / "adapters" / "ada", target)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    return target


def test_adapters_that_do_not_belong_together(runs, small, llm_fed, tmp_path):
    fed = ("merge", "potara", "--fed", runs / "fedit" / "adapters" / "ada", *data(small), "--out", tmp_path / "out")

    def refused(*parts: str, **settings: Any) -> None:
        local = copy(runs, tmp_path, **settings)
        save_file(tensors(local), local / "adapter_model.safetensors")  # a stranger's, without a checksum
        llm_fed(*fed, "--local", local).assert_refused(*parts)
        shutil.rmtree(local)

    refused("adapter of", "one of 'gpt2'", "--base", base_model_name_or_path="gpt2")
    refused("different scaling (4.0 and 2.0)", lora_alpha=4)
    refused("does not fit the base", target_modules=["q_proj", "k_proj"])
    local = copy(runs, tmp_path, target_modules=["q_proj"])
    kept = {name: value for name, value in tensors(local).items() if "q_proj" in name}
    save_file(kept, local / "adapter_model.safetensors")
    llm_fed(*fed, "--local", local).assert_refused("different layers", "of --fed alone", "llm-fed merge FOLDER")
    assert not (tmp_path / "out").exists()


def test_another_initialisation_is_warned_of(runs, small, llm_fed, tmp_path):
    """Independent A's are sqrt(2) of their length apart; those of one seed are close, and nothing is said."""
    local = copy(runs, tmp_path)
    drawn = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * value.std()
        if "lora_A" in name
        else value
        for name, value in tensors(local).items()
    }
    save_file(drawn, local / "adapter_model.safetensors")
    words = ("merge", "mean", "--fed", runs / "fedit" / "adapters" / "ada", *data(small), "--out", tmp_path / "out")
    said = llm_fed(*words, "--local", local, "--json")
    (found,) = json.loads(said.out)["clients"].values()
    assert found["distance"] == pytest.approx(1.41, abs=0.25) and f"{found['distance']:.2f} apart" in said.err
    assert "the same seed" in said.err
    assert "apart" not in llm_fed(*words, "--local", runs / "local" / "adapters" / "ada", "--json").err


def test_distance_by_hand():
    """A = (3, 4) and (3, 0): |(0, 4)| relative to the root mean square of the lengths 5 and 3, sqrt(17)."""
    one = State.of({"x.lora_A": torch.tensor([[3.0, 4.0]]), "x.lora_B": torch.tensor([[9.0]])})
    other = State.of({"x.lora_A": torch.tensor([[3.0, 0.0]]), "x.lora_B": torch.tensor([[0.0]])})
    assert merge.distance(one, other) == pytest.approx(4 / 17**0.5)
    assert merge.distance(one, mix_factors(one, other, 1.0)) == 0.0


def test_mistakes(runs, small, llm_fed, tmp_path):
    out = ("--out", tmp_path / "out")
    llm_fed("merge", "potarra", *parents(runs), *out).assert_refused("potarra", "closest is 'potara'")
    llm_fed("merge", "mean", *parents(runs), *out, "method.damping=1").assert_refused(
        "method.damping is a setting of", "weight, space"
    )
    llm_fed("merge", "potara", *parents(runs), *out, "method.samples=0").assert_refused("method.samples is 0")
    llm_fed("merge", "potara", *parents(runs), *out, *data(small)).assert_refused("a run brings its own")
    llm_fed("merge", "potara", *folders(runs), *out).assert_refused("--data FILE")
    nowhere = ("--fed", tmp_path / "none", "--local", runs / "local")
    llm_fed("merge", "potara", *nowhere, *out).assert_refused("--fed", "neither a run folder nor a PEFT folder")
    at_round = ("--fed", runs / "fedit", "--local", f"{runs / 'local' / 'adapters' / 'ada'}@3")
    llm_fed("merge", "potara", *at_round, *out).assert_refused("a PEFT folder has no rounds")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "spelling",
    [r".*\.self_attn\.(q_proj|v_proj)", ["model.layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "v_proj"]],
)
def test_layers_are_compared_and_not_how_they_are_named(runs, small, llm_fed, tmp_path, spelling):
    """An adapter on the same layers, which names them by a regular expression or one by one, and a run."""
    local = copy(runs, tmp_path, target_modules=spelling)
    words = ("--fed", runs / "fedit" / "adapters" / "ada", "--local", local, *data(small))
    assert llm_fed("merge", "mean", *words, "--out", tmp_path / "out", "method.weight=0.5").code == 0
    other = ("--fed", runs / "fedit/adapters/ada", "--local", runs / "local/adapters/ada", *data(small))
    assert llm_fed("merge", "mean", *other, "--out", tmp_path / "same", "method.weight=0.5").code == 0
    found, expected = (tensors(next((tmp_path / name).glob("*/"))) for name in ("out", "same"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    said = llm_fed(
        "merge", "mean", "--fed", runs / "fedit", "--local", local, "--out", tmp_path / "run", "--client", "ada"
    )
    assert said.code == 0, said.err
