"""Metrics against numbers worked out by hand, and the summary over clients."""

import math

import pytest
from rouge_score.rouge_scorer import RougeScorer

from llm_fed.basics.errors import UserError
from llm_fed.scoring.scores import METRICS, score, summarize

ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge(*given):
    return {name: score(name, *given) for name in ROUGE}


def test_rouge_by_hand():
    """Prediction: the cat sat. Reference, stemmed: the cat sat down.

    rouge1 and rougeL: 3 of 3 and 3 of 4 words, F1 = 2 * 1 * 3/4 / (7/4) = 6/7.
    rouge2: 2 of 2 and 2 of 3 pairs, F1 = 2 * 1 * 2/3 / (5/3) = 4/5.
    """
    result = rouge(["The cat sat"], [("the cats sat down!",)])
    assert result == pytest.approx({"rouge1": 600 / 7, "rouge2": 80, "rougeL": 600 / 7})


def test_rouge_takes_the_best_reference_of_each_type():
    """a b c against "c b a": 3 of 3 words, no pair, LCS 1.

    Against "a b": words 2/3 and 2/2, pairs 1/2 and 1/1, LCS 2, so F1 4/5, 2/3, 4/5.
    rouge1 = max(1, 4/5); rouge2 = max(0, 2/3); rougeL = max(1/3, 4/5).
    """
    result = rouge(["a b c"], [("c b a", "a b")])
    assert result == pytest.approx({"rouge1": 100, "rouge2": 200 / 3, "rougeL": 80})


def test_rouge_is_the_mean_over_examples():
    assert score("rouge1", ["yes", "no", "no", "maybe"], [("yes",), ("no",), ("yes",), ("yes", "no")]) == 50


def test_rouge_equals_the_stock_scorer():
    predictions = ["Running quickly, the foxes jumped over lazy dogs.", "It is not possible to tell", "1296.65 people"]
    references = [
        ("The quick fox jumps over a lazy dog", "foxes were running"),
        ("it's impossible to tell",),
        ("1296.65 persons per km",),
    ]
    stock = RougeScorer(list(ROUGE), use_stemmer=True)
    best = [stock.score_multi(texts, text) for text, texts in zip(predictions, references, strict=True)]
    expected = {kind: 100 * sum(example[kind].fmeasure for example in best) / 3 for kind in ROUGE}
    assert rouge(predictions, references) == pytest.approx(expected, abs=1e-12)


def test_rouge_of_empty_text_and_of_punctuation_is_zero():
    assert score("rouge1", ["", "", "…"], [("yes",), ("",), ("…",)]) == 0


@pytest.mark.parametrize(
    ("prediction", "references", "right"),
    [
        (" It is  NOT\npossible ", ("it is not possible",), True),
        ("no", ("yes", "No"), True),
        ("E\u0301cole STRASSE", ("\u00e9cole straße",), True),  # e + accent, and ß folds to ss
        ("北京", ("北京",), True),
        ("", ("",), True),
        ("", ("no",), False),
        ("30", ("3.0",), False),
        ("x2", ("x²",), False),
        ("the answer", ("answer",), False),
    ],
)
def test_exact_match(prediction, references, right):
    assert score("exact_match", [prediction, "0"], [references, ("1",)]) == 50 * right


def test_option_accuracy_of_log_likelihoods():
    """Right alone 1, right in a tie of two 1/2, wrong 0, NaN 0, four options all -inf 1/4: 1.75 of 5."""
    nan, inf = math.nan, math.inf
    predictions = [[-1.0, -2.0], [-3.0, -1.0, -1.0], [-1.0, -2.0], [nan, -9.0], [-inf] * 4]
    assert score("option_accuracy", predictions, [0, 2, 1, 0, 3]) == 35


def test_option_accuracy_of_chosen_texts():
    assert score("option_accuracy", ["yes", "no", "No"], [("yes",), ("yes", "no"), ("no",)]) == pytest.approx(200 / 3)


def test_option_accuracy_refuses_an_option_that_does_not_exist():
    with pytest.raises(ValueError, match="number 2, but there are 2 options"):
        score("option_accuracy", [[-1.0, -2.0]], [2])


@pytest.mark.parametrize("metric", [name for name, its in METRICS.items() if its.compute])
def test_every_metric_scores_a_right_answer_with_100(metric):
    right = {
        "labels": ([0, 1], [0, 1]), "values": ([1.0, 2.5, 2.0], [1.0, 2.5, 2.0]), "options": ([[-1.0, -2.0]], [0])
    }.get(METRICS[metric].scores, (["it is true"], [("it is true",)]))  # fmt: skip
    assert score(metric, *right) == pytest.approx(100)


def test_an_unknown_metric_names_the_closest():
    with pytest.raises(UserError, match="metric='rogue1' is unknown .the closest is 'rouge1'"):
        score("rogue1", ["a"], [("a",)])


def test_nothing_to_score():
    with pytest.raises(UserError, match="no predictions"):
        score("rouge1", [], [])
    with pytest.raises(UserError, match="Example 1 has no reference"):
        score("exact_match", ["a", "b"], [("a",), ()])
    with pytest.raises(ValueError, match="2 predictions but 1 references"):
        score("exact_match", ["a", "b"], [("a",)])


def test_a_failed_score_does_not_touch_the_next():
    with pytest.raises(ValueError):
        score("option_accuracy", [[-1.0], "no"], [0, 0])
    assert score("option_accuracy", ["no"], [("no",)]) == 100


def test_summary_by_hand():
    """10, 40, 20: mean 70/3, variance (1600 + 2500 + 100) / 9 / 3 = 4200/27, worst half (10 + 20) / 2."""
    summary = summarize("rouge1", {"a": 10.0, "b": 40.0, "c": 20.0})
    assert (summary.mean, summary.std, summary.worst_half) == pytest.approx((70 / 3, math.sqrt(4200 / 27), 15))
    assert list(summary.as_json()) == ["metric", "clients", "mean", "std", "worst_half", "loss", "losses"]
    assert (summary.loss, summary.losses) == (None, {})
    assert summary.as_json()["clients"] == {"a": 10.0, "b": 40.0, "c": 20.0}


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_the_mean_loss_is_that_of_clients_who_have_one_and_absent_where_one_diverged(bad):
    scores = {"a": 10.0, "b": 40.0, "c": 20.0}
    found = summarize("rouge1", scores, {"a": 1.0, "c": 2.0})
    assert (found.loss, found.losses) == (1.5, {"a": 1.0, "c": 2.0})
    found = summarize("rouge1", scores, {"a": 1.0, "c": bad})
    assert (found.loss, found.losses) == (None, {"a": 1.0, "c": None})


def test_summary_of_one_client_and_of_none():
    one = summarize("rouge1", {"a": 7.5})
    assert (one.mean, one.std, one.worst_half) == (7.5, 0, 7.5)
    with pytest.raises(UserError, match="No client has a rouge1 score"):
        summarize("rouge1", {})


def test_summary_does_not_depend_on_the_order_of_clients():
    clients = {f"client-{number}": 100 * math.sin(number) ** 2 for number in range(101)}
    forth, back = summarize("rouge1", clients), summarize("rouge1", dict(reversed(clients.items())))
    assert (forth.mean, forth.std, forth.worst_half) == (back.mean, back.std, back.worst_half)
