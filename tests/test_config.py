"""Configurations: YAML and words to typed values and back, wrong keys named, the settings that are shipped."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import AdapterConfig, Config
from llm_fed.settings.configfile import as_dict, flat, from_dict, load


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return path

    return write


def test_the_fixed_keys_and_their_defaults():
    """The keys that scripts and other people's files rely on; where a default changes, CHANGELOG.md says so."""
    fixed = yaml.safe_load("""
        seed: 0
        rounds: 50
        participation: 1.0
        clients_per_pass: auto
        base: {name: meta-llama/Llama-3.2-3B-Instruct, dtype: auto, quantization: null}
        adapter: {rank: 8, alpha: 16, dropout: 0.05, target_modules: [q_proj, v_proj]}
        task: {name: flan, path: null, clients: null, max_length: 512, template: alpaca-short, validation: 0.1}
        delay: {sigma: 0.0, drop_out: 0.0}
        local: {steps: 20, epochs: null, batch_size: 4, lr: 5.0e-5, lr_end: 5.0e-6, optimizer: adamw, clip: null}
        eval: {every: 10, metric: null, limit: null}
        export: {clients: all}
        checkpoint: {every: 1, keep: 2, keep_rounds: []}
        norm_bound: 10.0
        """)
    assert from_dict({**fixed, "method": {"name": "fedmerge", "num_models": 8}}) == dataclasses.replace(
        Config(), method={"name": "fedmerge", "num_models": 8}
    )
    assert flat(fixed).items() <= flat(as_dict(Config())).items()


def test_words_are_laid_over_the_file(file):
    path = file("rounds: 3\nlocal: {steps: 5, lr: 0.1}\nadapter: {rank: 2}\n")
    config = load(path, ["rounds=4", "local.lr=5e-5", "adapter.target_modules=[up_proj]", "base.quantization=nf4"])
    assert (config.rounds, config.local.steps, config.local.lr) == (4, 5, 5e-5)
    assert config.adapter == AdapterConfig(rank=2, target_modules=("up_proj",))
    assert config.base.quantization == "nf4" and load(path, ["base.quantization=null"]).base.quantization is None


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("local: {lr: 5e-5}", "local.lr", 5e-5),  # a string in YAML 1.1
        ("adapter: {alpha: 16}", "adapter.alpha", 16.0),
        ("local: {clip: 1}", "local.clip", 1.0),
        ("local: {steps: null, epochs: 2}", "local.epochs", 2),
        ("clients_per_pass: 4", "clients_per_pass", 4),
        ("clients_per_pass: auto", "clients_per_pass", "auto"),
        ("adapter: {target_modules: [a, b]}", "adapter.target_modules", ("a", "b")),
        ("adapter: {target_modules: '.*_proj'}", "adapter.target_modules", ".*_proj"),
        ("checkpoint: {keep_rounds: [1, 10]}", "checkpoint.keep_rounds", (1, 10)),
        ("checkpoint: {keep_rounds: []}", "checkpoint.keep_rounds", ()),
        ("track: {with: [wandb]}", "track.with_", ("wandb",)),
        ("rounds: 7\nlocal: {steps: '${rounds}'}", "local.steps", 7),
        ("base: {name: 3}", "base.name", "3"),
    ],
)
def test_types(file, text, key, value):
    found = load(file(text))
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("rounds: 2.5", "rounds is 2.5 .float.; it takes int"),
        ("base: {name: }", "base.name is None .NoneType.; it takes str"),
        ("base: {activation_checkpointing: 1}", "base.activation_checkpointing is 1 .int.; it takes bool"),
        ("adapter: {target_modules: []}", r"adapter.target_modules is \(\); it must be at least one module name"),
        ("checkpoint: {keep_rounds: [a]}", r"checkpoint.keep_rounds is \['a'\] .list.; it takes tuple.int"),
        ("local: 5", "local is 5; it takes a mapping"),
        ("local: null", "local is None; it takes a mapping"),
        ("method: [fedit]", r"method is \['fedit'\]; it takes a mapping"),
        ("local: {steps: null}", "local.steps is None; it must be a number while local.epochs is null"),
        ("local: {steps: 1, epochs: 1}", "local.steps is 1; it must be a number while local.epochs is null"),
        ("local: {decay: round}", "local.decay='round' is unknown.*; known: constant, linear, cosine"),
    ],
)
def test_wrong_values_name_their_key(file, text, message):
    with pytest.raises(UserError, match=message):
        load(file(text))


