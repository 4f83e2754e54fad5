"""Clients that lack test, training or validation examples: who trains, who is scored, who is left out, and where it is
said. Each case has a twin with whole clients, in which nothing is said."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import without
from small_run import Small
from uneven import WHOLE, rows, write

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.commands import api
from llm_fed.runs.records import read_records
from llm_fed.scoring.scores import NOT_SCORED

ONLY_TRAIN = {"train": 3, "validation": 1}
ONLY_TEST = {"test": 3}
UNSCORED = "these clients have no test example, so they train and are not scored"


@pytest.fixture(scope="module", autouse=True)
def quick_reports() -> Iterator[None]:
    """Each kind of picture is drawn here, too, as scores are missing."""
    with pytest.MonkeyPatch.context() as patch:
        without.pictures(patch, drawn_first=True)
        yield


def config(small: Small, folder: Path, clients: dict[str, Any], **changes: Any) -> Path:
    """The configuration file of a federation of these clients."""
    data = write(folder / "data", clients)
    changes = {"rounds": 1, **changes}
    return small.config(folder / "c.yaml", **{**changes, "task": {"path": str(data), **changes.get("task", {})}})


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def row_of(table: str, client: str) -> list[str]:
    (row,) = [row for line in table.splitlines() if (row := line.replace("|", " ").split())[:1] == [client]]
    return row[1:]


def test_clients_without_test_examples_train_and_are_marked_wherever_scores_are(small, tmp_path, llm_fed):
    """Two of four: one line names both; the others' means are those over the two that are scored."""
    clients = {"ada": WHOLE, "bob": WHOLE, "cyd": ONLY_TRAIN, "dan": {"train": 1}}
    path, run = config(small, tmp_path, clients, method={"name": "local"}), tmp_path / "run"
    said = llm_fed("run", path, "--out", run)
    assert said.code == 0 and said.err.count("these clients") == 1
    assert f"{UNSCORED} (2 of 4): cyd, dan\n" in said.err
    assert [row_of(said.out, client) for client in ("cyd", "dan")] == [["-"] * 3] * 2 and NOT_SCORED in said.out
    found = summary(run)["scores"]
    assert set(found["clients"]) == {"ada", "bob"} == set(found["losses"]) and found["unscored"] == ["cyd", "dan"]
    assert found["mean"] == fmean(found["clients"].values())
    (score,) = [line for line in read_records(run / "metrics.jsonl") if line.get("split") == "test" and line["round"]]
    assert score["unscored"] == ["cyd", "dan"]
    (validation,) = [
        line for line in read_records(run / "metrics.jsonl") if line.get("split") == "validation" and line["round"]
    ]
    assert set(validation["clients"]) == {"ada", "bob", "cyd"} and validation["unscored"] == ["dan"]
    assert {path.name for path in (run / "adapters").iterdir()} == set(clients)
    card = (run / "adapters/dan/README.md").read_text()
    assert "It has none, as the client has no test example." in card and "| metric |" not in card
    assert "| rouge1 |" in (run / "adapters/ada/README.md").read_text()
    report = (run / "report.html").read_text()
    assert "These are cyd, dan." in report and "–: the client has no example to be scored on" in report
    result = api.open_run(run)
    assert set(result.scores) == {"ada", "bob"} and set(result.adapters) == set(clients)

    again = llm_fed("eval", run)
    assert row_of(again.out, "dan") == ["-"] * 3 and NOT_SCORED in again.out
    scores = json.loads(llm_fed("eval", run, "--json").out)
    assert scores["unscored"] == ["cyd", "dan"] and scores["clients"] == found["clients"]
    on_validation = json.loads(llm_fed("eval", run, "--split", "validation", "--json").out)
    assert on_validation["unscored"] == ["dan"]
    cross = json.loads(llm_fed("eval", run, "--cross", "--json").out)
    assert (cross["clients"], cross["unscored"]) == (["ada", "bob"], ["cyd", "dan"])
    assert "not in the table: cyd, dan" in llm_fed("eval", run, "--cross").out
    assert llm_fed("export", run, tmp_path / "out").code == 0 and (tmp_path / "out/dan").is_dir()
    assert llm_fed("audit", run, "--all").code == 0


