"""The report of full, unfinished and damaged runs, and the pictures."""

import base64
import json
import re

import pytest
import without
import yaml
from report_page import CONFIG, read, write_run

from llm_fed.basics.errors import UserError
from llm_fed.eval import plots
from llm_fed.eval.report import pictures, write_report

SCRIPTS = 3  # the rows of the table, the curves, and the one that runs


@pytest.fixture(scope="module", autouse=True)
def quick_reports():
    """Here pictures are drawn, but for tests that take `undrawn`, or `unsaved`, where they are drawn and not saved."""


@pytest.fixture
def undrawn(monkeypatch):
    without.pictures(monkeypatch)


@pytest.fixture
def unsaved(monkeypatch):
    without.pictures(monkeypatch, drawn_first=True)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("runs") / "my run")
    return run, read(run)


def test_full_run(full):
    """Test scores 40, 44, 48, 52: mean 46, std sqrt(20) = 4.5, worst half 42. 20 rounds of 6000 bytes up."""
    _, page = full
    for expected in (
        "fedmerge on flan with some/base-3B",
        "run my run · base some/base-3B · seed 3",
        "Finished: 20 of 20 rounds.",
        "rouge1 (0–100) on the test split, models of round 15. Worst half: mean of the lowest 2 of 4",
        "mean 46.0 1.375 std over clients 4.5 worst half 42.0",
        "worst half 42.0",
        "client rouge1 test loss training loss rounds examples up down failures",
        "snli 40.0 1.000 0.186 20 300 30 kB 50 kB 2 cola 44.0 1.250 0.264 20 300 30 kB 50 kB 0",  # the loss of round 19
        "bytes up 120 kB bytes down 200 kB time 4.0 min Clients",
        "Of the tokens in training batches 7.0 % were padding.",
        "uploads refused: 0, clients failed: 2.",
        "client failed , snli, round 10, 20 the loss is not finite at step 3",
        "local 3.8 min 95.0 % server 12.0 s 5.0 %",
        "llm-fed run 'my run/config.yaml' --out 'my run-again'",
        "method: name: fedmerge num_models: 2",
        "Merging weights of round 15",
        "Training and validation loss by round",
    ):
        assert expected in page.text
    assert "Not finished" not in page.text and "incomplete" not in page.text


def drawn(run, name, monkeypatch):
    """What the report gives to a function of `plots`."""
    calls, draw, embed = [], getattr(plots, name), pictures.embed
    page = run / "report.html"
    before = page.read_bytes() if page.exists() else None

    def taken_down(path, **given):
        calls.append(given)
        return draw(path, **given)

    monkeypatch.setattr(plots, name, taken_down)
    monkeypatch.setattr(pictures, "embed", lambda picture: embed(picture) if picture.func is taken_down else "data:,")
    write_report(run)
    if before:
        page.write_bytes(before)  # with all pictures
    (given,) = calls
    return given


def test_the_heat_map_is_that_of_the_round_in_the_table(full, tmp_path, monkeypatch):
    """The test scores are round 15's, whose weights are 15/20; an unfinished run shows its last scores, round 5's."""
    assert drawn(full[0], "plot_weights", monkeypatch)["values"] == [[0.75, 0.25]] * 4
    monkeypatch.undo()
    unfinished = write_run(tmp_path / "run", rounds=7, final=False)
    assert drawn(unfinished, "plot_weights", monkeypatch)["values"] == [[0.25, 0.75]] * 4


def test_the_validation_loss_is_a_line_among_the_training_losses(full, monkeypatch):
    """1, 1.25, 1.5 and 1.75 have mean 1.375; in round 5 one client's is not finite, so there is no mean."""
    given = drawn(full[0], "plot_losses", monkeypatch)
    assert given["split"] == "validation" and given["scored"] == ([10, 15, 20], [1.375] * 3)


