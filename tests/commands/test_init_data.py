"""What `llm-fed init` finds out of the data: who the clients are, the largest length, labels, how much to train."""

import json
import math
import random
from pathlib import Path
from typing import Any

import classifiers
import huggingface_hub
import pytest
import yaml
from classifiers import LABELS, federation, written
from hypothesis import given
from hypothesis import strategies as st

from llm_fed import tasks
from llm_fed.commands import init, known_base
from llm_fed.commands.init import ROUNDS, STEPS, Workload
from llm_fed.commands.survey import FAR_OF_FEW, LengthLimits, limits, usual_length
from llm_fed.rows import file_rows, owners
from llm_fed.settings import configfile

# The column that names the client of a row


DESKS = ("bank", "hotel", "clinic", "library", "phone shop")


def write(path: Path, count: int, **columns: Any) -> Path:
    """Rows with a question, an answer and these columns, each a function of the row's number."""
    rows = [
        {"question": f"w{n} w{n % 7}?", "answer": f"w{n % 11} w{n % 3}"}
        | {name: value(n) for name, value in columns.items()}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found(path: Path) -> str | None:
    clients = owners.find([file_rows(path)], ("question", "answer"))
    return clients and clients[0]


@pytest.mark.parametrize("folder", [False, True])
def test_desk_has_five_values_in_540_rows(small, llm_fed, tmp_path, folder):
    (tmp_path / "rows").mkdir()
    path = write(tmp_path / "rows" / "all.jsonl", 540, desk=lambda n: DESKS[n // 108], note=lambda n: f"note {n}")
    path = path.parent if folder else path
    said = llm_fed("init", path, "--base", small.base, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and "by the column desk (5 values); --client chooses another" in said.out
    assert configfile.load(tmp_path / "c.yaml").task.columns.client == "desk"


@pytest.mark.parametrize(
    "name",
    ["hospital", "hospital_id", "HospitalName", "Site ID", "store", "branch", "user_id", "userName", "Filiale",
     "department", "clinics", "医院名称", "office location"],
)  # fmt: skip
def test_names_of_holders_are_plain(tmp_path, name):
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": f"a{n % 9}", name: f"x{n % 4}"}) + "\n"
                            for n in range(80)))  # fmt: skip
    assert found(path) == name


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", ("yes", "no")), ("category", ("loans", "cards")), ("split", ("train", "test")),
        ("language", ("de", "fr")), ("lang", ("de", "fr")), ("year", (2019, 2020)), ("rating", (1, 2, 3, 4, 5)),
        ("user_type", ("gold", "basic")), ("customer_sentiment", ("good", "bad")), ("difficulty", ("easy", "hard")),
        ("verified", (True, False)), ("amount", (0.5, 1.5)), ("kind_of_text", ("a", "b")), ("colour", ("red", "blue")),
        ("speaker", ("user", "assistant")), ("number", (3, 4)),
    ],
)  # fmt: skip
def test_properties_of_rows_are_not_taken(small, llm_fed, tmp_path, name, values):
    path = tmp_path / "all.jsonl"
    draw = random.Random(name)
    path.write_text("".join(json.dumps({"question": f"q{n}", "answer": f"a{n % 9}", name: draw.choice(values)}) + "\n"
                            for n in range(80)))  # fmt: skip
    assert found(path) is None
    said = llm_fed("init", path, "--base", small.base, "--out", tmp_path / "c.yaml")
    said.assert_refused("no column names the clients", "--client COLUMN, or --clients N")


def test_a_field_within_a_column_may_be_the_one(small, llm_fed, tmp_path):
    path = write(tmp_path / "all.jsonl", 90, ticket=lambda n: {"desk": DESKS[n % 3], "number": n})
    assert llm_fed("init", path, "--base", small.base, "--out", tmp_path / "c.yaml").code == 0
    config = configfile.load(tmp_path / "c.yaml")
    assert config.task.columns.client == "ticket.desk" and len(tasks.load(config.task, 0).clients) == 3


def test_columns_with_many_values_or_gaps_are_no_clients(tmp_path):
    path = write(
        tmp_path / "all.jsonl", 60, user_id=lambda n: n, clinic=lambda n: f"c{n % 3}" if n % 5 == 0 else None,
        store=lambda n: "only one", desk=lambda n: ["a", "b"], note=lambda n: "long " * 30 + str(n % 2),
    )  # fmt: skip
    assert found(path) is None


# The largest length: no single row sets it, and whoever loses rows by it is named


