"""The best rule that trains nothing: data on which each of the rules wins, ties, and what a rule may see."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm_fed.scoring import rules
from llm_fed.scoring.rules import NAMES, best_rule, listed
from llm_fed.scoring.scores import METRICS, summarize
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks import load
from llm_fed.tasks.common import Example, Picture, Turn

TEXT = [name for name, metric in METRICS.items() if metric.scores == "texts" and not metric.one_option]


def flan(question: str, *options: str, right: str) -> Example:
    """As Flan lists its options."""
    return Example(f"{question}\nOPTIONS:\n" + "\n".join(f"- {option}" for option in options), (right,))


def chosen(*options: str, right: str) -> Example:
    """As a column of options gives them."""
    return Example("which?", (right,), options)


def picture(label: int) -> Picture:
    return Picture(torch.zeros(1, 1, 1, dtype=torch.uint8), label, "")


# By the rule that wins: training and test examples, the metric, and the score on the test examples.
def pair(chosen: str, rejected: str) -> Example:
    return Example("q", (chosen,), rejected=(Turn("assistant", rejected),))


WINS = {
    "most frequent answer": (
        [Example(f"q{n}", (answer,)) for n, answer in enumerate(["red", "blue", "blue", "green"])],
        [Example("q", ("blue",)), Example("r", ("red",))], "exact_match", 50.0,
    ),
    "first option": (
        [flan("q", f"a{n}", f"b{n}", right=f"a{n}") for n in range(4)],
        [flan("q", "x", "y", right="x"), flan("q", "x", "y", right="y")], "exact_match", 50.0,
    ),
    "most frequent position": (
        [flan("q", f"a{n}", f"b{n}", f"c{n}", right=f"b{n}") for n in range(4)],
        [flan("q", "x", "y", "z", right="y")], "exact_match", 100.0,
    ),
    # Two options that share no word, one of them right: precision 1/2, recall 1, F1 2/3; in halves each right.
    "all options": (
        [flan("q", f"a{n}", f"b{n}", right=f"{'ab'[n % 2]}{n}") for n in range(4)],
        [flan("q", "x", "y", right="y")], "rouge1", 200 / 3,
    ),
    "copy of the prompt": (
        [Example(f"one two {n}", (f"One, two: {n}!",)) for n in range(4)],
        [Example("three four", ("three, four.",))], "rouge1", 100.0,
    ),
    "last paragraph of the prompt": (
        [Example(f"Repeat this.\n\nthe text {n}", (f"the text {n}",)) for n in range(4)],
        [Example("Repeat this.\n\nanother", ("another",))], "exact_match", 100.0,
    ),
    "most frequent class": ([picture(n) for n in (0, 2, 2, 1)], [picture(2), picture(0)], "accuracy", 50.0),
    # Always 1 has F1 = 2/3 on the test, always 0 has 0; the correlation of a constant is not defined.
    "one class for all": ([picture(n) for n in (0, 0, 0, 1)], [picture(1), picture(0)], "f1", 200 / 3),
    "mean of the numbers": (
        [SimpleNamespace(label=n) for n in (1.0, 2.0, 4.0)], [SimpleNamespace(label=n) for n in (1.0, 3.0)],
        "pearson", math.nan,
    ),
    "longer answer": ([pair("a long one", "short")] * 3, [pair("longer", "long"), pair("a", "b")],
                      "preference_accuracy", 75.0),
    "shorter answer": ([pair("short", "a long one")] * 3, [pair("long", "longer")], "preference_accuracy", 100.0),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_data_on_which_each_rule_wins(name):
    train, test, metric, score = WINS[name]
    found = best_rule(train, test, metric)
    assert found is not None and (found.name, found.score) == (name, pytest.approx(score, nan_ok=True))


@pytest.mark.parametrize("metric", ["option_accuracy", "commonsense_accuracy"])
def test_where_one_option_is_to_be_named_a_rule_names_one(metric):
    """The words of commonsense end in the answer that its metric reads; all options, or a copy, name several."""

    def each(*numbers: int, count: int = 3) -> list[Example]:
        options = [f"the correct answer is answer{n}" for n in range(1, count + 1)]
        return [Example(f"q\n\nAnswer format: answer1/answer2/answer3 {n}", (options[n - 1],), tuple(options))
                for n in numbers]  # fmt: skip

    train, test = each(2, 2, 3, 1), each(2, 1)
    assert set(rules.rules_of(train, metric)) == {"most frequent answer", "first option", "most frequent position"}
    found = best_rule(train, test, metric)
    assert found is not None and (found.name, found.score) == ("most frequent answer", 50.0)


def test_commonsense_answers_without_options():
    """Where no column gives them, only the most frequent answer is sure to name one."""
    train = [Example("q?", (f"the correct answer is answer{n}",)) for n in (1, 2, 2)]
    found = best_rule(train, train[1:2], "commonsense_accuracy")
    assert found is not None and (found.name, found.score) == ("most frequent answer", 100.0)


def test_options_that_are_scored():
    """The text `no` is right most often, wherever it stands. A text that was right once says nothing of others: there
    the first option wins, or the place."""
    by_text = [chosen("yes", "no", right="no"), chosen("no", "yes", right="no"), chosen("yes", "no", right="yes")]
    found = best_rule(by_text, [chosen("no", "yes", right="no")], "option_accuracy")
    assert found is not None and (found.name, found.score) == ("most frequent answer", 100.0)
    first = [chosen(f"a{n}", f"b{n}", right=f"a{n}") for n in range(4)]
    found = best_rule(first, [chosen("x", "y", right="x")], "option_accuracy")
    assert found is not None and (found.name, found.score) == (
        "most frequent answer",
        100.0,
    )  # a tie with `first option`
    second = [chosen(f"a{n}", f"b{n}", right=f"b{n}") for n in range(9)]
    found = best_rule([*second, chosen("a", "b", right="a")], [chosen("x", "y", right="y")], "option_accuracy")
    assert found is not None and (found.name, found.score) == ("most frequent position", 100.0)
    fewer = best_rule([chosen("a", "b", "c", right="c")], [chosen("x", "y", right="x")], "option_accuracy")
    assert fewer is not None and fewer.score == 100.0  # no third one: of equal counts the first


def test_conversations():
    """Copied is the last text of the user; the most frequent answer is that of the last turn."""

    def talk(last: str, answer: str) -> Example:
        before = (Turn("system", "Be kind."), Turn("user", "hello there"), Turn("assistant", "yes"), Turn("user", last))
        return Example(before, (answer,))

    copied = best_rule([talk(f"say {n}", f"say {n}") for n in range(3)], [talk("a b", "a b")], "exact_match")
    assert copied is not None and (copied.name, copied.score) == ("copy of the prompt", 100.0)
    frequent = best_rule([talk(f"say {n}", "fine") for n in range(3)], [talk("a", "fine")], "exact_match")
    assert frequent is not None and (frequent.name, frequent.score) == ("most frequent answer", 100.0)


def test_a_rule_is_chosen_on_the_training_answers():
    """Although another one would be better on the test examples."""
    train = [flan("q", f"a{n}", f"b{n}", right=f"a{n}") for n in range(4)]
    found = best_rule(train, [flan("q", "x", "y", right="y")], "exact_match")
    assert found is not None and (found.name, found.score) == ("first option", 0.0)


def test_ties_go_to_the_first_rule_and_the_first_answer():
    train = [Example("a", ("red",)), Example("b", ("blue",))]
    found = best_rule(train, [Example("c", ("green",))], "exact_match")  # nothing is ever right
    assert found is not None and (found.name, found.score) == ("most frequent answer", 0.0)
    assert best_rule([], train, "exact_match") is best_rule(train, [], "exact_match") is None


def test_sorted_data_do_not_mislead():
    """A file sorted by answers: what is right at its beginning is not what is right most often."""
    train = [Example(f"q{n}", ("rare",)) for n in range(100)] + [Example(f"word{n}", (f"word{n}",)) for n in range(300)]
    found = best_rule(train, [Example("new", ("new",))], "exact_match")
    assert found is not None and (found.name, found.score) == ("copy of the prompt", 100.0)


@pytest.mark.parametrize(("prompt", "options"), [
    ("Is it?\nOPTIONS:\n- yes\n- no", ["yes", "no"]),
    ("Is it?\n\nOptions:\n * it is so \n * it is not\nAnswer:", ["it is so", "it is not"]),
    ("Choose from the options: yes, no, or maybe.", ["yes", "no", "maybe"]),
    ("Choices: 'good' | 'bad'\nText: fine", ["good", "bad"]),
    ("Options: yes or no", ["yes", "no"]),
    ("What melts? (A) ice (B) iron (C) sand", ["ice", "iron", "sand"]),
    ("What melts?\nA. ice\nB. iron\nAnswer:", ["ice", "iron"]),
    ("What melts?\n1) ice\n2) iron\n3) sand", ["ice", "iron", "sand"]),
    ("(1) read (2) this\n\n(a) one, (b) two", ["one", "two"]),
    ("I. Newton met A. Einstein.", []),
    ("The options are open.", []),
    ("Options:", []),
    ("(A) alone", []),
    ("", []),
])  # fmt: skip
def test_options_in_a_prompt(prompt, options):
    assert [*listed(prompt)] == options


examples = st.builds(
    Example,
    st.one_of(
        st.text(max_size=40),
        st.sampled_from(["(A) x (B) y", "q\nOPTIONS:\n- x\n- y", "Options: a, b", "(1) (2) (3) "]),
        st.lists(st.builds(Turn, st.sampled_from(["user", "assistant", "system"]), st.text(max_size=9))).map(tuple),
    ),
    st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=2).map(tuple),
    st.lists(st.text(max_size=5), max_size=3).map(tuple),
)


@given(st.lists(examples, max_size=8), st.lists(examples, max_size=4), st.sampled_from([*TEXT, "option_accuracy"]))
def test_any_text_has_a_rule(train, test, metric):
    """Whatever the texts are: a known name, a score from 0 to 100, the same again, and none without examples."""
    found = best_rule(train, test, metric)
    if not train or not test:
        assert found is None
        return
    assert found is not None and found.name in NAMES and 0 <= found.score <= 100
    assert best_rule(train, test, metric) == found


@pytest.mark.skipif("LLM_FED_DATA" not in os.environ, reason="LLM_FED_DATA names no folder with Flan")
def test_flan():
    """Of eight tasks, five list options whose joined text shares a word with every answer."""
    path = Path(os.environ["LLM_FED_DATA"]) / "flan" / "dataset1"
    if not path.is_dir():
        pytest.skip(f"{path} is absent")
    data = load(TaskConfig(name="flan", path=str(path)), 0)
    found = {id: best_rule(client.train, client.test, "rouge1") for id, client in data.clients.items()}
    summary = summarize("rouge1", {id: rule.score for id, rule in found.items() if rule})
    assert (summary.mean, summary.worst_half) == (pytest.approx(57.9, abs=0.1), pytest.approx(44.8, abs=0.1))
    assert sum(rule.name == "all options" for rule in found.values() if rule) == 5