def test_drop_outs_are_no_failures(tmp_path, undrawn):
    """They have a column, and a place in the sentence, only where there are some."""
    run = write_run(tmp_path / "run", rounds=3)
    assert "dropped out" not in read(run).text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "round":
            line["dropped_out"] = 1
    lines += [{"kind": "drop-out", "round": number, "client": "snli"} for number in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = read(run)
    assert "arrived: 12, dropped out: 3, uploads refused: 0, clients failed: 0." in page.text
    assert "dropped out failures snli 40.0 1.000 1.375 3 300 4.5 kB 7.5 kB 3 0 cola" in page.text


def test_the_file_needs_nothing_from_outside(full):
    run, page = full
    pictures = [address for address in page.addresses if address.startswith("data:image/png;base64,")]
    assert len(set(pictures)) == len(pictures) == 4
    assert all(base64.b64decode(address.partition(",")[2]).startswith(b"\x89PNG") for address in pictures)
    assert all(address.startswith("data:") for address in page.addresses)
    assert page.tags.count("script") == SCRIPTS
    html = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search("https?:", html) and "url(" not in html and "@import" not in html


def test_the_report_is_the_only_thing_written_and_always_the_same(full):
    run, _ = full
    first = (run / "report.html").read_bytes()
    assert {path.name for path in run.iterdir()} == {"config.yaml", "metrics.jsonl", "timing.jsonl", "report.html"}
    assert write_report(run).read_bytes() == first


def test_unfinished_run_with_a_cut_line(tmp_path, undrawn):
    page = read(write_run(tmp_path / "run", rounds=7, final=False, tail='{"kind": "client", "client": "\udcc3'))
    assert "Not finished: 7 of 20 rounds, no final score yet." in page.text
    assert "The last line of metrics.jsonl is incomplete" in page.text
    assert "rouge1 (0–100) on the validation split, models of round 5: not the final score." in page.text


def test_run_that_has_only_its_configuration(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    page = read(tmp_path)
    assert "Not finished: 0 of 20 rounds" in page.text
    assert "img" not in page.tags


def test_run_without_timing_and_merging_weights(tmp_path, unsaved):
    run = write_run(tmp_path / "run")
    (run / "timing.jsonl").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"server"' not in line))
    page = read(run)
    assert "Merging weights" not in page.text and "part of the rounds" not in page.text
    assert page.tags.count("img") == 3


def test_names_are_text_and_never_markup(tmp_path, unsaved):
    names = ["<script>alert(1)</script>", 'a"&b', "$\\frac{1}$ 100%", "北京 клиент", "x" * 200]
    page = read(write_run(tmp_path / "run", clients=names))
    assert page.tags.count("script") == SCRIPTS
    for name in names:
        assert name in page.text


def test_damaged_files(tmp_path):
    with pytest.raises(UserError, match="is not a run folder: it has no config.yaml"):
        write_report(tmp_path / "nowhere")
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"kind": "round"\n{}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 1, is damaged"):
        write_report(run)
    for text in ("rounds: 3\n", "a: [\n", ""):
        (run / "config.yaml").write_text(text)
        with pytest.raises(UserError, match="config.yaml is damaged|reads format 1"):
            write_report(run)
    assert not (run / "report.html").exists()


def test_rows_of_a_group_are_drawn_together(tmp_path):
    groups = ["sort", "count", "sort"]
    weights = [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]
    drawn = plots.plot_weights(tmp_path / "w.svg", ["a-1", "$b_{$", "a-2"], weights, groups=groups)
    texts = re.findall(r"<!-- (.*?) -->", drawn.read_text(encoding="utf-8"))  # matplotlib notes each text in a comment
    assert [text for text in texts if text in ("a-1", "$b_{$", "a-2")] == ["a-1", "a-2", "$b_{$"]
    assert [text for text in texts if text in groups] == ["sort", "count"]
    numbers = [text for text in texts if re.fullmatch(r"0\.\d\d", text)]
    assert numbers == ["0.90", "0.10", "0.70", "0.30", "0.20", "0.80"]


def local_beside(run, **changes):
    """A finished run of local beside another, whose tested round had 55 on validation and 50 on test."""
    folder = run.parent / "local"
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"method": {"name": "local"}} | changes
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    scores = [(2, "validation", 20.0), (4, "validation", 55.0), (4, "test", 50.0)]
    known = {"kind": "score", "metric": "rouge1", "clients": {"snli": 50.0}, "std": 0.0, "worst_half": 40.0,
             "losses": {}}  # fmt: skip
    lines = [{**known, "round": round, "split": split, "mean": mean} for round, split, mean in scores]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"round": 4, "rounds": 4, "method": "local", "scores": {}}))


def comparable_run(folder):
    run = write_run(folder)
    (run / "config.yaml").write_text(CONFIG + "adapter: null\nlocal: {steps: 3}\neval: {every: 2}\n")
    return run


def test_local_and_the_base_are_lines_to_compare_with(tmp_path, monkeypatch):
    run = comparable_run(tmp_path / "run")
    local_beside(run)
    lines = (run / "metrics.jsonl").read_text()
    base = {"kind": "score", "round": 0, "split": "validation", "metric": "rouge1", "mean": 12.0, "worst_half": 9.0}
    (run / "metrics.jsonl").write_text(
        json.dumps(base | {"std": 0.0, "clients": {"snli": 12.0}, "loss": None, "losses": {}}) + "\n" + lines
    )
    assert drawn(run, "plot_scores", monkeypatch)["references"] == {"the base alone": 12.0, "local": 55.0}
    monkeypatch.undo()
    without.pictures(monkeypatch)
    page = read(run)
    assert "local 50.0" in page.text
    assert "The dotted lines are the base without any adapter and clients that each train alone" in page.text


