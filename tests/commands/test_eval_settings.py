"""`llm-fed eval` with settings, of a bare base and across clients; and what `llm-fed merge` makes of runs, which is
scored, compared, exported and chatted with like a run."""

import io
import json
import shutil
from pathlib import Path

import pytest
import tiny_images
import torch

from llm_fed.basics.errors import UserError
from llm_fed.cli import printing
from llm_fed.commands.cross import cross_scores
from llm_fed.commands.evaluate import evaluate_adapter, evaluate_run, lay_over
from llm_fed.experiment import run as experiment
from llm_fed.runs.reading import read_config
from llm_fed.settings import configfile


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
    (about,) = printing.Settings.__metadata__  # its example is one of eval, too
    lay_over(read_config(finished), [about.help.rpartition(" ")[2].rstrip(".")], "the run folder")
    llm_fed("eval", finished, "eval.metrik=rouge1").assert_refused("unknown key eval.metrik", "'metric'")
    llm_fed("eval", finished, "task.template=chta").assert_refused("task.template", "'chat'")
    llm_fed("eval", finished, "task.template=chat").assert_refused("no chat template")
    llm_fed("eval", finished, "limit").assert_refused("got 'limit'", "task.template=chat")
    llm_fed("eval", finished, "--template", "chat").assert_refused("only works with --base", "task.path=FOLDER")
    one = ("eval", "--base", small.base, "--data", small.data / "ada/test.jsonl")
    llm_fed(*one, "task.clients=2").assert_refused("task.clients", "--task NAME")
    llm_fed(*one[:3]).assert_refused("--task NAME or --data FILE")


def test_what_moves_examples_between_the_splits_is_said(llm_fed, finished):
    said = llm_fed("eval", finished, "task.validation=0.2", "--json")
    assert (
        said.code == 0 and "task.validation divides only rows that the run does not know; the others stay" in said.err
    )
    assert "split" not in llm_fed("eval", finished, "eval.limit=1", "--json").err


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


# Each model on the examples of each client


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_a_row_is_the_usual_evaluation_of_one_model_at_all_clients(run, tmp_path, llm_fed):
    """As where every client's folder holds that model."""
    said = llm_fed("eval", run, "--cross", "--json")
    found = json.loads(said.out)
    assert "3 models on the examples of 3 clients are 9 evaluations with 27 answers" in said.err
    assert found["clients"] == ["ada", "bob", "cyd"]
    for owner, row in zip(found["clients"], found["scores"], strict=True):
        copy = shutil.copytree(run, tmp_path / owner)
        for client in found["clients"]:
            if client != owner:
                shutil.rmtree(copy / "adapters" / client)
                shutil.copytree(copy / "adapters" / owner, copy / "adapters" / client)
        assert evaluate_run(copy)["scores"]["clients"] == pytest.approx(
            dict(zip(found["clients"], row, strict=True)), rel=1e-5
        )
    columns = [list(column) for column in zip(*found["scores"], strict=True)]
    assert columns != found["scores"]  # so that rows and columns cannot be confused
    assert json.loads((run / "cross.json").read_text()) == found
    page = (run / "report.html").read_text()
    assert "Every personal model on every client" in page and page.count('class="heat" style') == 12  # with the base


def test_a_limit_and_a_terminal(run, llm_fed):
    said = llm_fed("eval", run, "--cross", "--limit", 1)
    assert "9 evaluations with 9 answers" in said.err and "model of" in said.out and "cross.json" in said.out
    assert json.loads((run / "cross.json").read_text())["limit"] == 1
    assert "at most 1 examples each" in (run / "report.html").read_text()


def test_what_it_does_not_take(run, tmp_path, llm_fed):
    llm_fed("eval", "--base", tmp_path, "--cross").assert_refused("needs a run folder")
    with pytest.raises(UserError, match=r"\(--cross\) needs at least two clients with test examples, and 1 of 1"):
        cross_scores(run, settings=["task.clients=1"])


# Merges as runs


@pytest.fixture(scope="module")
def merged(small, tmp_path_factory) -> Path:
    """A folder with a run of FedIT, one of local training, and their merge of double rank."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fedit", "local"):
        config = small.config(folder / "c.yaml", method={"name": name})
        experiment.train(configfile.load(config), folder / name)
    return folder


@pytest.fixture
def output(merged, llm_fed) -> Path:
    out = merged / "merged"
    if not out.exists():
        said = llm_fed("merge", "task-arithmetic", "--json", *parents(merged), "--out", out)
        assert said.code == 0, said.err
        assert json.loads(said.out)["scores"]["clients"].keys() == {"ada", "bob", "cyd"}
    return out


def parents(merged: Path) -> tuple[object, ...]:
    return "--fed", merged / "fedit", "--local", merged / "local"


def test_it_is_scored_and_compared(merged, output, llm_fed):
    done = json.loads((output / "summary.json").read_text())["scores"]
    said = llm_fed("eval", output, "--json")
    assert said.code == 0 and json.loads(said.out)["clients"] == done["clients"], said.err
    assert json.loads(said.out)["losses"] == done["losses"]
    assert llm_fed("eval", output, "--cross").code == 0
    assert llm_fed("report", output).code == 0
    page = (output / "report.html").read_text()
    assert "Merged from fedit (round 3) and local (round 3)" in page
    said = llm_fed("compare", "--runs", output, merged / "fedit")
    assert said.code == 0 and "task-arithmetic" in said.out + said.err, said


def test_it_is_chatted_with_and_exported(output, tmp_path, llm_fed, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w20 w21\n"))
    assert llm_fed("chat", output, "--client", "bob").code == 0
    assert llm_fed("export", output, tmp_path / "copies").code == 0
    assert {path.name for path in (tmp_path / "copies").iterdir()} == {"ada", "bob", "cyd"}


def test_a_run_is_not_written_over(merged, llm_fed):
    before = (merged / "fedit/config.yaml").read_bytes()
    refused = llm_fed("merge", "mean", *parents(merged), "--out", merged / "fedit")
    refused.assert_refused("is the folder of a run, whose files the merge would replace")
    assert (merged / "fedit/config.yaml").read_bytes() == before


def test_what_no_run_took_part_in_leaves_no_old_scores(merged, tmp_path, llm_fed):
    out, names = tmp_path / "out", (merged / "fedit/adapters/ada", merged / "local/adapters/ada")
    assert llm_fed("merge", "mean", *parents(merged), "--out", out).code == 0 and (out / "summary.json").exists()
    assert llm_fed("merge", "mean", "--fed", names[0], "--local", names[1], "--out", out).code == 0
    assert not (out / "summary.json").exists() and not (out / "config.yaml").exists()
