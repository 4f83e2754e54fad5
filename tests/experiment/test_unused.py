"""Settings that would change nothing are refused, and every other setting changes something."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import battery
import every
import pytest
import tiny_images
from rich.console import Console

from llm_fed.basics.errors import UserError
from llm_fed.experiment import announce, run, unused
from llm_fed.methods import MERGERS
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.settings.config import ColumnsConfig
from llm_fed.settings.configfile import as_dict, flat

IMAGES = {"task": {"name": "cifar10", "partition": {"kind": "iid", "clients": 2}}, "adapter": None}
TEXT = {"task": {"name": "files"}}
# what is refused, and what makes it count
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (TEXT, "task.partition.alpha=0.1", {"task.partition.kind": "dirichlet", "task.partition.clients": 3}),
    (TEXT, "task.partition.clients=3", {"task.partition.kind": "iid"}),
    (TEXT, "task.partition.label=kind", {"task.partition.kind": "dirichlet", "task.partition.clients": 3}),
    (TEXT, "task.partition.label=kind", {"task.partition.test": 0.2}),
    (IMAGES, "task.template=alpaca", {"task.name": "files"}),
    (IMAGES, "task.loss_on=all", {"task.name": "files"}),
    (IMAGES, "task.max_length=99", {"task.name": "files"}),
    (IMAGES, "task.too_long=cut-end", {"task.name": "files"}),
    (IMAGES, "task.bad_rows=skip", {"task.name": "files"}),
    *(
        (IMAGES, f"task.columns.{each.name}={'[x]' if each.name == 'extra' else 'x'}", {"task.name": "files"})
        for each in dataclasses.fields(ColumnsConfig)
    ),
    ({"task": {"name": "flan"}}, "task.columns.client=x", {"task.name": "files"}),
    (IMAGES, "eval.max_new_tokens=9", {"task.name": "files"}),
    ({**TEXT, "eval": {"select": "last"}}, "eval.of_last=2", {"eval.select": "best"}),
    (TEXT, "stop.min_delta=1.0", {"stop.patience": 3}),
    (TEXT, "privacy.delta=1e-6", {"privacy.clip": 1.0}),
    (TEXT, "privacy.where=client", {"privacy.clip": 1.0}),
    (TEXT, "server.liars=0.3", {"server.aggregation": "median"}),
    (TEXT, "privacy.bound=3.0", {"privacy.secure": True}),
]


def config(tree: Mapping[str, Any], words: dict[str, Any]) -> Any:
    return configfile.load({"base": {"name": "x"}, **tree}, [f"{key}={value}" for key, value in words.items()])


@pytest.mark.parametrize(("tree", "word", "beside"), CASES)
def test_a_setting_counts_only_beside_others(tree, word, beside):
    key, _, value = word.partition("=")
    with pytest.raises(UserError, match=f"^{key}=.* would change nothing.*; set that, or leave {key.split('.')[-1]}"):
        unused.check(config(tree, {key: value}))
    unused.check(config(tree, {key: value, **beside}))
    unused.check(config(tree, {}))


def test_noise_of_single_examples_is_always_the_clients(tmp_path):
    of_examples = {"privacy.clip": 1.0, "privacy.unit": "example"}
    unused.check(config(TEXT, of_examples))
    with pytest.raises(UserError, match="privacy.unit=client"):
        unused.check(config(TEXT, {**of_examples, "privacy.where": "client"}))


@pytest.mark.parametrize("steps, warmup, good", [(2, 0, True), (2, 1, True), (2, 2, False), (2, 9, False)])
def test_a_rate_that_no_step_would_reach(steps, warmup, good):
    """Steps count from 0; the first one at `local.lr` is number `warmup_steps`."""
    asked = config(TEXT, {"local.steps": steps, "local.warmup_steps": warmup})
    if good:
        return unused.check(asked)
    with pytest.raises(UserError, match=f"^local.warmup_steps={warmup} leaves none of the 2 steps"):
        unused.check(asked)


def test_all_rules_have_a_case():
    assert {word.partition("=")[0] for _, word, _ in CASES} == {rule.key for rule in unused.RULES}


@pytest.mark.parametrize("command", ["run", "run --dry-run", "compare --methods fedit"])
def test_it_is_refused_before_anything_is_trained(small, tmp_path, llm_fed, command):
    path, out = small.config(tmp_path / "c.yaml"), tmp_path / "out"
    first, *rest = command.split()
    refused = llm_fed(first, path, "task.partition.alpha=0.1", *rest, "--out", out)
    refused.assert_refused("task.partition.alpha=0.1 would change nothing", "task.partition.kind=dirichlet")
    assert not (out / "metrics.jsonl").exists()


def test_a_run_that_was_begun_with_one_goes_on(small, tmp_path, monkeypatch, llm_fed):
    path, out = small.config(tmp_path / "c.yaml", rounds=1), tmp_path / "out"
    words = ["task.partition.alpha=0.1", "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(unused, "RULES", ())
        assert llm_fed("run", path, *words).code == 0
    assert llm_fed("run", path, "rounds=2", *words).code == 0
    assert llm_fed("eval", out).code == 0
    llm_fed("run", path, "--fresh", *words).assert_refused("would change nothing")


OF_METHODS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fedmerge of pictures", {"weight_lr": 0.5}, {"weight_step": "normalized"}),
    ("fedmerge", {"max_step": 0.5}, {"weight_step": "fixed-magnitude"}),
    ("fedmerge", {"init_noise": 0.5}, {"soup_init": "shared"}),
    ("fedmerge-fixed", {"init_noise": 0.5}, {"soup_init": "shared"}),
    ("feddle", {"head_epochs": 2}, {}),
    ("feddle of pictures", {"head_lr": 0.1}, {}),
    ("fedmoe of pictures", {"gate_lr": 0.1, "gate": "even"}, {"gate": "learned"}),
    ("fedmoe of pictures", {"gate_width": 8, "gate": "even"}, {"gate": "learned"}),
    ("fedmoe of pictures", {"gate_norm": False, "gate": "even"}, {"gate": "learned"}),
]


@pytest.mark.parametrize(("name", "settings", "beside"), OF_METHODS, ids=str)
def test_a_setting_of_a_method_counts_only_beside_others(tmp_path, name, settings, beside):
    first = next(iter(settings))
    with pytest.raises(UserError, match=f"^method.{first}=.* would change nothing"):
        battery.go(name, tmp_path / "a", settings=settings)
    if beside:
        battery.go(name, tmp_path / "b", settings={**settings, **beside}, rounds=1)


OF_HEADS = [
    *((name, "private_head=true") for name in ("fedit", *MERGERS)),
    ("potara", "head=own"),
    ("potara", "head=traced"),
    ("fisher-merging", "head=mean"),
]


@pytest.mark.parametrize(("name", "word"), every.quick(OF_HEADS, [OF_HEADS[0], *OF_HEADS[-3:]]))
def test_a_head_that_there_is_not_cannot_be_treated_apart(small, tmp_path, llm_fed, name, word):
    """Language models have none; image models with adapters train theirs (test_image_adapter_runs.py)."""
    refused = llm_fed("run", small.config(tmp_path / "c.yaml"), f"method={name}", f"method.{word}", "--dry-run")
    refused.assert_refused(f"method.{word.split('=')[0]}=", "would change nothing", "a head that is trained")


def test_a_merge_is_refused_before_its_parents_are_trained_or_measured(small, tmp_path, monkeypatch, llm_fed):
    words = ["method=potara", "method.head=own", "--out", tmp_path / "out"]
    llm_fed("run", small.config(tmp_path / "c.yaml"), *words).assert_refused("method.head=own would change nothing")
    assert not list(tmp_path.rglob("metrics.jsonl"))
    monkeypatch.setattr(announce, "free_memory", lambda device: 0)
    llm_fed("run", tmp_path / "c.yaml", *words, "--dry-run").assert_refused("method.head=own would change nothing")


# Another value of every setting, in a run of text and in one of images; a value that does not fit is refused.
OTHER: dict[str, Any] = {
    "seed": 4, "rounds": 1, "participation": 0.5, "norm_bound": 1.001,
    "adapter.rank": 3, "adapter.alpha": 3, "adapter.dropout": 0.5, "adapter.rslora": True,
    "adapter.target_modules": ["q_proj"], "base.dtype": "bfloat16", "base.quantization": "nf4",
    "task.noise": 0.9, "task.image_size": 16, "task.max_length": 4, "task.template": "alpaca", "task.loss_on": "all",
    "task.clients": 2, "task.sample_clients": True, "task.columns.prompt": "output", "task.groups": ["ada"],
    "task.partition.alpha": 0.1, "task.partition.classes": 2, "task.partition.sizes": [2, 1],
    "task.partition.clients": 2, "task.partition.label": "output", "task.partition.test": 0.3,
    "local.momentum": 0.9, "local.augment": "crop-flip", "local.weight_decay": 0.5,
    "local.clip": 1e-3, "local.proximal": 1.0, "local.freeze": ".*lora_A.*|head.bias", "local.decay": "linear",
    "local.warmup_steps": 1, "local.optimizer": "sgd", "local.lr": 0.1,
    "local.lr_end": 1e-4, "local.schedule": "cosine", "local.steps": 3, "local.epochs": 2, "local.batch_size": 3,
    "delay.sigma": 3.0, "delay.drop_out": 0.5, "transport": "bfloat16",
    "privacy.clip": 0.1, "privacy.noise": 1.0, "privacy.where": "client", "privacy.delta": 0.1,
    "privacy.unit": "example", "server.aggregation": "median", "server.liars": 0.4,
    "eval.every": 2, "eval.limit": 1, "eval.max_new_tokens": 1, "eval.during": "test", "eval.base": True,
    "seeds.training": 5, "export.clients": ["ada"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "images"])
def test_every_setting_changes_something_or_is_refused(small, tmp_path, kind):
    """Four rounds of a tiny run with one setting changed: other adapters, other lines of the run, or an error."""
    pictures = tiny_images.npz(tmp_path / "d.npz")
    tree = small.tree(rounds=4) if kind == "text" else tiny_images.tree(pictures, rounds=4)
    words = {key: value for key, value in OTHER.items() if tree.get("adapter") or not key.startswith("adapter.")}
    known = flat(as_dict(configfile.from_dict(tree)))
    assert set(words) <= set(known) | {"task.image_size"}
    if kind == "images":
        del words["eval.base"]  # an image model has no base that could be scored
    before = outcome(tree, {}, tmp_path)
    inert = [key for key, value in words.items() if outcome(tree, {key: value}, tmp_path) == before]
    assert inert == []


def outcome(tree: Mapping[str, Any], words: Mapping[str, Any], folder: Path) -> str:
    """The error, or a digest of the exported adapters, of metrics.jsonl and of samples.jsonl."""
    out = folder / "run"
    try:
        asked = configfile.load(tree, [f"{key}={value}" for key, value in words.items()])
        run.train(asked, out, fresh=True, reporter=Reporter(Console(quiet=True)))
    except UserError as error:
        return str(error)
    digest = hashlib.sha256()
    for path in sorted([*out.glob("adapters/*/*.safetensors"), out / "metrics.jsonl", *out.glob("samples.jsonl")]):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()
