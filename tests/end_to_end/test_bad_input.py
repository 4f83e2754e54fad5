"""Bad input through the command line: what was got, where, what to do, in one or two lines; nothing half-written."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every
import own_steps
import pytest
import tiny_base

from llm_fed.method.site import Site
from llm_fed.runs.records import read_records


@pytest.mark.parametrize(
    "word, parts",
    [
        ("rounds=-1", ["rounds is -1", "at least 1"]),
        ("adapter.target_modules=[]", ["adapter.target_modules", "at least one"]),
        ("adapter.target_modules=[qproj]", ["target_modules", "qproj", "no layer of LlamaForCausalLM", "q_proj"]),
        ("task.name=flna", ["task.name", "flna", "flan"]),
        ("task.template=alpacca", ["task.template", "alpacca", "alpaca"]),
        ("task.columns.prompt=instructon", ["ada/train.jsonl", "task.columns.prompt", "instructon", "instruction"]),
        ("task.path=nowhere", ["task.path='nowhere'", "no such file or folder"]),
        ("task.path=null", ["task.path is not set"]),
        ("task.clients=9", ["task.clients=9", "3 clients"]),
        ("task.max_length=4", ["client ada", "task.max_length=4", "raise it"]),
        ("eval.metric=option_accuracy", ["client ada", "option_accuracy", "task.columns.options"]),
        ("base.name=./nowhere", ["base.name='./nowhere'", "not a folder"]),
        ("track.with=[weights]", ["track.with", "weights"]),
        ("local.steps", ["'local.steps'", "local.lr=1e-4"]),
        ("task=5", ["task is 5", "mapping"]),
    ],
)
def test_a_wrong_setting(small, llm_fed, tmp_path, word, parts):
    config = small.config(tmp_path / "c.yaml", method={"name": "fedmerge"}, rounds=1)
    llm_fed("run", config, *word.split(), "--out", tmp_path / "runs/a").assert_refused(*parts)
    assert not (tmp_path / "runs/a").exists()


def test_a_base_without_a_pad_token(small, llm_fed, tmp_path):
    """It pads with EOS, which is masked: the same losses as with a pad token."""
    losses = []
    for special in ({"eos_token": "</s>"}, {"eos_token": "</s>", "pad_token": "<pad>"}):
        folder = tmp_path / "-".join(special)
        base = tiny_base.folder(folder / "base", special=special)
        config = small.config(folder / "c.yaml", base={"name": str(base)}, rounds=1)
        assert llm_fed("run", config, "--out", folder / "run").code == 0
        losses.append([line["loss"] for line in read_records(folder / "run/metrics.jsonl") if line["kind"] == "client"])
    assert losses[0] == losses[1]


@pytest.fixture
def poisoned(monkeypatch) -> Callable[..., None]:
    """`poisoned("bob", ..., after=round)`: what these clients train from is NaN in all rounds after that one."""
    fit = Site.fit

    def poison(*clients: str, after: int = 0) -> None:
        async def nan_fit(self: Site, state: Any, **settings: Any) -> Any:
            ill = self.id in clients and self.round > after
            return await fit(self, state * math.nan if ill else state, **settings)

        monkeypatch.setattr(Site, "fit", nan_fit)

    return poison


@pytest.mark.parametrize("method", every.quick(["fedit", "local", "fedmerge"], ["fedmerge"]))
def test_nan_at_one_client(small, llm_fed, tmp_path, poisoned, method):
    """bob is left out of each round, it is said why, and the run goes on to its end."""
    poisoned("bob")
    config = small.config(tmp_path / "c.yaml", method={"name": method})
    said = llm_fed("run", config, "--out", tmp_path / "a")
    assert said.code == 0 and "Traceback" not in said.err
    assert "round 1: bob: client failed: ClientError: client bob: loss is nan at local step 1" in said.err
    assert "lower local.lr" in said.err
    lines = read_records(tmp_path / "a/metrics.jsonl")
    rounds = [line for line in lines if line["kind"] == "round"]
    assert [(line["failed"], line["arrived"], line["refused"]) for line in rounds] == [(1, 2, 0)] * 3
    assert {line["client"] for line in lines if line["kind"] == "client"} == {"ada", "cyd"}
    assert sorted(path.name for path in (tmp_path / "a/adapters").iterdir()) == ["ada", "bob", "cyd"]
    assert llm_fed("eval", tmp_path / "a", "--json").code == 0  # which refuses adapters that are not finite


def test_nan_at_every_client(small, llm_fed, tmp_path, poisoned):
    poisoned("ada", "bob", "cyd", after=1)
    config = small.config(tmp_path / "c.yaml", eval={"every": 0})
    said = llm_fed("run", config, "--out", tmp_path / "a")
    *_, first, last = said.err.splitlines()
    assert said.code == 1 and " round 1/3: loss" in first
    assert last.startswith("llm-fed: every client of round 2 failed; the first one: client ada: loss is nan")


@pytest.mark.parametrize("clients", every.quick([["bob"], ["ada", "bob", "cyd"]], [["bob"]]))
def test_nan_while_clients_finish(small, llm_fed, tmp_path, poisoned, clients):
    """Who fails keeps the model that the federation gives, as if finishing had not been asked for."""
    config = small.config(tmp_path / "c.yaml", **own_steps.alone(after=1))
    assert llm_fed("run", config, "method=fedit", "rounds=1", "--out", tmp_path / "fedit").code == 0
    poisoned(*clients, after=1)
    said = llm_fed("run", config, "--out", tmp_path / "fedlora")
    assert said.code == 0 and said.err.count("client failed") == len(clients)
    events = [line["client"] for line in read_records(tmp_path / "fedlora/metrics.jsonl") if line["kind"] == "event"]
    assert events == clients
    for client in ("ada", "bob", "cyd"):
        name = f"adapters/{client}/adapter_model.safetensors"
        alike = (tmp_path / "fedit" / name).read_bytes() == (tmp_path / "fedlora" / name).read_bytes()
        assert alike == (client in clients)


def another_rank(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))


@pytest.mark.parametrize(
    "damage, parts", [(another_rank, ["rank 3"]), (shutil.rmtree, ["no personal adapter of bob any more", "--fresh"])]
)
def test_a_damaged_adapter(llm_fed, finished, tmp_path, damage, parts):
    shutil.copytree(finished, tmp_path / "run")
    damage(tmp_path / "run/adapters/bob")
    llm_fed("eval", tmp_path / "run", "--json").assert_refused("bob", *parts)


def test_an_adapter_of_another_base(small, llm_fed, finished, tmp_path):
    other = tiny_base.folder(tmp_path / "other", hidden_size=32)
    (tmp_path / "new.jsonl").write_text('{"instruction": "w1 w2", "output": "w3"}\n')
    words = ["--adapter", finished / "adapters/bob", "--data", tmp_path / "new.jsonl"]
    said = llm_fed("eval", "--base", other, *words, "--json")
    said.assert_refused("does not fit the base", str(small.base), str(other))


@pytest.mark.parametrize(
    "words, parts",
    [
        (["--split", "tset"], ["split", "tset", "test"]),
        (["--metric", "rogue"], ["rogue", "rouge1"]),
        (["--limit", "0"], ["limit", "0", "at least 1"]),
        (["--limit", "-1"], ["limit", "-1", "at least 1"]),
        (["--base", "x"], ["either a run folder or --base"]),
    ],
)
def test_wrong_words_for_eval(llm_fed, finished, words, parts):
    llm_fed("eval", finished, *words).assert_refused(*parts)


def test_eval_and_export_of_what_is_no_finished_run(small, llm_fed, finished, tmp_path):
    for command in (["eval"], ["export"]):
        out = [tmp_path / "out"] if command == ["export"] else []
        llm_fed(*command, tmp_path / "nowhere", *out).assert_refused("nowhere", "not a run folder")
        shutil.copytree(finished, tmp_path / command[0])
        (tmp_path / command[0] / "summary.json").unlink()
        llm_fed(*command, tmp_path / command[0], *out).assert_refused("is not finished", "continue it")
    assert not (tmp_path / "out").exists()


def test_eval_of_one_adapter_lacks_something(small, llm_fed, finished, tmp_path):
    adapter = ["eval", "--base", small.base, "--adapter", finished / "adapters/ada"]
    llm_fed(*adapter).assert_refused("--task NAME or --data FILE")
    llm_fed("eval", "--base", small.base, "--data", "x.jsonl").assert_refused("no such file")
    llm_fed(*adapter, "--data", tmp_path / "x.jsonl").assert_refused("x.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    llm_fed(*adapter, "--data", tmp_path / "empty.jsonl").assert_refused("empty.jsonl holds no example")
    llm_fed(*adapter, "--task", "fils", "--data", small.data).assert_refused("fils", "files")
    llm_fed("eval").assert_refused("either a run folder or --base")


def test_export_of_an_unknown_client_and_over_other_files(llm_fed, finished, tmp_path):
    llm_fed("export", finished, tmp_path / "out", "--client", "bobb").assert_refused("bobb", "bob")
    assert not (tmp_path / "out").exists()
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob/thesis.tex").write_text("precious")
    llm_fed("export", finished, tmp_path).assert_refused(str(tmp_path / "bob"), "give another folder")
    assert (tmp_path / "bob/thesis.tex").read_text() == "precious"
    (tmp_path / "file").write_text("")
    llm_fed("export", finished, tmp_path / "file").assert_refused(str(tmp_path / "file"), code=1)
