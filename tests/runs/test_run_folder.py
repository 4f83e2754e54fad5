"""A run folder that another configuration finds: taken over, or left alone; and what runs write is taken as it is."""

import pytest
import toy

from llm_fed.basics.errors import RunError, UserError
from llm_fed.runs import shapes
from llm_fed.runs.folder import Run
from llm_fed.runs.reading import saved_config
from llm_fed.runs.records import read_records


def test_a_run_that_was_refused_before_its_first_round_makes_room(tmp_path):
    """What a run writes before it is refused: trackers, network.json, a needed run as far as that."""
    with Run(tmp_path, toy.config()) as run:
        run.begin()
        run.remember("network.json", {"run": "before"})
    for name in ("trackers/events", "needs/local/config.yaml", "needs/local/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with Run(tmp_path, toy.config(rounds=4, local={"lr": 0.1})) as run:
        run.begin()
    assert saved_config(tmp_path)["local"]["lr"] == 0.1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoints", "config.yaml"]


@pytest.mark.parametrize(
    "result", ["metrics.jsonl", "checkpoints/round-0001/manifest.json", "needs/local/summary.json"]
)
def test_whatever_has_results_is_not_taken_over(tmp_path, result):
    with Run(tmp_path, toy.config()) as run:
        run.begin()
    (tmp_path / result).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / result).write_text("{}")
    with pytest.raises(UserError, match="another configuration"), Run(tmp_path, toy.config(local={"lr": 0.1})):
        pass
    assert (tmp_path / result).read_text() == "{}"


def test_a_changed_configuration_is_found_where_it_decides_how_results_are_read(tmp_path):
    with Run(tmp_path, toy.config()) as run:
        run.begin()
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1", 1))
    with pytest.raises(UserError, match="does not match the checksum in its last line"):
        saved_config(tmp_path)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    assert saved_config(tmp_path)["seed"] == 1


def test_a_damaged_line_of_metrics_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"kind": "search anew", "round": 1}\n{"kind": "r\n{"kind": "search anew", "round": 2}\n{"unfinished'
    )
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2, is damaged"):
        read_records(path)


def test_what_is_remembered_is_read_as_it_was_written(tmp_path):
    with Run(tmp_path, toy.config()) as run:
        run.begin()
        run.remember("facts.json", {"scores": 1})
        assert run.recall("facts.json") == {"scores": 1}
        path = tmp_path / "facts.json"
        path.write_text(path.read_text().replace('"scores": 1', '"scores": 2'))
        with pytest.raises(RunError, match="facts.json is damaged: it does not match its checksum"):
            run.recall("facts.json")
        path.write_text('{"scores": 2}')
        assert run.recall("facts.json") == {"scores": 2}


@pytest.mark.parametrize(("line", "held"), [("", "0 (llm_fed 0.4 or older)"), ("format: 2\n", "2")])
def test_a_folder_of_another_format_is_refused_with_both_numbers(small, llm_fed, tmp_path, line, held):
    config = small.config(tmp_path / "c.yaml", rounds=1, eval={"every": 0, "max_new_tokens": 1})
    assert llm_fed("run", config, "--out", tmp_path / "run").code == 0
    path = tmp_path / "run/config.yaml"
    kept = [each for each in path.read_text().splitlines(True) if not each.startswith(("format: 1\n", "# sha256"))]
    path.write_text(line + "".join(kept))
    for command in (["eval", tmp_path / "run"], ["run", config, "--out", tmp_path / "run"]):
        llm_fed(*command).assert_refused(f"a run folder of format {held}, and this version reads format 1")
    path.write_text(path.read_text().replace("clip: null", "clip: 1.0"))
    llm_fed("eval", tmp_path / "run").assert_refused("train it again. Its epsilon is void: noise and batches")
    path.write_text(path.read_text().replace("clip: 1.0", "clip: null"))
    assert llm_fed("run", path, "--out", tmp_path / "again").code == 0  # as a configuration it is as good
    assert llm_fed("run", config, "--out", tmp_path / "run", "--fresh").code == 0


NAN = float("nan")


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("metrics.jsonl", {"kind": "merge", "client": "ada", "rounds": {"fedit": 3, "local": None}, "lambda_fed": 0.3}),
        ("metrics.jsonl", {"kind": "merge", "client": "ada", "rounds": {}, "lambda_fed": {"lora_A": 0.3, "head": None},
                           "a": float("inf"), "sweep": {"lora_A": {"0.1": 0.2}}, "grid": {"0.0": 1.0, "0.1": NAN}}),
        ("metrics.jsonl", {"kind": "event", "round": 0, "client": "", "event": "x", "reason": "a\nb"}),
        ("metrics.jsonl", {"kind": "privacy", "round": 1, "epsilon": None, "delta": 1e-5, "where": "client"}),
        ("metrics.jsonl", {"kind": "search anew", "round": 2, "changed": ["eval.metric"]}),
        ("metrics.jsonl", {"kind": "score", "round": 2, "split": "test", "unscored": ["ada"]}),
        ("metrics.jsonl", {"kind": "of a later version", "anything": [1]}),
        ("summary.json", {"round": 1, "rounds": 2, "method": "x", "scores": {}, "needs": {"fedit": None}}),
    ],
)  # fmt: skip
def test_what_runs_write_is_taken(file, value):
    shapes.check(file, value)