def test_whole_clients_are_no_matter_for_words(small, tmp_path, llm_fed):
    said = llm_fed("run", config(small, tmp_path, {"ada": WHOLE, "bob": WHOLE}), "--out", tmp_path / "run")
    assert "these clients" not in said.err and NOT_SCORED not in said.out
    files = [tmp_path / "run" / name for name in ("summary.json", "metrics.jsonl", "report.html")]
    assert not any("scored" in path.read_text() for path in files[:2]) and "These are" not in files[2].read_text()


def test_of_one_example_nothing_is_held_out(small, tmp_path, llm_fed):
    """Where the data has no test split, a client needs two examples to have one."""
    said = llm_fed("run", config(small, tmp_path, {"ada": 8, "bob": 2, "cyd": 1, "dan": 1}), "--out", tmp_path / "run")
    assert said.code == 0 and f"{UNSCORED} (2 of 4): cyd, dan\n" in said.err
    sizes = {line["client"]: line["examples"] for line in api.open_run(tmp_path / "run").records if "examples" in line}
    assert 4 <= sizes.pop("ada") <= 7 and sizes == {"bob": 1, "cyd": 1, "dan": 1}  # a hash decides
    init = llm_fed("init", tmp_path / "data", "--base", small.base, "--out", tmp_path / "i.yaml")
    assert init.code == 0 and f"{UNSCORED} (2 of 4): cyd, dan" in init.out


def test_a_federation_in_which_nobody_is_scored_trains_and_exports(small, tmp_path, llm_fed):
    path = config(small, tmp_path, {"ada": 1, "bob": 1})
    said = llm_fed("run", path, "--out", tmp_path / "run")
    assert said.code == 0 and said.err.count("no client has a test example: all train, none is scored") == 1
    assert "There are no scores" in said.out and "mean" not in summary(tmp_path / "run")["scores"]
    assert {path.name for path in (tmp_path / "run/adapters").iterdir()} == {"ada", "bob"}
    llm_fed("eval", tmp_path / "run").assert_refused("no client has a test example to be scored on")
    table = llm_fed("compare", path, "--methods", "local,fedit", "--out", tmp_path / "table")
    assert table.code == 0
    assert llm_fed("init", tmp_path / "data", "--base", small.base, "--out", tmp_path / "i.yaml").code == 0


def test_a_comparison_has_a_mark_for_each_client_without_a_score(small, tmp_path, llm_fed):
    clients = {"ada": WHOLE, "bob": WHOLE, "cyd": ONLY_TRAIN}
    path, out = config(small, tmp_path, clients, eval={"base": True}), tmp_path / "table"
    said = llm_fed("compare", path, "--methods", "local,fedit", "--out", out)
    assert said.code == 0 and said.err.count(UNSCORED) == 1
    (line,) = [line.split() for line in said.out.splitlines() if line.split()[:1] == ["cyd"]]
    assert line == ["cyd", *"----"] and NOT_SCORED in said.out
    table = json.loads((out / "table.json").read_text())
    assert table["unscored"] == ["cyd"]
    for row in [table["base"], *table["rows"]]:
        assert set(row["clients"]) == {"ada", "bob"}
        assert row["average"]["mean"] == pytest.approx(fmean(each["mean"] for each in row["clients"].values()))
    lines = (out / "table.md").read_text().splitlines()
    assert [line.split(" | ")[3] for line in lines if line.startswith(("| base", "| local", "| fedit"))] == ["-"] * 3
    assert "So it is for cyd." in (out / "table.html").read_text()
    head, *body = (out / "table.csv").read_text().splitlines()
    place = head.split(",").index("client cyd mean")
    assert all(line.split(",")[place] == "" for line in body)


