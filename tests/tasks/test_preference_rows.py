"""Rows of preferences in every form, as examples and as tokens; and those that cannot be used."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import MARKED, byte_tokenizer
from jsonl import write

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.kinds.encoding import Encoder
from llm_fed.rows import Row
from llm_fed.settings.config import ColumnsConfig, Config, TaskConfig
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.tasks import files
from llm_fed.tasks.common import AnswerPair, Example, Judged
from llm_fed.tasks.examples import Scheme

ASKED, GOOD, BAD = "Which ward for a burn?", "Burns.", "No idea."


def user(text: str = ASKED) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system() -> dict[str, str]:
    return {"role": "system", "content": "Be brief."}


FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "other names": {"instruction": ASKED, "Chosen": GOOD, "REJECTED": BAD},
    "messages": {"prompt": [user()], "chosen": [said(GOOD)], "rejected": [said(BAD)]},
    "messages as text": {"prompt": json.dumps([user()]), "chosen": json.dumps([said(GOOD)]), "rejected": [said(BAD)]},
    "an implicit prompt": {"chosen": [user(), said(GOOD)], "rejected": [user(), said(BAD)]},
    "a prompt beside conversations": {
        "prompt": ASKED, "prompt_id": "7", "messages": [user(), said(GOOD)], "score_chosen": 8.0,
        "chosen": [user(), said(GOOD)], "rejected": [user(), said(BAD)],
    },
    "Anthropic's": {
        "chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {GOOD}", "rejected": f"\n\nHuman: {ASKED}\n\nAssistant: {BAD}",
    },
    "texts that begin alike": {"chosen": f"{ASKED} {GOOD}", "rejected": f"{ASKED} {BAD}"},
    "ShareGPT": {
        "chosen": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": GOOD}],
        "rejected": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": BAD}],
    },
}  # fmt: skip


def load(folder: Path, rows: list[dict[str, Any]], **columns: Any):
    write(folder / "ann.jsonl", rows)
    return files.load(TaskConfig("files", path=str(folder), columns=ColumnsConfig(**columns)), 0)


def encoder(name: str = "dpo", template: str = "chat", **task: Any) -> Encoder:
    config = TaskConfig("files", template=template, **task)
    return Encoder(byte_tokenizer(chat_template=MARKED), Config(task=config, objective=ObjectiveConfig(name)))


def texts_of(pair: AnswerPair) -> list[tuple[str, str]]:
    """Of both answers: all that stands before what is trained, and that."""
    tokenizer, found = byte_tokenizer(), []
    for text in pair.texts:
        start = text.target.index(True)
        trained = [id for id, own in zip(text.input_ids, text.target, strict=True) if own]
        found.append((tokenizer.decode(text.input_ids[:start]), tokenizer.decode(trained)))
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(form, tmp_path):
    data = load(tmp_path, [FORMS[form]] * 2)
    assert data.metric == "preference_accuracy" and data.reading.rows == 2
    lengths = encoder().lengths(data.clients["ann"].train)
    (pair, *_) = encoder().training("ann", "training", data.clients["ann"].train)
    (before, chosen), (_, rejected) = texts_of(pair)
    assert before.endswith(f"{ASKED}</s>|[assistant]") and (chosen, rejected) == (f"{GOOD}</s>", f"{BAD}</s>")
    assert texts_of(pair)[0][0] == texts_of(pair)[1][0]
    assert lengths[0].whole == max(len(text.input_ids) for text in pair.texts)


def test_of_a_conversation_only_what_differs_is_trained(tmp_path):
    before = [{"role": "system", "content": "Be brief."}, user("Hello."), said("Hi."), user()]
    row = {"prompt": before, "chosen": [said(GOOD)], "rejected": [said(BAD)]}
    (example, *_) = load(tmp_path, [row] * 2).clients["ann"].train
    (pair,) = encoder().training("ann", "training", [example])
    (asked, chosen), (also, rejected) = texts_of(pair)
    assert asked == also and "Hi." in asked and (chosen, rejected) == (f"{GOOD}</s>", f"{BAD}</s>")
    found = encoder()
    found.training("ann", "training", [example])
    assert found.note() == ""  # the messages before are none that somebody left out


def test_labels_say_which_answers_are_desirable(tmp_path):
    rows = [{"prompt": ASKED, "completion": text, "label": label} for text, label in ((GOOD, True), (BAD, False))]
    train = load(tmp_path, rows * 2).clients["ann"].train
    assert [example.desirable for example in train] == [True, False, True, False]
    found = encoder("kto", "plain")
    items = found.training("ann", "training", train)
    assert found.note() == "" and found.training("bob", "training", train[::2])
    assert found.note().startswith("all training answers are desirable at 1 of the clients (label true), so that kto")
    assert all(isinstance(item, Judged) for item in items) and [item.desirable for item in items][:2] == [True, False]
    decode = byte_tokenizer().decode
    assert decode(items[1].other.input_ids) == f"{ASKED}\n{GOOD}</s>"  # the answer of the example before it
    assert decode(items[1].text.input_ids) == f"{ASKED}\n{BAD}</s>"


def test_longer_answers_leave_the_pair_out_or_are_cut(tmp_path):
    rows = [{"prompt": "a", "chosen": "b" * 5, "rejected": "c" * length} for length in (5, 50)]
    train = load(tmp_path, rows).clients["ann"].train
    skipping = encoder(template="plain", max_length=20)
    assert len(skipping.training("ann", "training", train)) == 1 and skipping.skipped == {"training": 1}
    cut = encoder(template="plain", max_length=20, too_long="cut-end").training("ann", "training", train)
    assert [[len(text.input_ids) for text in pair.texts] for pair in cut] == [[8, 8], [8, 20]]


def test_pairs_that_are_too_long_to_be_scored_are_told(tmp_path):
    rows = [{"prompt": "a", "chosen": "b" * 5, "rejected": "c" * length} for length in (5, 50)]
    train = load(tmp_path, rows).clients["ann"].train
    asking = encoder(template="plain", max_length=20)
    assert [query.pair is None for query in asking.queries("ann", "test", train)] == [False, True]
    assert "preference_accuracy leaves out 1 examples" in asking.note()
    clean = encoder(template="plain", max_length=20)
    assert clean.queries("ann", "test", train[:1])[0].pair and not clean.note()


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "equal texts": ({"prompt": ASKED, "chosen": GOOD, "rejected": f"{GOOD} "}, "are the same, 'Burns.'"),
    "equal conversations": ({"chosen": [user(), said(GOOD)], "rejected": [user(), said(GOOD)]}, "are the same"),
    "equal implicit": ({"chosen": f"{ASKED} {GOOD}", "rejected": f"{ASKED} {GOOD}"}, "are the same"),
    "empty rejected": ({"prompt": ASKED, "chosen": GOOD, "rejected": " "}, "column 'rejected' is empty"),
    "null chosen": ({"prompt": ASKED, "chosen": None, "rejected": BAD}, "column 'chosen' holds nothing"),
    "empty message": ({"prompt": [user()], "chosen": [said(GOOD)], "rejected": [said("")]}, "needs a role"),
    "no answer behind": ({"chosen": f"{ASKED} {GOOD}", "rejected": f"{ASKED} "}, "the rejected answer is empty"),
    "no common beginning": ({"chosen": GOOD, "rejected": BAD}, "share no beginning"),
    "a shorter conversation": (
        {"chosen": [user(), said(GOOD), user("And?"), said("Rest.")], "rejected": [user(), said(GOOD)]},
        "the rejected answer is empty",
    ),
    "a system text before one": (
        {"chosen": [system(), user(), said(GOOD)], "rejected": [user(), said(BAD)]},
        "behind different prompts; only one has the system's text 'Be brief.'",
    ),
    "rows out of step": ({"chosen": [user(), said(GOOD)], "rejected": [user("And?"), said(BAD)]}, "different prompts"),
    "another prompt in a text": (
        {"chosen": f"\n\nHuman: {ASKED}\n\nAssistant: {GOOD}", "rejected": f"\n\nHuman: And?\n\nAssistant: {BAD}"},
        "different prompts",
    ),
    "more of a system text than the prompt has": (
        {"prompt": [system(), user()], "chosen": [user(), said(GOOD)], "rejected": [system(), user(), said(BAD)]},
        "different prompts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_a_pair_that_prefers_nothing_is_named(fault, tmp_path):
    row, said_of_it = BAD_ROWS[fault]
    good = {key: FORMS["texts" if "prompt" in row else "texts that begin alike"][key] for key in row}
    good = FORMS["an implicit prompt"] if isinstance(row["chosen"], list) and "prompt" not in row else good
    good = FORMS["messages"] if isinstance(row.get("prompt"), list) else good
    with pytest.raises(UserError, match="ann.jsonl, line 3: ") as caught:
        load(tmp_path, [good, good, row])
    assert said_of_it in str(caught.value) and "task.bad_rows=skip" in str(caught.value)
    assert (
        len(load(tmp_path, [good, good]).clients["ann"].train) + len(load(tmp_path, [good, good]).clients["ann"].test)
        == 2
    )


@pytest.mark.parametrize("label", ["maybe", 2, 0.5, "", [True], None])
def test_a_few_labels_that_say_nothing_hide_none_of_the_others(label, tmp_path):
    """The column need not be named: most of its values are true or false."""
    rows = [{"prompt": f"{ASKED} {n}", "completion": GOOD, "label": n % 2 == 0} for n in range(3)]
    with pytest.raises(UserError, match="line 4: column 'label' holds .*true.*task.bad_rows=skip"):
        load(tmp_path, [*rows, {**rows[0], "label": label}])
    assert load(tmp_path, rows).reading.roles["label"] == "label"


@pytest.mark.parametrize("labels", [(0, 1, 2), (4, 5, 1), ("positive", "negative", "true")])
def test_labels_that_are_no_judgement_are_left_alone(labels, tmp_path):
    rows = [{"prompt": f"{ASKED} {n}", "completion": GOOD, "label": label} for n, label in enumerate(labels)]
    assert "label" not in load(tmp_path, rows).reading.roles


def test_one_row_of_another_form_among_pairs_is_the_one_that_is_named(tmp_path):
    pairs = [{"prompt": f"{ASKED} {n}", "chosen": GOOD, "rejected": BAD} for n in range(3)]
    with pytest.raises(UserError, match="line 3: the column 'chosen' is missing"):
        load(tmp_path, [*pairs[:2], {"prompt": ASKED, "completion": GOOD}, pairs[2]])
    both = [{**pair, "response": GOOD} for pair in pairs]  # the chosen one once more
    assert {"chosen", "rejected"} <= load(tmp_path, both).reading.roles.keys()
    assert load(tmp_path, both, answer="response").reading.roles["answer"] == "response"


# Forms in which people keep preferences beside those of TRL.
OTHER_FORMS: dict[str, dict[str, Any]] = {
    "messages in a column of their own": {
        "conversations": [{"from": "human", "value": ASKED}],
        "chosen": {"from": "gpt", "value": GOOD}, "rejected": {"from": "gpt", "value": BAD},
    },
    "an answer once more": {"prompt": ASKED, "response": GOOD, "chosen": GOOD, "rejected": BAD},
    "an answer with its prompt": {"prompt": ASKED, "completion": [user(), said(GOOD)], "label": False},
    "judged messages": {"messages": [user(), said(GOOD)], "label": False},
    "a tag": {"instruction": ASKED, "output": GOOD, "kto_tag": False},
}  # fmt: skip


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms_are_read(form, tmp_path):
    (example, *_) = load(tmp_path, [OTHER_FORMS[form]] * 3).clients["ann"].train
    prompt = example.prompt if isinstance(example.prompt, str) else example.prompt[-1].content
    assert (prompt, example.answers) == (ASKED, (GOOD,))
    if "chosen" in OTHER_FORMS[form]:
        assert example.rejected[-1].content == BAD and len(example.rejected) == 2
    else:
        assert example.desirable is False


def test_an_objective_that_the_data_do_not_fit_is_named_with_file_and_remedy(tmp_path):
    plain = [{"prompt": f"{ASKED} {n}", "completion": GOOD} for n in range(3)]
    train = load(tmp_path, plain).clients["ann"].train
    with pytest.raises(UserError, match=r"ann.jsonl, line [123]: objective.name=dpo.*has no rejected answer.*=sft"):
        encoder("dpo").lengths(train)
    with pytest.raises(UserError, match="objective.name=kto learns from rows with prompt, completion and label"):
        encoder("kto").lengths(train)
    pairs = load(tmp_path, [FORMS["texts"]] * 3).clients["ann"].train
    with pytest.raises(UserError, match="has no label.*objective.name=dpo"):
        encoder("kto").lengths(pairs)


def test_an_example_knows_its_row_wherever_it_went(tmp_path):
    rows = [{"prompt": f"{ASKED} {n}", "completion": GOOD, "label": n != 5} for n in range(8)]
    write(tmp_path / "ann.jsonl", rows)
    client = tasks.load(TaskConfig("files", str(tmp_path), columns=ColumnsConfig(label="label")), 0).clients["ann"]
    found = [each.where for each in (*client.train, *client.test) if not each.desirable]
    assert found == [f"{tmp_path}/ann.jsonl, line 6"]


def test_a_column_of_numbers_reaches_the_examples(tmp_path):
    rows = [{"prompt": f"{ASKED} {n}", "completion": GOOD, "weight": n / 2} for n in range(3)]
    train = load(tmp_path, rows, extra=("weight",)).clients["ann"].train
    items = encoder("sft", "plain").training("ann", "training", train)
    assert sorted(item.extra["weight"] for item in items) == sorted(dict(example.extra)["weight"] for example in train)
    with pytest.raises(UserError, match="line 4.*'weight' holds no finite number, but 'much'"):
        load(tmp_path, [*rows, {**rows[0], "weight": "much"}], extra=("weight",))
    with pytest.raises(UserError, match="task.columns.extra='wait' is not a column"):
        load(tmp_path, rows, extra=("wait",))


WORDS = (
    "Burns.", "No", "  ", "\n", "né", "日本", "<think>", "</s>", "{x}", "[", "\t", "\ud800", "don't", "0", "Human:",
    "\u2028",
)  # fmt: skip


def drawn(draws: random.Random) -> str:
    return "".join(draws.choice(WORDS) + draws.choice((" ", "", "\n")) for _ in range(draws.randint(0, 5)))


def turns_of(example: Example) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Role and text of both conversations."""
    asked = [("user", example.prompt)] if isinstance(example.prompt, str) else [turn[:2] for turn in example.prompt]
    return [*asked, ("assistant", example.answers[0])], [turn[:2] for turn in example.rejected]


def test_texts_and_conversations_of_any_content_are_the_same_pair_or_refused_alike():
    draws, read = random.Random(0), 0
    for _ in range(300):
        asked, good, bad = (drawn(draws) for _ in range(3))
        forms = [
            {"prompt": asked, "chosen": good, "rejected": bad},
            {"prompt": [user(asked)], "chosen": [said(good)], "rejected": [said(bad)]},
            {"chosen": [user(asked), said(good)], "rejected": [user(asked), said(bad)]},
        ]
        pairs = []
        for form in forms:
            scheme, row = Scheme(ColumnsConfig(), "file"), Row("file, line 1", form)
            try:
                scheme.learn([row])
                pairs.append(turns_of(scheme.example(row, "")))
            except UserError as error:
                assert "file, line 1" in str(error)
        assert len(pairs) in (0, 3) and all(pair == pairs[0] for pair in pairs)
        read += bool(pairs)
    assert read > 50
