"""One's own objects in `llm_fed.run`: model, data, method, metric and callbacks, and results as data frames."""

import json
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any

import classifiers
import datasets
import pandas as pd
import pytest
import tiny
import torch
from small_run import CLIENTS
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import llm_fed as package
from llm_fed.basics.errors import UserError
from llm_fed.commands import init
from llm_fed.commands.own import OwnObjects
from llm_fed.method import Method
from llm_fed.methods.fedit import FedIT
from llm_fed.runs.reading import saved_config
from llm_fed.settings import configfile


def base_of(small, **changes: Any) -> tuple[Any, Any]:
    """The small base as objects."""
    model = AutoModelForCausalLM.from_pretrained(small.base, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(small.base)


def rows_of(small) -> dict[str, dict[str, list[dict[str, str]]]]:
    """The small data as lists of dicts, by client and split."""
    return {
        client: {
            split: [json.loads(line) for line in (small.data / client / f"{split}.jsonl").read_text().splitlines()]
            for split in ("train", "validation", "test")
        }
        for client in CLIENTS
    }


def tree_of(small, **changes: Any) -> dict[str, Any]:
    """The small configuration without a base, and without the path of data."""
    tree = small.tree(**{**changes, "eval": {"cross": False, "max_new_tokens": 2, **changes.get("eval", {})}})
    del tree["base"], tree["task"]["path"]
    return tree


def adapters(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("adapters/*/*.safetensors"))}


def share_of_words(predictions, references):
    """Of each answer the share of the reference's words that it has, 0-100."""
    pairs = zip(predictions, references, strict=True)
    return [100 * len({*said.split()} & {*right.split()}) / len({*right.split()}) for said, right in pairs]


class Halving:
    """What a notebook's class of a metric may look like."""

    def compute(self, *, predictions, references):
        return {"halving": 50.0}


@pytest.mark.parametrize("name, column", [("classification", "label"), ("regression", "score")])
def test_labelled_rows_are_the_task_that_is_named(name, column, tmp_path):
    """`task.name=classification` reads objects as it reads files, in all forms of a call."""
    base = classifiers.written(tmp_path / "bert", "bert")
    rows = {id: classifiers.rows(n, 20, numbers=column == "score") for n, id in enumerate(("north", "south"))}
    short = {"rounds": 1, "base": {"name": str(base)}, "local": {"steps": 1, "batch_size": 2}}
    data = {"north": pd.DataFrame(rows["north"]), "south": rows["south"]}
    calls = {"words": (short, f"task.name={name}"), "tree": ({**short, "task": {"name": name}},)}
    results = {how: package.run(*call, data=data, method="fedit", out=tmp_path / how) for how, call in calls.items()}
    for id, own in rows.items():
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / f"d/{id}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    task = {"name": name, "path": str(tmp_path / "d")}
    files = package.run({**short, "task": task}, method="fedit", out=tmp_path / "files")
    assert {how: adapters(result.folder) for how, result in results.items()} == dict.fromkeys(
        calls, adapters(files.folder)
    )
    assert results["words"].scores == files.scores
    if name == "classification":
        assert results["tree"].model("north").base.labels == classifiers.LABELS


def test_one_client_with_rows_is_no_federation(small, tmp_path, caplog, capfd):
    data = {"north": rows_of(small)["ada"], "south": []}
    package.run(tree_of(small, rounds=1), base=str(small.base), data=data, method="fedit", out=tmp_path / "r")
    assert "only one client of 2, north, has training examples, so nothing is federated" in capfd.readouterr().err