def test_who_is_only_tested_is_scored_with_the_model_for_all(small, tmp_path, llm_fed):
    """By a method with one model. One with personal models leaves such clients out, and they count in no mean of a
    comparison of both."""
    clients = {"ada": WHOLE, "bob": WHOLE, "eve": ONLY_TEST}
    path, out = config(small, tmp_path, clients), tmp_path / "table"
    said = llm_fed("compare", path, "--methods", "local,fedit", "--out", out)
    assert said.code == 0 and said.err.count("these clients") == 2
    assert "no training example and are left out (1 of 3): eve" in said.err
    assert "no training example and are only scored, with the model that fedit makes for all (1 of 3): eve" in said.err
    local, fedit = (summary(out / f"{method}-seed0") for method in ("local", "fedit"))
    assert local["left_out"] == ["eve"] and fedit["only_tested"] == ["eve"] and "unscored" not in fedit["scores"]
    assert set(fedit["scores"]["clients"]) == set(clients) and set(local["scores"]["clients"]) == {"ada", "bob"}
    assert {line["client"] for line in api.open_run(out / "fedit-seed0").records if line["kind"] == "client"} == {
        "ada", "bob",
    }  # fmt: skip
    assert (out / "fedit-seed0/adapters/eve").is_dir() and not (out / "local-seed0/adapters/eve").exists()
    rows = {row["label"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
    assert rows["fedit"]["clients"]["eve"] is not None and rows["local"]["clients"]["eve"] is None
    for row in rows.values():
        assert row["average"]["mean"] == pytest.approx(fmean(row["clients"][id]["mean"] for id in ("ada", "bob")))
    assert "they count in no mean: eve" in (out / "table.md").read_text()
    assert (
        "Some clients have no training example and are left out. These are eve."
        in (out / "local-seed0/report.html").read_text()
    )
    assert "only scored, with the model for all. These are eve." in (out / "fedit-seed0/report.html").read_text()
    assert (
        llm_fed("audit", out / "fedit-seed0", "--all").code == 0 == llm_fed("audit", out / "local-seed0", "--all").code
    )
    verdict = llm_fed("compare", "--runs", out / "local-seed0", out / "fedit-seed0", "--json")
    assert verdict.code == 0, verdict
    (pair,) = json.loads(verdict.out)["columns"]["average"]["pairs"]
    means = [row["average"]["mean"] for row in rows.values()]
    assert pair["difference"] == pytest.approx(abs(means[0] - means[1]))


def test_a_folder_without_files_is_no_client_and_named(small, tmp_path, llm_fed):
    path = config(small, tmp_path, {"ada": WHOLE, "eve": {}, "cyd": WHOLE})
    said = llm_fed("run", path, "--out", tmp_path / "run")
    assert said.code == 0 and "eve/" in next(line for line in said.err.splitlines() if "not used" in line)


@pytest.mark.parametrize("clients", [{"ada": {}, "bob": {}}, {"ada": ONLY_TEST, "bob": ONLY_TEST}])
def test_without_any_training_example_there_is_nothing_to_do(small, tmp_path, llm_fed, clients):
    path = config(small, tmp_path, clients)
    parts = ["no client folder and no file of examples"] if clients["ada"] == {} else ["ada, bob", "example; add some"]
    llm_fed("run", path, "--out", tmp_path / "run").assert_refused(*parts)
    assert not (tmp_path / "run").exists()
    llm_fed("init", tmp_path / "data", "--base", small.base).assert_refused(parts[-1])


def test_a_base_is_scored_on_clients_that_have_test_examples_alone(small, tmp_path, llm_fed):
    data = write(tmp_path / "data", {"ada": ONLY_TEST, "bob": ONLY_TRAIN})
    said = llm_fed("eval", "--base", small.base, "--task", "files", "--data", data, "--metric", "rouge1", "--json")
    found = json.loads(said.out)
    assert set(found["clients"]) == {"ada"} and found["unscored"] == ["bob"]


def test_a_client_of_which_nothing_fits_is_as_one_that_has_nothing(small, tmp_path, llm_fed):
    """Of cyd the training examples are too long, of dan the test examples. Where that is so of all, it is a mistake."""
    path = config(small, tmp_path, {"ada": WHOLE, "bob": WHOLE, "cyd": WHOLE, "dan": WHOLE}, method={"name": "local"})
    (tmp_path / "data/cyd/train.jsonl").write_text(rows(3, 0, words=40))
    (tmp_path / "data/dan/test.jsonl").write_text(rows(3, 0, words=40))
    said = llm_fed("run", path, "--out", tmp_path / "run")
    assert said.code == 0 and "3 training and 3 test examples are longer than 32 tokens" in said.err
    assert "no training example and are left out (1 of 4): cyd" in said.err and f"{UNSCORED} (1 of 4): dan" in said.err
    refused = llm_fed("run", path, "task.max_length=2", "--out", tmp_path / "short")
    refused.assert_refused("client ada: none of its 6 training examples fits into task.max_length=2 tokens; raise it")


def test_steps_that_are_for_validation_examples_do_without_them_at_a_client(small, tmp_path, llm_fed):
    """One line names the client and says what is done instead; without any client's, the method is refused at once."""
    path = config(small, tmp_path, {"ada": WHOLE, "bob": WHOLE, "cyd": {"train": 1, "test": 1}})
    for method, words, instead in (
        ("grid", [], "their two adapters weigh the same"),
        ("potara", ["method.fisher_data=held-out", "method.grid=true"], "their training examples give the Fisher"),
        ("fisher-merging", ["method.fisher_data=held-out"], "their training examples give the Fisher"),
        ("ifca", ["method.choice_data=held-out", "method.num_models=2"], "they choose a model by their training"),
    ):
        out = tmp_path / method
        few = ["rounds=2", "local.steps=1", "eval.every=0", "eval.cross=false", "eval.max_new_tokens=1"]
        said = llm_fed("run", path, f"method={method}", *words, *few, "--out", out)
        assert said.code == 0, said
        (line,) = [line for line in said.err.splitlines() if "validation example, so" in line]
        assert instead in line and line.endswith("(1 of 3): cyd")
    recipes = {line["client"]: line for line in api.open_run(tmp_path / "grid").records if line["kind"] == "merge"}
    assert recipes["cyd"]["lambda_fed"] == 0.5 and "grid" not in recipes["cyd"] and "grid" in recipes["ada"]
    recipes = {line["client"]: line for line in api.open_run(tmp_path / "potara").records if line["kind"] == "merge"}
    assert recipes["cyd"]["fisher_data"] == "train" and "fisher_data" not in recipes["ada"]
    (tmp_path / "b").mkdir()
    bare = config(small, tmp_path / "b", {"ada": {"train": 4, "test": 2}}, task={"validation": 0.0})
    refused = llm_fed("run", bare, "method=grid", "--out", tmp_path / "bare")
    refused.assert_refused("ask for validation examples of the clients, but none has any; set task.validation above 0")


def test_the_best_round_is_that_of_the_clients_with_validation_examples(small, tmp_path):
    clients = {"ada": WHOLE, "cyd": {"train": 1}, "dan": {"train": 1, "test": 1}}
    path = config(small, tmp_path, clients, rounds=3, eval={"select": "best"})
    result = api.run(path, out=tmp_path / "run")
    scores = [line for line in result.records if line["kind"] == "score" and line["split"] == "validation"]
    lines = [line for line in scores if line["round"]]  # without the base's
    assert [set(line["clients"]) for line in lines] == [{"ada"}] * 3
    assert result.round in {line["round"] for line in lines if line["mean"] == max(each["mean"] for each in lines)}
    assert set(result.scores) == {"ada", "dan"}


def test_merging_two_runs_leaves_out_who_trained_in_neither(small, tmp_path, llm_fed):
    path = config(small, tmp_path, {"ada": WHOLE, "cyd": ONLY_TRAIN, "eve": ONLY_TEST})
    for method in ("fedit", "local"):
        assert llm_fed("run", path, f"method={method}", "--out", tmp_path / method).code == 0
    parents = ("--fed", tmp_path / "fedit", "--local", tmp_path / "local")
    for method in ("mean", "potara"):
        said = llm_fed("merge", method, *parents, "--out", tmp_path / method)
        assert said.code == 0, said
        assert {path.name for path in (tmp_path / method).iterdir() if path.is_dir()} == {"ada", "cyd"}


def test_a_dry_run_names_them_too(small, tmp_path, llm_fed):
    path = config(small, tmp_path, {"ada": WHOLE, "cyd": ONLY_TRAIN, "eve": ONLY_TEST})
    said = llm_fed("run", path, "--dry-run", "--out", tmp_path / "run")
    assert said.code == 0 and f"{UNSCORED} (1 of 3): cyd" in said.err and "(1 of 3): eve" in said.err


def _federation(draws: random.Random) -> dict[str, Any]:
    """Clients with few examples or none of a split; at least one trains."""
    if draws.random() < 0.3:
        return {f"c{n}": draws.choice([1, 1, 2, 3, 8]) for n in range(draws.randint(1, 6))}
    clients: dict[str, Any] = {"c0": {"train": draws.randint(1, 4)}}
    for number in range(1, draws.randint(2, 6)):
        sizes = {split: draws.choice([0, 1, 2, 4]) for split in WHOLE}
        clients[f"c{number}"] = {split: size for split, size in sizes.items() if size}
    return clients


METHODS = (
    "local", "fedit", "fedlora", "fedprox", "scaffold", "feddyn", "ditto", "fedsa", "feddpa", "fedalt", "pfedmoe",
    "fedem", "ifca", "fedmerge", "fedbuff", "potara", "grid", "mean", "hetlora", "flora", "rolora",
)  # fmt: skip


def _try(small: Small, folder: Path, draws: random.Random) -> None:
    """Whatever clients have, a run ends with a score for those that can be scored, and everybody else is named."""
    clients, method = _federation(draws), draws.choice(METHODS)
    share, select = draws.choice([1.0, 0.5]), draws.choice(["best", "last"])
    local = {"optimizer": "sgd"} if method in ("scaffold", "feddyn") else {}
    path = config(
        small, folder, clients, method={"name": method}, rounds=2, participation=share, eval={"select": select},
        local=local,
    )  # fmt: skip
    split = any(isinstance(sizes, dict) and sizes.get("test") for sizes in clients.values())
    trains, tested = set(), set()
    for client, sizes in clients.items():
        given = {"train": sizes} if isinstance(sizes, int) else sizes
        trains |= {client} if given.get("train") else set()
        tested |= {client} if (given.get("test") if split else given.get("train", 0) > 1) else set()
    try:
        result = api.run(path, out=folder / "run")
    except UserError as error:
        assert method == "grid" and "ask for validation examples" in str(error), (clients, method)
        return
    found, one = summary(folder / "run"), bool(methods.build({"name": method}).one_model)
    assert set(result.scores) == (tested if one else tested & trains), (clients, method)
    if result.scores:
        assert set(found["scores"].get("unscored", ())) == trains - tested, (clients, method)
    named = {*result.scores, *found["scores"].get("unscored", ()), *found.get("left_out", ())}
    assert named >= {client for client in clients if clients[client]} or not result.scores, (clients, method)


def test_uneven_federations_run_to_their_end(small, tmp_path):
    """A sample of the slow test below."""
    draws = random.Random(0)
    for number in range(3):
        _try(small, tmp_path / str(number), draws)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_uneven_federations_run_to_their_end(small, tmp_path, seed):
    draws = random.Random(seed)
    for number in range(25):
        _try(small, tmp_path / str(number), draws)
