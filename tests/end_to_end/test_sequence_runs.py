"""Runs of sequence classification and regression: training, scores, heads, resume, merges, audit, network, export."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import every
import pytest
import torch
from classifiers import LABELS, check_learned, federation, summary, tree, written
from network import NETWORK, NetworkInProcess
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import llm_fed
from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.experiment import run as experiment
from llm_fed.kinds.sequences import Sequences
from llm_fed.method.site import Data
from llm_fed.network import server
from llm_fed.settings.configfile import from_dict


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> SimpleNamespace:
    """Bases and data: labels, pairs with labels, and numbers."""
    folder = tmp_path_factory.mktemp("sequences")
    return SimpleNamespace(
        base=written(folder / "roberta", "roberta"),
        decoder=written(folder / "llama", "llama"),
        data=federation(folder / "labels"),
        pairs=federation(folder / "pairs", pairs=True),
        numbers=federation(folder / "numbers", numbers=True),
    )


@pytest.fixture(scope="module")
def trained(place, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedit", "local", "fedmerge"):
        experiment.train(from_dict(tree(place.base, place.data, method, eval={"every": 1})), folder / method)
    return folder


@pytest.mark.parametrize("method", ["fedit", "local", "fedmerge"])
def test_it_trains_and_scores(trained, method):
    check_learned(trained / method)
    found = summary(trained / method)
    assert found["rule"]["mean"] < found["scores"]["mean"]


def test_a_decoder_with_a_head_trains(place, tmp_path):
    found = experiment.train(from_dict(tree(place.decoder, place.data)), tmp_path / "run")
    assert found["scores"]["mean"] > 50
    (config,) = (tmp_path / "run/adapters/ada").glob("adapter_config.json")
    assert json.loads(config.read_text())["modules_to_save"] == ["score"]


def test_numbers_are_predicted(place, tmp_path):
    settings = tree(place.base, place.numbers, rounds=8, task={"name": "regression", "path": str(place.numbers)})
    found = experiment.train(from_dict(settings), tmp_path / "run")
    assert found["scores"]["metric"] == "pearson" and found["scores"]["mean"] > 50
    assert "rule" not in found  # the mean of the numbers is a constant, of which no correlation is defined
    client = llm_fed.load_client(tmp_path / "run/adapters/ada", str(place.base))
    low, high = client.classify(["w1 w2 w3", "w21 w22 w23"]).tolist()
    assert low < high


@pytest.mark.parametrize("metric", every.quick(["f1_macro", "matthews"], ["f1_macro"]))
def test_metrics_by_name(place, tmp_path, metric):
    settings = tree(place.base, place.pairs, task={"name": "classification", "path": str(place.pairs)})
    found = experiment.train(from_dict({**settings, "eval": {"metric": metric}}), tmp_path / "run")
    assert found["scores"]["metric"] == metric and found["scores"]["mean"] > 20


@pytest.mark.parametrize(
    "words, said",
    [
        ({"eval": {"metric": "f1"}}, "f1 is of two labels, and the data have 3; set eval.metric=f1_macro"),
        ({"eval": {"metric": "pearson"}}, "does not fit task.name=classification; set eval.metric=accuracy"),
        ({"eval": {"metric": "rouge1"}}, "does not fit task.name=classification"),
        ({"adapter": None}, "only image models can be trained whole"),
        ({"method": {"name": "fml"}}, "whole image models"),
    ],
)
def test_what_does_not_go_together(place, tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        experiment.train(from_dict({**tree(place.base, place.data), **words}), tmp_path / "run")


def test_a_network_gives_the_same_numbers(place, trained, tmp_path):
    """Of the clients each node sees some alone; the labels are named in the configuration."""
    settings = tree(place.base, place.data, network=NETWORK)
    settings["task"]["labels"] = list(LABELS)
    link = NetworkInProcess(tmp_path, place, settings)
    there = server.train(link.config, tmp_path / "run", link)
    assert there["scores"]["clients"] == summary(trained / "fedit")["scores"]["clients"]


@pytest.mark.parametrize("too_long", ["skip", "cut-end", "cut-start"])
def test_long_texts_are_left_out_or_cut(place, tmp_path, too_long):
    """The base reads 40 tokens, two of which are put around a text."""
    shutil.copytree(place.data, tmp_path / "data")
    long = {"text": " ".join(["w1"] * 20 + ["w2"] * 30), "label": "sport"}
    with (tmp_path / "data/ada/train.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    settings = tree(place.base, tmp_path / "data")
    settings["task"] |= {"too_long": too_long, "validation": 0.0}
    config = from_dict(settings)
    task = tasks.load(config.task, 0)
    base = Sequences.load(config, task, "cpu")
    client = task.clients["ada"]
    data = base.encoding(config, task, "labels", print).data("ada", client, Data())
    lengths = [len(sentence.input_ids) for sentence in data.train]
    assert (max(lengths) == 40, sum(data.left_out.values())) == ((False, 1) if too_long == "skip" else (True, 0))
    kept = next((each.input_ids for each in data.train if len(each.input_ids) == 40), [])
    first, second = (base.tokenizer.convert_tokens_to_ids(word) for word in ("w1", "w2"))
    counts = {"skip": (0, 0), "cut-end": (20, 18), "cut-start": (8, 30)}[too_long]
    assert (kept.count(first), kept.count(second)) == counts
    assert not kept or (kept[0], kept[-1]) == (0, 2)


# Export


@pytest.mark.parametrize("kind", ["roberta", "llama"])
def test_an_export_loads_in_stock_peft_and_predicts_the_same(place, trained, tmp_path, kind):
    run, base = trained / "local", place.base
    if kind == "llama":
        run, base = tmp_path / "run", place.decoder
        experiment.train(from_dict(tree(base, place.data, "local")), run)
    folder = run / "adapters/bob"
    client = llm_fed.load_client(folder, str(base))
    assert client.base.labels == LABELS
    texts = [" ".join(f"w{10 * label + n}" for n in range(2 + label)) for label in range(3)]
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, pad_token_id=tokenizer.pad_token_id)
    stock = PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        if kind == "llama":
            inputs.pop("token_type_ids")
        logits = stock(**inputs).logits
    assert client.classify(texts).tolist() == logits.argmax(-1).tolist()
    assert client.classify([" ".join(["w1"] * 99)]).shape == (1,)  # longer than the base reads
    with pytest.raises(UserError, match="this is a sequence classifier; give it what it classifies with `classify`"):
        client.generate(["w1 w2"])


def test_the_card_says_how_to_use_it(trained, place):
    text = (trained / "local/adapters/bob/README.md").read_text()
    assert "A personal LoRA adapter and head" in text and "pipeline_tag: text-classification" in text
    code = text.partition("```python\n")[2].partition("```")[0]
    code = code.replace("path/to/this/folder", str(trained / "local/adapters/bob"))
    code = code.replace(f"path/to/{place.base.name}", str(place.base)).replace('"a text"', '"w21 w22"')
    seen: list[Any] = []
    exec(code.replace("print(", "seen.append("), {"seen": seen})
    assert seen[0].shape == (1, 3) and int(seen[0].argmax()) == LABELS.index("weather")


def test_an_adapter_that_peft_made_is_read(place, tmp_path):
    """PEFT's own `SEQ_CLS` trains `classifier` whole, which holds two layers here."""
    import peft

    model = AutoModelForSequenceClassification.from_pretrained(place.base, num_labels=3)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
    stock = peft.get_peft_model(model, config).eval()
    stock.save_pretrained(tmp_path / "adapter")
    client = llm_fed.load_client(tmp_path / "adapter", str(place.base), labels=3, kind="sequence-classification")
    inputs = client.base.tokenizer(["w1 w2 w3", "w11 w12 w13"], return_tensors="pt")
    with torch.no_grad():
        assert client.classify(["w1 w2 w3", "w11 w12 w13"]).tolist() == stock(**inputs).logits.argmax(-1).tolist()


def test_eval_scores_an_exported_adapter(place, trained, llm_fed):
    adapter = trained / "local/adapters/ada"
    words = ["eval", "--adapter", adapter, "--base", place.base, "--task", "classification", "--data", place.data]
    said = llm_fed(*words)
    assert said.code == 0, said.err
    without_task = llm_fed("eval", "--adapter", adapter, "--base", place.base, "--data", place.data / "ada/test.jsonl")
    assert without_task.code == 2 and "it is for a sequence classifier; give --task NAME" in without_task.err


def test_a_run_with_other_labels_is_not_continued(place, tmp_path):
    """Three other names: the same heads would mean something else."""
    shutil.copytree(place.data, tmp_path / "data")
    settings = tree(place.base, tmp_path / "data", rounds=1)
    experiment.train(from_dict(settings), tmp_path / "run")
    for file in (tmp_path / "data").rglob("*.jsonl"):
        file.write_text(file.read_text().replace('"sport"', '"zoo"'))
    with pytest.raises(
        UserError, match=r"began with the labels \['sport', .* and the data have \['trade', .*'zoo'\] now"
    ):
        experiment.train(from_dict(settings | {"rounds": 2}), tmp_path / "run")