def test_objects_train_what_their_files_train(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = {"cross": False, "max_new_tokens": 2}
    of_files = package.run(small.tree(rounds=2, eval=quick), out="files")
    before = {*tmp_path.rglob("*")}
    result = package.run(tree_of(small, rounds=2), base=base_of(small), data=rows_of(small))
    assert result.folder == Path("runs/run-fedit-seed0")  # where the command would put it
    written = {path for path in {*tmp_path.rglob("*")} - before if path not in (tmp_path / "runs",)}
    assert all(path.is_relative_to(tmp_path / result.folder) for path in written)
    assert adapters(result.folder) == adapters(of_files.folder) and result.scores == of_files.scores
    assert result.chat("ada", "w20 w21") == of_files.chat("ada", "w20 w21")
    with pytest.raises(UserError, match=r"base.name=object::base stands for the model that a Python program gave"):
        package.open_run(result.folder).chat("ada", "w20 w21")
    opened = package.open_run(result.folder, base=base_of(small))
    assert opened.chat("ada", "w20 w21") == of_files.chat("ada", "w20 w21")


def test_the_model_itself_computes(small, tmp_path):
    """Not what its name stands for: its weights are changed, and its head is no longer tied to its embedding."""
    model, tokenizer = base_of(small)
    text = tokenizer("w20 w21", return_tensors="pt")
    plain = package.run(tree_of(small, rounds=1), base=(model, tokenizer), data=rows_of(small), out=tmp_path / "plain")
    before = model(**text).logits.detach()
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    nn.init.normal_(head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    model.lm_head, model.config.tie_word_embeddings = head, False
    changed = package.run(tree_of(small, rounds=1), base=(model, tokenizer), data=rows_of(small), out=tmp_path / "own")
    losses = [dict(result.frames.scores.query("split == 'test' and model == 'personal'")[["client", "loss"]].values)
              for result in (plain, changed)]  # fmt: skip
    assert all(abs(losses[0][client] - losses[1][client]) > 0.1 for client in CLIENTS)
    torch.testing.assert_close(before, (package.run, base_of(small)[0])[1](**text).logits)  # a run leaves no trace
    with pytest.raises(UserError, match=r"is not the base any more .*lm_head.weight"):
        package.run(tree_of(small, rounds=2), base=(model, tokenizer), data=rows_of(small), out=tmp_path / "plain")


def test_an_attention_that_nobody_knows_is_named(small, tmp_path):
    """Before anything is computed; one that the program registers is used."""
    model, tokenizer = base_of(small)
    given = {"base": (model, tokenizer), "data": rows_of(small)}
    model.config._attn_implementation_internal = "mine"
    with pytest.raises(UserError, match=r"has the attention 'mine', which transformers does not know; call model.set_"):
        package.run(tree_of(small, rounds=1), **given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    seen, known = [], ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("mine", lambda *words, **more: (seen.append(1), known(*words, **more))[1])
    AttentionMaskInterface.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    package.run(tree_of(small, rounds=1), **given, out=tmp_path / "run")
    assert seen


def test_rows_are_the_same_in_every_form(small, tmp_path):
    rows = {client: parts["train"] for client, parts in rows_of(small).items()}
    pairs = {client: [(row["instruction"], row["output"]) for row in own] for client, own in rows.items()}
    joined = [{**row, "who": client} for client, own in rows.items() for row in own]
    forms: dict[str, Any] = {
        "lists": rows,
        "pairs": pairs,
        "frames": {client: pd.DataFrame(own) for client, own in rows.items()},
        "data sets": {client: datasets.Dataset.from_list(own) for client, own in rows.items()},
        "splits": {client: datasets.DatasetDict(train=datasets.Dataset.from_list(own)) for client, own in rows.items()},
        "mixed": {"ada": rows["ada"], "bob": pd.DataFrame(rows["bob"]), "cyd": pairs["cyd"]},
    }
    model = base_of(small)
    tree = tree_of(small, rounds=1, task={"name": "files"}, local={"steps": 1}, eval={"every": 0})
    results = {name: package.run(tree, base=model, data=data, out=tmp_path / name) for name, data in forms.items()}
    one = package.run(tree, "task.columns.client=who", base=model, data=pd.DataFrame(joined), out=tmp_path / "one")
    for result in (*results.values(), one):
        assert adapters(result.folder) == adapters(tmp_path / "lists")


def test_data_that_cannot_be_used_is_named(small, tmp_path):
    def run(data: Any, **changes: Any):
        return package.run(tree_of(small, **changes), base=base_of(small), data=data, out=tmp_path / "run")

    for data, message in [
        ({}, "data= is empty"),
        ({"instruction": ["w20"], "output": ["w4"]}, "data= is a dict of the columns instruction, output"),
        ({"ada": 3}, r"data\['ada'\] is int; give a data frame"),
        ({"ada": {"train": [], "other": []}}, r"data\['ada'\] has the key 'other'"),
        (
            {"ada": [{"instruction": "w20", "output": "w4"}, {"instruction": "w21", "output": None}]},
            r"data\['ada'\]\[1\]",
        ),
        ({"ada": [("w20", "w4"), 7]}, r"data\['ada'\]\[1\] is 7; give a dict"),
        ({"ada": []}, "has no rows"),
    ]:
        with pytest.raises(UserError, match=message):
            run(data)
    with pytest.raises(UserError, match="names files, but data= gives the data"):
        package.run(small.tree(), data=rows_of(small), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_handed_out_for_other_objects(small, tmp_path):
    def score(predictions, references):
        return 50

    def run(**changes: Any):
        given = {"base": base_of(small), "data": rows_of(small), "metric": score} | changes
        return package.run(tree_of(small, rounds=1), out=tmp_path / "run", **given)

    first = run()
    assert run().scores == first.scores
    data = rows_of(small)
    data["bob"]["test"][0]["output"] = "w1 w2"
    with pytest.raises(UserError, match=r"is finished, and data= was another then \(data\['bob'\]\['test'\] differs"):
        run(data=data)
    model, tokenizer = base_of(small)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(UserError, match=r"was another then \(model.norm.weight differs\)"):
        run(base=(model, tokenizer))

    namespace: dict[str, Any] = {}
    exec("def score(predictions, references):\n    return 60", namespace)  # as a cell of a notebook that was changed
    with pytest.raises(UserError, match=r"was another then \(score differs\)"):
        run(metric=namespace["score"])


def test_a_raising_callback_ends_the_run_where_it_can_go_on(small, tmp_path, llm_fed):
    class Fails(ValueError):
        pass

    class Watching:
        def __init__(self, fails: int | None = None):
            self.fails, self.rounds, self.steps, self.scores, self.results = fails, [], [], [], []

        def on_step(self, step):
            self.steps.append((step["round"], step["step"], step["steps"]))

        def on_round(self, record):
            self.rounds.append(record["round"])
            if record["round"] == self.fails:
                raise Fails("no space on my drive")

        def on_scores(self, record):
            self.scores.append((record["round"], record["split"]))

        def on_end(self, result):
            self.results.append(result)

    def run(out: str, *callbacks: Any):
        return package.run(
            tree_of(small.as_usual()), base=base_of(small), data=rows_of(small), callbacks=callbacks, out=tmp_path / out
        )

    first, second, whole = Watching(fails=2), Watching(), Watching()
    with pytest.raises(Fails, match="no space on my drive") as raised:
        run("run", first)
    assert raised.traceback[-1].name == "on_round"
    refused = llm_fed("run", tmp_path / "run/config.yaml", "--out", tmp_path / "run")
    refused.assert_refused("object::", "that a Python program gave as an object", "llm_fed.run(...")
    result = run("run", second)
    run("whole", whole)
    assert (first.rounds, second.rounds, whole.rounds) == ([1, 2], [3], [1, 2, 3])
    assert whole.steps == [(round, step, 2) for round in (1, 2, 3) for step in (1, 2)]
    assert whole.scores[:4] == [(0, "validation"), (1, "validation"), (2, "validation"), (3, "validation")]
    assert (whole.scores[-1][1], [type(each).__name__ for each in whole.results]) == ("test", ["Result"])
    assert adapters(tmp_path / "run") == adapters(tmp_path / "whole")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    for command in ("eval", "chat"):
        llm_fed(command, result.folder).assert_refused("object::", "that a Python program gave as an object")
    audited = llm_fed("audit", result.folder)  # of files alone
    assert audited.code == 3 and "that a Python program gave as an object" in audited.out


def test_a_callback_stops_the_run(small, tmp_path):
    class Stop:
        def on_scores(self, scores):
            return scores["round"] >= 2 and scores["split"] == "validation"

    result = package.run(tree_of(small, rounds=5), base=base_of(small), data=rows_of(small), callbacks=[Stop()],
                         out=tmp_path / "run")  # fmt: skip
    assert list(result.frames.rounds["round"]) == [1, 2] and set(result.adapters) == set(CLIENTS)
    assert set(result.scores) == set(CLIENTS)
    ended = json.loads((result.folder / "summary.json").read_text())["ended"]
    assert ended == {"round": 2, "why": "the callback Stop.on_scores returned True"}
    before = (result.folder / "metrics.jsonl").read_bytes()  # the same call finds it finished
    package.run(tree_of(small, rounds=5), base=base_of(small), data=rows_of(small), out=tmp_path / "run")
    assert (result.folder / "metrics.jsonl").read_bytes() == before


def test_callbacks_that_nothing_would_call_are_refused():
    class Wrong:
        def on_epoch(self, record): ...

    for callbacks, message in [
        ([Wrong()], "Wrong has on_epoch, which is never called"),
        ([object()], "object has no method that a run would call; hooks: on_step"),
        ([Wrong], "the class Wrong; give an object"),
        ("on_end", "give a list"),
    ]:
        with pytest.raises(UserError, match=message):
            package.run({}, callbacks=callbacks)


def test_a_metric_of_ones_own(small, tmp_path, llm_fed, monkeypatch):
    common: dict[str, Any] = {"base": base_of(small), "data": rows_of(small)}
    tree = tree_of(small, rounds=1)
    del tree["eval"]["metric"]
    of_function = package.run(tree, metric=share_of_words, out=tmp_path / "function", **common)
    name = f"{__name__}:share_of_words"
    assert of_function.metric == name  # found by its name, so commands can score with it as well
    assert package.run(tree, metric=name, out=tmp_path / "name", **common).scores == of_function.scores
    of_object = package.run(tree, metric=Halving(), out=tmp_path / "object", **common)
    assert (of_object.metric, set(of_object.scores.values())) == ("object::Halving", {50.0})
    for result, message in [
        (lambda predictions, references: 101, "returned 101; it must return numbers from 0 to 100"),
        (lambda predictions, references: [1.0], "returned 1 numbers for"),
        (lambda predictions, references: {"a": 1, "b": 2}, "returned a dict with a, b"),
        (lambda predictions, references: "good", "returned 'good'"),
    ]:
        with pytest.raises(UserError, match=message):
            package.run(tree, metric=result, out=tmp_path / "wrong", fresh=True, **common)
    with pytest.raises(UserError, match=r"metric='int' is 3; it must be a function"):
        package.run(tree, metric=3, out=tmp_path / "wrong", **common)
    # By name in YAML; a command that looks at a run runs it only where the user allows it.
    config = small.config(tmp_path / "c.yaml", rounds=1, eval={"metric": name})
    assert llm_fed("run", config, "--out", tmp_path / "cli").code == 0
    llm_fed("eval", tmp_path / "cli").assert_refused(f"eval.metric={name!r}", f"--allow {name}")
    assert llm_fed("eval", tmp_path / "cli", "--allow", name).code == 0
    summary = json.loads((tmp_path / "cli/summary.json").read_text())
    assert summary["scores"]["clients"] == of_function.scores
    assert llm_fed("run", config, "eval.metric=nowhere:f", "--out", tmp_path / "no").code == 2


def test_a_function_behind_an_object_that_decorates_it_has_its_name(monkeypatch):
    decorated = update_wrapper(Halving(), share_of_words)
    monkeypatch.setitem(globals(), "share_of_words", decorated)
    own = OwnObjects.of(metric=decorated)
    assert own.words == (f"eval.metric={__name__}:share_of_words",) and not own.given


def test_references_are_lists_of_texts_where_examples_have_several():
    from llm_fed.scoring import own_metric

    seen: list[Any] = []

    def metric(*, predictions, references):
        seen.append((predictions, references))
        return 100

    assert own_metric.compute("m", metric, ("a", "b"), [("x",), ("y",)]) == 100
    own_metric.compute("m", metric, ["a", "b"], [("x",), ("y", "z")])
    own_metric.compute("m", metric, [1, 0], [1, 1])
    assert seen == [(["a", "b"], ["x", "y"]), (["a", "b"], [["x"], ["y", "z"]]), ([1, 0], [1, 1])]


@dataclass(frozen=True)
class Slower(Method):
    """Federated averaging whose server takes a part of each step."""

    share: float = 0.5

    async def server_update(self, server, state, uploads):
        contents = [upload.content for upload in uploads]
        return state + self.share * server.average(contents, [upload.num_examples for upload in uploads])

    async def client_update(self, client, message):
        return await client.fit(message) - message


def test_a_method_as_a_name_a_class_or_an_instance(small, tmp_path):
    common: dict[str, Any] = {"base": base_of(small), "data": rows_of(small)}
    tree = tree_of(small, rounds=1, local={"steps": 1}, eval={"every": 0})
    del tree["method"]
    given = [("fedit",), (FedIT,), (FedIT(),), (Slower(share=0.25),), (Slower, "method.share=0.25"), (Slower,)]
    for number, (method, *words) in enumerate(given):
        package.run(tree, *words, method=method, out=tmp_path / str(number), **common)
    folders = [adapters(tmp_path / str(number)) for number in range(6)]
    assert folders[0] == folders[1] == folders[2] and folders[3] == folders[4]
    assert folders[0] != folders[3] != folders[5]
    assert f"name: {__name__}:Slower" in (tmp_path / "3/config.yaml").read_text()  # which any process finds

    @dataclass(frozen=True)
    class Here(Slower):
        share: float = 0.25

    result = package.run(tree, method=Here(), out=tmp_path / "here", **common)
    assert (result.method, adapters(result.folder)) == ("object::Here", folders[3])
    assert package.run({**tree, "method": "fedit"}, out=tmp_path / "plain", **common).method == "fedit"
    with pytest.raises(UserError, match="stands beside method=, which is an object with its own settings"):
        package.run(tree, "method.share=0.1", method=Here(), out=tmp_path / "no", **common)
    with pytest.raises(UserError, match="method= is 3; give a Method"):
        package.run(tree, method=3, out=tmp_path / "no", **common)


def test_a_comparison_of_objects(small, tmp_path):
    """Rows are methods as names, classes and instances; two instances of a class that no module has are two rows."""

    @dataclass(frozen=True)
    class Here(Slower):
        """No other process can find it."""

    rows = {"fedit": "fedit", "quick": Here(share=1.5), "slow": Here(share=0.25)}
    options: dict[str, Any] = {
        "base": base_of(small), "data": rows_of(small), "metric": share_of_words, "methods": rows, "out": tmp_path,
    }  # fmt: skip
    table = package.compare(tree_of(small, rounds=1), seeds=[0, 1], **options)
    assert [row.label for row in table.rows] == list(rows) and table.metric.endswith("share_of_words")
    folders = {row.label: tmp_path / row.results[0].folder for row in table.rows}
    assert len({repr(adapters(folder)) for folder in folders.values()}) == 3
    alone = package.run(
        tree_of(small, rounds=1), out=tmp_path / "alone", method=rows["slow"],
        **{key: options[key] for key in ("base", "data", "metric")},
    )  # fmt: skip
    assert adapters(alone.folder) == adapters(folders["slow"])
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    again = package.compare(tree_of(small, rounds=1), seeds=[0, 1], **options)
    assert again.as_json() == table.as_json()
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
    with pytest.raises(UserError, match=r"methods= has two named 'Here'; give a dictionary"):
        package.compare(tree_of(small), out=tmp_path / "two", methods=[Here(), Here(share=0.1)])
    with pytest.raises(UserError, match="data is int; give a data frame"):
        package.compare(tree_of(small), out=tmp_path / "three", methods=["fedit"], data=7)


def test_data_frames_of_the_results(small, tmp_path):
    tree = tree_of(small.as_usual(), rounds=2, method={"name": "fedmerge", "num_models": 2})
    frames = package.run(tree, base=base_of(small), data=rows_of(small), out=tmp_path / "run").frames
    own = frames.scores.query("model == 'personal' and split == 'validation'")
    assert list(own["round"]) == [1] * 3 + [2] * 3 and list(own["client"]) == [*CLIENTS] * 2
    assert set(frames.scores["model"]) == {"personal", "base", "rule"} and own["loss"].notna().all()
    assert list(frames.rounds["round"]) == [1, 2] and (frames.rounds["bytes_up"] > 0).all()
    assert set(frames.clients["client"]) == set(CLIENTS) and (frames.clients["examples"] == 6).all()
    assert set(frames.weights["model"]) == {0, 1} and len(frames.weights) == 2 * 3 * 2
    assert abs(frames.weights.groupby(["round", "client"])["weight"].sum() - 1).max() < 1e-3
    assert list(frames.samples.columns) == ["client", "prompt", "references", "base", "answer"]
    assert len(package.open_run(tmp_path / "run").frames.scores) == len(frames.scores)


class Small(nn.Module):
    """A classifier of one's own, whose forward names its input as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.relu(self.norm(self.first(rows))))


def numbers(seed: int, count: int) -> list[tuple[torch.Tensor, int]]:
    """Rows whose label is the place of the largest of their first three numbers."""
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return [(row, int(row[:3].argmax())) for row in rows]


def test_a_module_of_ones_own(tmp_path):
    torch.manual_seed(0)
    module = Small()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    data = {name: {"train": numbers(seed, 60), "test": numbers(seed + 9, 30)} for seed, name in enumerate("ab")}
    tree = {"rounds": 6, "adapter": None, "local": {"steps": 15, "lr": 0.02, "batch_size": 16}, "device": "cpu"}
    result = package.run(tree, base=module, data=data, method="fedit", out=tmp_path / "run")
    assert result.metric == "accuracy" and result.mean is not None and result.mean > 80
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())
    own = result.model("a")
    assert type(own) is Small and own is not module
    rows, labels = zip(*data["a"]["test"], strict=True)
    right = (own(torch.stack(rows)).argmax(1) == torch.tensor(labels)).double().mean()
    assert abs(100 * float(right) - result.scores["a"]) < 1e-3
    again = package.open_run(result.folder, base=module).model("a")
    torch.testing.assert_close(again(torch.stack(rows)), own(torch.stack(rows)))
    # Adapters on it, and a metric of one's own on labels.
    seen = []

    def metric(predictions, references):
        seen.append(references)
        return 100 * sum(a == b for a, b in zip(predictions, references, strict=True)) / len(references)

    tree |= {"adapter": {"rank": 2, "target_modules": ["first"]}, "rounds": 1}
    adapted = package.run(tree, base=module, data=data, method="local", metric=metric, out=tmp_path / "adapters")
    assert set(adapted.adapters) == {"a", "b"} and isinstance(seen[0][0], int)
    model: Any = adapted.model("a")
    assert model.classify(torch.stack(rows)).shape == (30,)
    for module, message in [
        (nn.Linear(6, 4), r"returns \(2, 4\) for two inputs; logits of the shape \(2, 3\)"),
        (nn.Linear(5, 3), r"fails on two inputs of the shape \(6,\)"),
        (3, "base= is 3; give"),
    ]:
        with pytest.raises(UserError, match=message):
            package.run(tree, base=module, data=data, out=tmp_path / "wrong")
    with pytest.raises(UserError, match="without its tokenizer"):
        package.run({}, base=tiny.build("llama"), data=data, out=tmp_path / "wrong")


def test_pictures_in_memory(tmp_path):
    """The same arrays as from a file: pairs of NumPy and number, and PIL with names."""
    import tiny_images
    from PIL import Image

    arrays, labels = tiny_images.arrays(24, 0, tiny_images.CLASSES, 16)
    names = [f"kind {label}" for label in range(tiny_images.CLASSES)]
    pairs = list(zip(arrays, labels.tolist(), strict=True))
    named = [{"image": Image.fromarray(array), "label": names[label]} for array, label in pairs]
    tree = {"rounds": 1, "base": {"name": "cnn"}, "adapter": None, "local": {"steps": 2}, "device": "cpu"}
    runs = [
        package.run(tree, data={"a": rows[:12], "b": rows[12:]}, method="fedit", out=tmp_path / str(number))
        for number, rows in enumerate((pairs, named))
    ]
    assert runs[0].scores == runs[1].scores and adapters(tmp_path / "0").keys() == adapters(tmp_path / "1").keys()
    assert runs[0].metric == "accuracy"


CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.mark.parametrize("said, words, lr, template, method", [
    ({}, [], (3e-3, 3e-4), "chat", "local"),
    ({"local": {"lr": 0.01}}, ["task.template=plain"], (0.01, 5e-6), "plain", "local"),
    ({"method": "fedit"}, ["local.lr_end=0.0"], (5e-5, 0.0), "chat", "fedit"),
    ({"objective": {"name": "kto"}}, [], (1e-3, 1e-4), "chat", "local"),
    ({"task": {"name": "flan"}}, [], (5e-5, 5e-6), "alpaca-short", "fedmerge"),  # has the settings of its paper
])  # fmt: skip
def test_a_program_gets_what_init_proposes(small, said, words, lr, template, method):
    base = base_of(small)
    base[1].chat_template = CHAT
    data = None if "task" in said else rows_of(small)
    settings = configfile.load(init.completed(said, words, base, data), words)
    assert (settings.local.lr, settings.local.lr_end) == lr
    assert (settings.task.template, settings.method["name"]) == (template, method)


def test_a_call_trains_and_compares_by_what_init_proposes(small, tmp_path):
    quick = {"rounds": 1, "local": {"steps": 1}, "eval": {"max_new_tokens": 2, "cross": False}, "device": "cpu"}
    own = {"base": base_of(small), "data": rows_of(small)}
    result = package.run(quick, **own, out=tmp_path / "run")
    table = package.compare(quick, **own, methods=["local", "fedit"], out=tmp_path / "table")
    assert result.method == "local" and {*table.by_validation} == {"local", "fedit"}
    for folder in (result.folder, tmp_path / "table/fedit-seed0"):
        said = saved_config(folder)
        assert (said["local"]["lr"], said["task"]["template"]) == (3e-3, "alpaca-short")  # it has no chat template


def test_labels_have_no_base_ability(tmp_path):
    rows = [(torch.randn(5), place % 2) for place in range(8)]
    words = ["eval.ability=true", "adapter=null"]
    with pytest.raises(UserError, match="eval.ability=true is measured of language models that learn answers or texts"):
        package.run({}, *words, base=nn.Linear(5, 2), data={"a": rows}, method="local", out=tmp_path / "run")
