"""`key=value` settings of `llm-fed eval` and `llm-fed merge`, as their errors advise, and the score of a bare base."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_images
import torch

from llm_fed.basics.errors import UserError
from llm_fed.commands.evaluate import evaluate_adapter, lay_over
from llm_fed.runs.reading import read_config


def scores(said) -> dict[str, float]:
    assert said.code == 0, said.err
    return json.loads(said.out)["clients"]


def asking(small, path: Path, **names: str) -> Path:
    """Ada's test file with other names of columns."""
    rows = [json.loads(line) for line in (small.data / "ada/test.jsonl").read_text().splitlines()]
    renamed = [{names.get(key, key): value for key, value in row.items()} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    return path


def test_settings_are_laid_over_a_run(llm_fed, finished):
    limited = scores(llm_fed("eval", finished, "--limit", 1, "--metric", "exact_match", "--json"))
    words = ("eval.limit=1", "eval.metric=exact_match")
    assert scores(llm_fed("eval", finished, *words, "--json")) == limited
    own = scores(llm_fed("eval", finished, "--json"))
    assert scores(llm_fed("eval", finished, "eval.max_new_tokens=1", "--json")) != own
    assert scores(llm_fed("eval", finished, "task.groups=[bob]", "--json")) == {"bob": own["bob"]}


def test_settings_alone_stand_where_a_run_would(llm_fed, small, finished, tmp_path, monkeypatch):
    """A word with `=` that is no folder is a setting; a folder may have one in its name."""
    data = asking(small, tmp_path / "odd.jsonl", instruction="frage", output="antwort")
    one = ("eval", "--base", small.base, "--adapter", finished / "adapters/ada", "--data", data, "--json")
    llm_fed(*one).assert_refused("task.columns.prompt")
    words = ("task.columns.prompt=frage", "task.columns.answer=antwort")
    assert scores(llm_fed(*one, *words)) == {"odd": scores(llm_fed("eval", finished, "--json"))["ada"]}
    monkeypatch.chdir(tmp_path)
    Path("a=b").symlink_to(finished)
    assert scores(llm_fed("eval", "a=b", "--json")) == scores(llm_fed("eval", finished, "--json"))
    llm_fed("eval", "a=c").assert_refused("run folder", "--base")


@pytest.mark.parametrize(
    "word",
    [
        "method.num_models=3", "method=fedit", "rounds=3", "adapter.rank=2", "local.lr=1", "seed=1", "eval.every=2",
        "eval.select=last", "base.clients=[cnn]", "checkpoint.every=2",
    ],
)  # fmt: skip
def test_what_only_training_needs_is_refused_with_a_reason(finished, word):
    with pytest.raises(UserError, match="only affects training.*task\\.\\*"):
        lay_over(read_config(finished), [word], "the run folder")


def test_mistakes_in_settings(llm_fed, small, finished):
    llm_fed("eval", finished, "eval.metrik=rouge1").assert_refused("unknown key eval.metrik", "'metric'")
    llm_fed("eval", finished, "task.template=chta").assert_refused("task.template", "'chat'")
    llm_fed("eval", finished, "task.template=chat").assert_refused("no chat template")
    llm_fed("eval", finished, "limit").assert_refused("got 'limit'", "task.template=chat")
    llm_fed("eval", finished, "--template", "chat").assert_refused(
        "--template only works with --base", "task.template=chat"
    )
    one = ("eval", "--base", small.base, "--data", small.data / "ada/test.jsonl")
    llm_fed(*one, "task.clients=2").assert_refused("task.clients", "--task NAME")
    llm_fed(*one[:3]).assert_refused("--task NAME or --data FILE")


def test_what_moves_examples_between_the_splits_is_said(llm_fed, finished, tmp_path):
    said = llm_fed("eval", finished, "task.validation=0.2", "--json")
    assert (
        said.code == 0 and "task.validation divides only rows that the run does not know; the others stay" in said.err
    )
    (shutil.copytree(finished, tmp_path / "run") / "splits.json").unlink()
    said = llm_fed("eval", tmp_path / "run", "task.validation=0.2", "--json")
    assert said.code == 0 and "task.validation changes which examples are held out" in said.err
    for run in (finished, tmp_path / "run"):
        assert "split" not in llm_fed("eval", run, "eval.limit=1", "--json").err


def test_the_bare_base(llm_fed, small, finished, tmp_path):
    """It scores as a base with an adapter that adds nothing, on a file and on every client of a task."""
    from safetensors.torch import load_file, save_file

    llm_fed("export", finished, tmp_path / "out", "--client", "ada")
    weights = tmp_path / "out/ada/adapter_model.safetensors"
    zeros = {name: torch.zeros_like(value) for name, value in load_file(weights).items()}
    save_file(zeros, weights, metadata={"format": "pt"})
    for where in (("--data", small.data / "ada/train.jsonl"), ("--task", "files", "--data", small.data)):
        words = ("eval", "--base", small.base, *where, "eval.max_new_tokens=3", "--json")
        said = llm_fed(*words, "--template", "plain")
        assert "does not name" not in said.err
        assert scores(said) == scores(llm_fed(*words, "--adapter", tmp_path / "out/ada"))
    said = llm_fed("eval", "--base", small.base, "--data", small.data / "ada/test.jsonl")
    assert said.code == 0 and "so alpaca-short is used" in said.err


def test_a_bare_image_base_is_refused(tmp_path):
    tiny_images.save(tiny_images.vit(torch.float32), tmp_path / "vit")
    path = tiny_images.npz(tmp_path / "a.npz", train=24, test=12)
    with pytest.raises(UserError, match="head is trained with its adapter.*--adapter DIR"):
        evaluate_adapter(str(tmp_path / "vit"), None, ["task.name=images", f"task.path={path}"])


def test_merge_takes_settings(llm_fed, small, finished, tmp_path):
    data = asking(small, tmp_path / "odd.jsonl", instruction="frage", output="antwort")
    ada = finished / "adapters/ada"
    words = ("merge", "potara", "--fed", ada, "--local", finished / "adapters/bob", "--data", data)
    llm_fed(*words, "--out", tmp_path / "a").assert_refused("task.columns.prompt")
    columns = ("task.columns.prompt=frage", "task.columns.answer=antwort")
    said = llm_fed(*words, *columns, "method.samples=2", "--out", tmp_path / "b", "--json")
    (found,) = json.loads(said.out)["clients"].values()
    assert found["samples"] == 2
    for word, part in (
        ("rounds=3", "only affects training"), ("base.name=x", "--base NAME"), ("method.name=mean", "first word"),
        ("method.sampels=2", "'samples'"),
    ):  # fmt: skip
        llm_fed(*words, *columns, word, "--out", tmp_path / "c").assert_refused(part)
