"""llm_fed from Python: the same runs and tables as by the commands, and what a finished run gives."""

import html
import json
from pathlib import Path

import pytest
import tiny_images

import llm_fed as package
from llm_fed.basics.errors import RunError, UserError
from llm_fed.tasks.common import pixels_of


def files(folder: Path) -> dict[str, bytes]:
    """What a run wrote that must be the same bytes whoever began it."""
    names = ["config.yaml", "metrics.jsonl", "summary.json"]
    return {name: (folder / name).read_bytes() for name in names} | {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("adapters/*/*.safetensors"))
    }


def test_a_run_is_the_commands_run(small, llm_fed, tmp_path):
    tree = small.tree(eval={"base": True})
    result = package.run(tree, "rounds=2", out=tmp_path / "python")
    assert llm_fed("run", small.config(tmp_path / "c.yaml", **tree), "rounds=2", "--out", tmp_path / "cli").code == 0
    assert files(tmp_path / "python") == files(tmp_path / "cli")
    summary = json.loads((tmp_path / "cli/summary.json").read_text())
    assert (result.method, result.rounds, result.round) == ("fedit", 2, summary["round"])
    assert (result.metric, result.scores) == ("rouge1", summary["scores"]["clients"])
    assert (result.mean, result.worst_half) == (summary["scores"]["mean"], summary["scores"]["worst_half"])
    assert result.base == summary["base"]["clients"] and set(result.adapters) == set(result.scores)
    assert [line["round"] for line in result.records if line["kind"] == "round"] == [1, 2]
    # The same call reads what is complete, and with more rounds goes on.
    assert package.run(tree, "rounds=2", out=tmp_path / "python").scores == result.scores
    assert package.run(str(tmp_path / "c.yaml"), "rounds=3", out=tmp_path / "python").rounds == 3
    second = package.run(tree, "rounds=1", out=tmp_path / "second", start=tmp_path / "cli")
    assert str(tmp_path / "cli") in (second.folder / "config.yaml").read_text()


def test_chat_answers_as_the_adapter_does(small, finished):
    result = package.open_run(finished)
    for client, folder in result.adapters.items():
        expected = package.load_client(folder, str(small.base)).generate(["w20 w21"])[0]
        assert expected and result.chat(client, "w20 w21") == expected
        assert "".join(result.model(client).reply("w20 w21")) == expected
    with pytest.raises(UserError, match="--client='nobody' is unknown"):
        result.chat("nobody", "w20")


def test_mistakes_are_named_before_anything_is_trained(small, tmp_path):
    for tree, words, message in [
        (small.tree(round=3), [], "unknown key round .*rounds"),
        (small.tree(task={"path": "nowhere"}), [], "there is no such file or folder"),
        ({"seed": object()}, [], "holds a value that YAML cannot express"),
        (tmp_path / "none.yaml", [], "there is no configuration file"),
    ]:
        with pytest.raises(UserError, match=message):
            package.run(tree, *words, out=tmp_path / "run")
    for tree, message in [
        (small.tree(round=3), "unknown key round .*rounds"),
        (small.tree(), "has no compare section"),
    ]:
        with pytest.raises(UserError, match=message):
            package.compare(tree, out=tmp_path / "table", methods=["fedit"] if "section" not in message else [])
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob("table/*seed*"))
    with pytest.raises(UserError, match="is not a run folder"):
        package.open_run(tmp_path)
    with pytest.raises(AttributeError, match="'llm_fed' has no attribute 'train'"):
        package.train  # noqa: B018


def test_a_comparison_from_nested_values(small, tmp_path):
    tree = small.tree(rounds=1)
    table = package.compare(tree, "local.steps=1", out=tmp_path / "t", methods=["local", "fedit"], seeds=[0, 1])
    assert [row.label for row in table.rows] == ["local", "fedit"]
    assert set(table.by_client) == {"local", "fedit"} and set(table.by_client["fedit"]) == set(table.clients)
    assert json.loads((tmp_path / "t/table.json").read_text()) == json.loads(json.dumps(table.as_json()))
    assert str(table) == table.as_markdown() and "Table(" not in repr(table)
    shown = table._repr_html_()
    assert (
        "<th>local</th>" in shown and "overflow-x: auto" in shown and table.verdict.sentences[0] in html.unescape(shown)
    )
    scores = table.frames.scores.groupby(["label", "client"]).score.apply(list).to_dict()
    assert scores == {(label, id): own for label, of in table.by_client.items() for id, own in of.items()}
    assert len(table.frames.runs) == 4 and Path(table.frames.runs.folder[0]).name.startswith("local")
    again = package.compare(tmp_path / "t/comparison.yaml", "local.steps=1", out=tmp_path / "t", methods=["local"])
    assert again.by_client["local"] == {id: scores[:1] for id, scores in table.by_client["local"].items()}


def test_a_failed_row_is_an_error_that_names_it(small, tmp_path, monkeypatch):
    from llm_fed.experiment import run as experiment

    def fail(config, *args, **kwargs):
        raise RunError("the disk is full")

    monkeypatch.setattr(experiment, "train", fail)
    with pytest.raises(RunError, match=r"local seed 0 failed, see .*table.md"):
        package.compare(small.tree(), out=tmp_path / "t", methods=["local"])


def test_image_models(tmp_path):
    path = tiny_images.npz(tmp_path / "data.npz")
    result = package.run(tiny_images.tree(path), out=tmp_path / "run")
    client = next(iter(result.adapters))
    model = result.model(client)
    assert model(pixels_of(tiny_images.pictures(2))).shape == (2, tiny_images.CLASSES)
    with pytest.raises(UserError, match="holds image models, which cannot chat"):
        result.chat(client, "What is this?")
