"""Runs on texts without prompts: they are learned as they stand, and scored by how likely they are."""

import json
import math

import pytest

from llm_fed.commands.evaluate import evaluate_run


def test_a_folder_of_texts_from_init_to_scores(small, llm_fed, tmp_path):
    """The test score is 100 exp(-loss), also when it is taken anew; a text that is too long is left out everywhere."""
    for client, words in (("ada", "w4 w5"), ("bob", "w7 w8")):
        (tmp_path / "texts" / client).mkdir(parents=True)
        for number in range(10):
            longer = " w9" * 200 if number == 3 else ""
            (tmp_path / "texts" / client / f"{number}.txt").write_text(f"w{20 + number} {words}{longer}\n")
    config = tmp_path / "c.yaml"
    said = llm_fed("init", tmp_path / "texts", "--base", small.base, "--method", "fedit", "--out", config)
    assert "text = text" in said.out and "scored by token_likelihood (100 / perplexity)" in said.out, said
    words = ["rounds=2", "local.steps=3", "base.dtype=float32", "device=cpu", "task.max_length=32"]
    ran = llm_fed("run", config, *words, "--out", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    scores = json.loads(ran.out)["scores"]
    assert scores["metric"] == "token_likelihood" and "learned without" not in ran.err
    for client, score in scores["clients"].items():
        assert score == pytest.approx(100 * math.exp(-scores["losses"][client]), rel=1e-4)
    again = evaluate_run(tmp_path / "run")["scores"]["clients"]
    assert again == {client: pytest.approx(score, rel=1e-5) for client, score in scores["clients"].items()}
    assert not (tmp_path / "run/samples.jsonl").exists() and (tmp_path / "run/report.html").exists()
    refused = llm_fed("run", config, *words, "eval.metric=rouge1", "--out", tmp_path / "other")
    refused.assert_refused("the data are texts without prompts; set eval.metric=token_likelihood")
    plain = llm_fed("run", config, *words, "task.template=plain", "--dry-run")
    assert "texts are learned without task.template=plain" in plain.err