def test_another_local_run_is_nothing_to_compare_with(tmp_path, undrawn):
    run = comparable_run(tmp_path / "run")
    local_beside(run, seed=4)
    assert "dotted" not in read(run).text and "local 50.0" not in read(run).text


def test_samples_are_text_and_under_the_first_client_open(tmp_path, undrawn):
    run = write_run(tmp_path / "run", rounds=5)
    line = {"prompt": "<i>2 + 2?</i>", "references": ["4", "four"], "base": "", "answer": "4"}
    lines = [{"client": client, **line} for client in ("snli", "cola")]
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    page = read(run)
    assert "prompt <i>2 + 2?</i> reference 4 | four the base (nothing) this model 4" in page.text
    assert "The first test examples of the first 2 of 4 clients" in page.text
    assert page.tags.count("details") == 4  # two clients, the time, and the configuration


SYSTEM = "You are a helpful clerk."


def sampled(run, lines):
    told = [json.dumps(each | {"references": ["r"], "base": "b", "answer": "a"}) + "\n" for each in lines]
    (run / "samples.jsonl").write_text("".join(told))
    return read(run)


def test_the_template_stands_once_and_not_with_each_sample(tmp_path, undrawn):
    run, template = write_run(tmp_path / "run", rounds=5), f"system\n{SYSTEM}\nuser\n{{prompt}}\nassistant\n"
    lines = [
        {
            "client": client,
            "prompt": template.format(prompt=text),
            "text": text,
            "template": template,
            "references": ["r"],
        }
        for client in ("snli", "cola")
        for text in ("Who?", "When?")
    ]
    page = sampled(run, lines)
    assert page.text.count(SYSTEM) == 1 and "prompt Who? reference r the base b this model a" in page.text
    assert "The template around every prompt" in page.text


def test_a_system_text_of_the_data_stands_once_per_client(tmp_path, undrawn):
    """Once for all where all have the same, and with each sample where a client has several."""
    run = write_run(tmp_path / "run", rounds=5)

    def lines(*systems):
        start = {"template": "{system} {prompt}", "text": "Who?"}
        return [
            start | {"client": client, "prompt": f"{system} Who?", "system": system}
            for client, own in zip(("snli", "cola"), systems, strict=True)
            for system in own
        ]

    page = sampled(run, lines(["One."] * 2, ["Two."] * 2))
    assert page.text.count("One.") == page.text.count("Two.") == 1 and "Its system text" in page.text
    page = sampled(run, lines(["One."] * 2, ["One."] * 2))
    assert page.text.count("One.") == 1 and "The data's system text, which stands before every prompt One." in page.text
    page = sampled(run, lines(["One.", "Two."], ["One."] * 2))
    assert "system One. prompt Who?" in page.text and "system Two. prompt Who?" in page.text


def test_the_data_have_their_name_in_the_title(tmp_path, undrawn):
    run = write_run(tmp_path / "run", rounds=3)
    for path, name in (("/some where/clinics", "clinics"), ("hf://owner/wards", "owner/wards")):
        (run / "config.yaml").write_text(CONFIG.replace("{name: flan, path: null}", f"{{name: files, path: {path}}}"))
        page = read(run)
        assert f"fedmerge on {name} with some/base-3B run run · task files" in page.text


def test_why_there_are_no_samples(tmp_path, undrawn):
    run = write_run(tmp_path / "run", rounds=5)
    assert "Sample predictions" not in read(run).text
    (run / "network.json").write_text("{}")
    assert "because the clients' texts stay on their own machines" in read(run).text
    (run / "config.yaml").write_text(CONFIG + "privacy: {clip: 1.0}\n")
    assert "because privacy.clip is set" in read(run).text


def test_where_it_was_made_and_how_its_models_are_used(tmp_path, undrawn):
    run = write_run(tmp_path / "run", rounds=5)
    (run / "environment.json").write_text(json.dumps({"device": "cuda:0", "hardware": "H200", "torch": "2.9"}))
    (run / "timing.jsonl").write_text('{"round": 1, "seconds": 1, "parts": {}, "ended": "2026-01-02T03:04:05+00:00"}\n')
    card = run / "adapters/snli/README.md"
    card.parent.mkdir(parents=True)
    card.write_text('# Adapter\n\n```python\nmodel = load("path/to/this/folder")\n```\n\n```yaml\na: 1\n```\n')
    page = read(run)
    assert "ended 2026-01-02 03:04:05 UTC device cuda:0 hardware H200 torch 2.9" in page.text
    assert "model = load('run/adapters/snli')" in page.text


def test_a_run_that_is_tested_during_training_is_not_finished_by_that(tmp_path, undrawn):
    run = write_run(tmp_path / "run", rounds=7, final=False)
    (run / "config.yaml").write_text(CONFIG + "eval: {during: test}\n")
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace('"validation"', '"test"'))
    text = read(run).text
    assert "Not finished: 7 of 20 rounds, no final score yet." in text and ": not the final score" in text
