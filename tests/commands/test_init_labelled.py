"""`llm-fed init` for labelled texts under an encoder: what it writes runs."""

import json
from pathlib import Path
from typing import Any

import classifiers
import pytest
import yaml
from classifiers import LABELS, federation, written


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("base") / "roberta", "roberta")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_it_sees_labels(base, tmp_path, llm_fed):
    data = federation(tmp_path / "shops")
    said = llm_fed("init", data, "--base", base, "--out", tmp_path / "shops.yaml")
    assert said.code == 0, said.err
    assert "one label for each text, scored by accuracy" in said.out and "3: sport, trade, weather" in said.out
    config = read(tmp_path / "shops.yaml")
    assert config["task"]["name"] == "classification" and config["task"]["labels"] == list(LABELS)
    assert "adapter" not in config and "template" not in config["task"]
    assert config["local"]["lr"] == 1e-3  # the largest that was tried with labels
    words = ["rounds=1", "local.steps=1", "eval.every=0", "device=cpu"]
    ran = llm_fed("run", tmp_path / "shops.yaml", *words, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("what, seen", [({"pairs": True}, "second text = sentence2"), ({"numbers": True}, "Pearson")])
def test_it_sees_pairs_and_numbers(base, tmp_path, llm_fed, what, seen):
    data = federation(tmp_path / "data", **what)
    said = llm_fed("init", data, "--base", base, "--out", tmp_path / "run.yaml")
    assert said.code == 0, said.err
    assert seen in said.out
    config = read(tmp_path / "run.yaml")
    assert config["task"]["name"] == ("regression" if "numbers" in what else "classification")
    ran = llm_fed("run", tmp_path / "run.yaml", "rounds=1", "local.steps=1", "device=cpu", "--out", tmp_path / "run")
    assert ran.code == 0, ran.err


def test_one_file_is_split_by_its_column(base, tmp_path, llm_fed):
    rows = [{**row, "shop": f"s{n % 3}"} for n, row in enumerate(classifiers.rows(0, 60))]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--base", base, "--client", "shop", "--out", tmp_path / "all.yaml"]
    said = llm_fed("init", tmp_path / "all.jsonl", *words)
    assert said.code == 0, said.err
    assert read(tmp_path / "all.yaml")["task"]["columns"] == {"client": "shop"}


def test_a_head_with_other_labels_is_named(tmp_path, llm_fed):
    names = dict(enumerate(("cat", "dog", "weather")))
    base = written(tmp_path / "base", "bert", kind="BertForSequenceClassification", id2label=names,
                   label2id={name: n for n, name in names.items()})  # fmt: skip
    said = llm_fed("init", federation(tmp_path / "data"), "--base", base, "--out", tmp_path / "run.yaml")
    assert said.code == 2 and "has no label 'sport'; its labels are cat, dog, weather" in said.err
    assert "ada/train.jsonl, line" in said.err and not (tmp_path / "run.yaml").exists()


def test_a_text_without_a_usual_name_is_asked_for(base, tmp_path, llm_fed):
    (tmp_path / "data").mkdir()
    rows = [{"zz": row["text"], "label": row["label"]} for row in classifiers.rows(0, 30)]
    for client in ("ada", "bob"):
        (tmp_path / f"data/{client}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["init", tmp_path / "data", "--base", base, "--out", tmp_path / "run.yaml"]
    said = llm_fed(*words)
    assert said.code == 2 and "no column for the text among zz, label; give --prompt COLUMN" in said.err
    assert llm_fed(*words, "--prompt", "zz").code == 0


def test_a_language_model_still_writes_labels(tmp_path, llm_fed):
    base = written(tmp_path / "base", "llama")
    rows = [{"text": row["text"], "label": row["label"], "client": f"c{n % 2}"}
            for n, row in enumerate(classifiers.rows(0, 60))]  # fmt: skip
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = llm_fed("init", tmp_path / "all.jsonl", "--base", base, "--out", tmp_path / "run.yaml")
    assert said.code == 0, said.err
    assert read(tmp_path / "run.yaml")["task"]["name"] == "files" and "with an encoder as --base" in said.out