@pytest.mark.parametrize(
    "text, wrong, close",
    [
        ("sed: 1", "sed", "seed"),
        ("local: {batchsize: 1}", "local.batchsize", "batch_size"),
        ("task: {columns: {promt: q}}", "task.columns.promt", "prompt"),
        ("track: {with_: [wandb]}", "track.with_", "with"),
    ],
)
def test_unknown_keys_name_the_closest(file, text, wrong, close):
    with pytest.raises(UserError, match=f"unknown key {wrong} .*closest.*{close}") as caught:
        load(file(text))
    assert "known: " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words, method",
    [
        ([], {"name": "fedmerge", "num_models": 4, "weight_step": "plain"}),
        (["method.num_models=2"], {"name": "fedmerge", "num_models": 2, "weight_step": "plain"}),
        (["method=fedmerge"], {"name": "fedmerge", "num_models": 4, "weight_step": "plain"}),
        (["method=fedit"], {"name": "fedit"}),  # what the file says of another method does not carry over
        (["method=fedavg+"], {"name": "fedavg+"}),
        (["method.name=fedlora", "method.personal_share=0.3"], {"name": "fedlora", "personal_share": 0.3}),
        (["method=fedmerge-fixed", "method.num_models=6"], {"name": "fedmerge-fixed", "num_models": 6}),
        (["method={name: fedlora, personal_lr: 1e-3}"], {"name": "fedlora", "personal_lr": 1e-3}),
    ],
)
def test_the_word_method_replaces_the_files_section(file, words, method):
    path = file("method: {name: fedmerge, num_models: 4, weight_step: plain}\n")
    config = load(path, words)
    assert config.method == method
    methods.build(config.method)  # which checks and converts the hyper-parameters


def test_open_keys_must_be_given(file):
    path = file('base: {name: "???", dtype: float32}\ntask: {path: "???"}\n')
    with pytest.raises(UserError, match="does not set base.name and task.path; give base.name=... task.path=..."):
        load(path)
    with pytest.raises(UserError, match="does not set task.path; give task.path=..."):
        load(path, ["base.name=x"])
    assert load(path, ["base.name=x", "task.path=y"]).task.path == "y"


def test_an_open_key_of_a_method_that_is_replaced_is_not_asked_for(file):
    assert load(file('method: {name: fedmerge, num_models: "???"}\n'), ["method=fedit"]).method == {"name": "fedit"}


def odd_config() -> Config:
    """As far from the defaults as one configuration can be."""
    return from_dict(
        {
            "seed": 5, "clients_per_pass": 3, "base": {"name": "a", "quantization": "int8", "revision": "main"},
            "adapter": {"target_modules": "q.*", "alpha": 0.5},
            "task": {"columns": {"prompt": "q"}, "partition": {"kind": "dirichlet", "clients": 3, "label": "l"}},
            "delay": {"sigma": 5, "drop_out": 0.1},
            "method": {"name": "fedlora", "personal_lr": 0.1}, "local": {"steps": None, "epochs": 2, "clip": 1},
            "checkpoint": {"keep_rounds": [1, 2]}, "track": {"with": ["tensorboard"]},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            "",
            ["task=files", "task.path=DIR"],
            "task is 'files'; it takes a mapping of settings, such as task.name=files",
        ),
        ("", ["task.path=DIR", "task=files"], "task is 'files'; it takes a mapping"),
        ("base: llama", ["base.dtype=float32"], "base is 'llama'; .* such as base.name=llama"),
        ("", ["eval=3", "eval.every=2"], "eval is 3; it takes a mapping of settings$"),
        ("local: [1]", ["local.lr=1"], r"local is \[1\]; it takes a mapping of settings$"),
    ],
)
def test_a_plain_value_of_a_section_is_not_lost_under_a_setting(file, text, words, message):
    with pytest.raises(UserError, match=message):
        load(file(text), words)


def test_a_setting_may_be_laid_over_a_section_that_is_absent(file):
    assert load(file("base: {name: x}\nstop: null"), ["stop.patience=3"]).stop.patience == 3


@pytest.mark.parametrize("config", [Config(), odd_config()], ids=["defaults", "odd"])
def test_the_resolved_configuration_comes_back(tmp_path, config):
    """Through plain values, and through the file that a run saves: so a run can be repeated from its own folder."""
    assert from_dict(as_dict(config)) == config
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(as_dict(config), sort_keys=False))
    assert load(path) == config
    assert set(as_dict(config)) == {field.name for field in dataclasses.fields(Config)}
    assert "with" in as_dict(config)["track"]