def limited(context: int, *wholes: int, **clients: list[int]) -> LengthLimits:
    own = {"a": [*wholes]} | clients
    return limits({name: [(whole, whole // 2) for whole in its] for name, its in own.items()}, context)


def test_room_for_the_longest_that_is_not_far_out():
    assert usual_length([10] * 99 + [15]) == 15
    assert usual_length([100] * 99 + [900]) == 100
    assert usual_length([100] * 99 + [140]) == 140
    assert usual_length([5]) == 5 and usual_length([20, 60]) == 60


@pytest.mark.parametrize("rows", [2, 5, 9, 10, 15, 50, 300])
def test_one_row_that_is_120_times_too_long(rows):
    draw = random.Random(rows)
    usual = sorted(draw.randint(30, 45) for _ in range(rows - 1))
    assert usual_length([*usual, 5400]) == usual[-1]
    assert usual_length([*usual, usual[-1]]) == usual[-1]


def test_lengths_that_vary_much_are_not_far_out():
    draw = random.Random(0)
    values = sorted(round(draw.lognormvariate(4, 1)) for _ in range(2000))
    kept = usual_length(values)
    assert sum(value > kept for value in values) <= 0.01 * len(values)
    assert usual_length([20] * 50 + [400] * 50) == 400


@given(st.lists(st.integers(1, 9000), min_size=1))
def test_about_a_tenth_of_the_rows_is_longer_at_most(values):
    """Of few rows one may be, and only if it is ten times as long as others."""
    kept = usual_length(sorted(values))
    longer = sum(value > kept for value in values)
    assert kept in values and longer <= math.ceil(0.11 * len(values))
    assert longer == 0 or len(values) >= 10 or max(values) > FAR_OF_FEW * min(values)


def test_a_client_of_long_examples_raises_the_length_or_is_named():
    usual = {f"c{n}": [40] * 50 for n in range(20)}
    for context, more, expected in (
        (4096, {"long": [900] * 8}, (928, {})),
        (512, {"long": [900] * 8}, (512, {"long": 8})),
        (8192, {"tiny": [40, 5000]}, (64, {"tiny": 1})),
    ):
        found = limited(context, **usual, **more)
        assert (found.longest, found.skipped) == expected


def test_answers_that_are_skipped_do_not_count():
    found = limited(8192, *[40] * 14, 5400)
    assert (found.longest, found.answer, found.skipped) == (64, 32, {"a": 1})


@pytest.mark.parametrize("times", [120, 1])
def test_on_the_command_line(small, llm_fed, tmp_path, times):
    """One row in fifteen is 120 times too long; the twin is clean."""
    for client in ("north", "south"):
        rows = [{"prompt": f"w2{n % 10} w4", "output": f"w{n % 9} w3 w5"} for n in range(15)]
        rows[7]["output"] = " ".join(["w3"] * 4 * (times if client == "south" else 1))
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / f"d/{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = llm_fed("init", tmp_path / "d", "--base", small.base, "--out", tmp_path / "c.yaml")
    config = configfile.load(tmp_path / "c.yaml")
    assert said.code == 0 and (config.task.max_length, config.eval.max_new_tokens) == (32, 32)
    told = "1 of 30 examples are longer than task.max_length=32 and will be skipped: 1 of south"
    assert (told in said.out) == (times > 1) and ("longer than" in said.out) == (times > 1)


def test_a_client_that_would_lose_its_examples_is_named(small, llm_fed, tmp_path):
    """The context of this base is 128; half of the examples of `south` are longer."""
    (tmp_path / "d").mkdir()
    for client, times in (("north", 1), ("south", 200)):
        rows = [{"prompt": " ".join(["w2"] * (1 + n % 5) * times), "output": f"w{n % 9} w3 w5"} for n in range(20)]
        (tmp_path / f"d/{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = llm_fed("init", tmp_path / "d", "--base", small.base, "--out", tmp_path / "c.yaml")
    context = configfile.load(tmp_path / "c.yaml").task.max_length
    assert f"20 of 40 examples are longer than task.max_length={context} and will be skipped: 20 of south" in said.out
    assert "task.too_long=cut-start keeps the ends of their prompts" in said.out


# Labelled texts under an encoder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("base") / "roberta", "roberta")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_it_sees_labels(base, tmp_path, llm_fed):
    said = llm_fed("init", federation(tmp_path / "shops"), "--base", base, "--out", tmp_path / "shops.yaml")
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


# How much to train: it follows the data, and the comparison with `local` is at equal work


@pytest.mark.parametrize(
    ("clients", "examples", "rounds", "steps"), [(3, 14, 5, 4), (5, 58, 10, 8), (8, 216, 14, 20), (1, 72_000, 50, 40)]
)
def test_of_federations_of_every_size(clients, examples, rounds, steps):
    """Training examples, of which a batch has four. Of 58: a pass has 14.5 steps, half of one is 8; five passes are
    72.5 steps, in 10 rounds."""
    found = Workload.of([examples] * clients, 5, 4)
    assert (found.rounds, found.steps) == (rounds, steps)


def test_two_hundred_clients_of_fourteen_examples_are_not_drilled():
    assert Workload.of([14] * 200, init.PASSES, init.BATCH).passes < 15


sizes = st.lists(st.integers(1, 200_000), min_size=1, max_size=350)


@given(sizes, st.sampled_from([(init.PASSES, init.BATCH), (init.LABEL_PASSES, init.LABEL_BATCH)]))
def test_within_limits(sizes, goal):
    found = Workload.of(sizes, *goal)
    assert ROUNDS[0] <= found.rounds <= ROUNDS[1] and STEPS[0] <= found.steps <= STEPS[1]


def test_what_is_compared_takes_the_rounds_and_steps_of_the_file():
    def rows(method: str, clients: int) -> dict[str, list[str]]:
        return init._rows(method, Workload.of([72] * clients, init.PASSES, init.BATCH))

    assert rows("fedlora", 5) == {"local": ["method=local"], "fedlora": []}
    assert rows("local", 5) == {"local": [], **{name: [f"method={name}"] for name in ("fedit", "fedlora", "fedalt")}}
    assert rows("local", 1) == {}


# Whom it names, and how long it waits for the Hub


def sized(folder: Path, **sizes: int) -> Path:
    folder.mkdir()
    for client, count in sizes.items():
        rows = [{"question": f"w2{n} w{n % 7} {client}", "answer": f"w{n % 9} w3"} for n in range(count)]
        (folder / f"{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch):
    """What the Hub does when it is asked for a model."""

    def set(answer):
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: answer())

    return set


@pytest.fixture
def asked(monkeypatch):
    """What was read of bases: whether from this machine alone."""
    found: list[bool] = []
    answer = known_base.KnownBase(problem="-")
    monkeypatch.setattr(known_base, "_read", lambda name, id, local: found.append(local) or answer)
    return found


def test_a_hub_that_cannot_be_reached_is_asked_once(llm_fed, tmp_path, online, hub, asked):
    data = sized(tmp_path / "d", north=30, south=30)

    def refuse():
        raise OSError("Name or service not known")

    hub(refuse)
    said = llm_fed("init", data, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and asked == [True]
    assert "looking up Qwen/Qwen3-0.6B on the Hub" in said.err and "--base FOLDER needs no network" in said.err
    assert "https://huggingface.co cannot be reached (Name or service not known)" in said.out
    text = (tmp_path / "c.yaml").read_text()
    assert "template: chat" in text and "max_length" not in text


def test_a_hub_that_answers_is_read_from(online, hub, asked):
    hub(lambda: None)
    lines: list[str] = []
    assert known_base.look_up("a/b", lines.append).problem == "-"
    assert asked == [True, False] and len(lines) == 1


def test_offline_the_hub_is_not_asked(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub(lambda: pytest.fail("it was asked"))
    assert "HF_HUB_OFFLINE is set" in known_base.look_up("a/b", pytest.fail).problem


def test_a_folder_needs_no_hub(small, hub):
    hub(lambda: pytest.fail("it was asked"))
    assert known_base.look_up(str(small.base), pytest.fail).config is not None


@pytest.mark.parametrize("sizes", [{"north": 40}, {"north": 40, "south": 40}])
def test_a_federation_of_one_client_is_named(small, llm_fed, tmp_path, sizes):
    data = sized(tmp_path / "d", **sizes)
    told = "there is only one client, north, so nothing is federated"
    said = llm_fed("init", data, "--base", small.base, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and (told in said.out) == (len(sizes) == 1)
    assert "method: {name: local}" in (tmp_path / "c.yaml").read_text()
    assert ("compare" in said.out) == (len(sizes) > 1)
    ran = llm_fed("run", tmp_path / "c.yaml", "--dry-run")
    assert ran.code == 0 and (told in ran.err) == (len(sizes) == 1)


@pytest.mark.parametrize("count", [1, 20])
def test_a_client_of_one_example_is_named(small, llm_fed, tmp_path, count):
    data = sized(tmp_path / "d", north=20, south=20)
    for client in ("north", "south"):
        (data / f"{client}.jsonl").rename(data / f"{client}-train.jsonl")
        (data / f"{client}-test.jsonl").write_text('{"question": "w1 w1", "answer": "w2"}\n')
    kept = (data / "south-train.jsonl").read_text().splitlines(keepends=True)[:count]
    (data / "south-train.jsonl").write_text("".join(kept))
    said = llm_fed("init", data, "--base", small.base, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and ("south (1) has fewer than" in said.out) == (count == 1)
    ran = llm_fed("run", tmp_path / "c.yaml", "--dry-run")
    assert ran.code == 0 and ("train on a single example (1 of 2): south" in ran.err) == (count == 1)
