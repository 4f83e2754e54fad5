"""`llm-fed audit`: clean runs give no finding, injected faults are found, and the chain survives a resume."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit_faults
import audit_runs
import every
import pytest
import yaml
from rich.console import Console

from llm_fed.audit.audit import audit
from llm_fed.audit.replay import Replay
from llm_fed.basics import checksum
from llm_fed.runs import digests
from llm_fed.runs.folder import take_down
from llm_fed.runs.reading import read_config
from llm_fed.runs.tracking import Reporter

ROWS = "ada/train.jsonl"  # of the data of all runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Any, Path]]:
    """Configuration and folder of a clean run of each family, made when it is asked for; not to be changed."""
    place = tmp_path_factory.mktemp("runs")

    class Made(dict[str, tuple[Any, Path]]):
        def __missing__(self, family: str) -> tuple[Any, Path]:
            config = audit_runs.configured(family, place / "data")
            self[family] = config, audit_runs.train(family, config, place / family)
            return self[family]

    return Made()


@pytest.mark.parametrize(
    "family",
    [
        "fedmerge",
        "feddle, late answers",
        "fedproto, image models",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fedit", "local", "scaffold", "half of the clients", "flora, unequal ranks")
        ),
    ],
)
def test_a_clean_run_gives_no_finding(runs, family):
    config, folder = runs[family]
    found = audit_runs.audited(folder, config)
    assert (found.findings, found.unchecked) == ([], [])
    rounds = ", ".join(str(round + 1) for round in range(config.rounds))
    assert f"rounds {rounds}, trained again" in found.checked


def test_a_resumed_run_has_the_same_digests_and_no_finding(runs):
    (_, whole), (config, resumed) = runs["fedit"], runs["resumed"]
    assert (resumed / digests.FILE).read_bytes() == (whole / digests.FILE).read_bytes()
    assert not audit_runs.audited(resumed, config).findings


@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 20))])
def test_an_injected_fault_is_found_and_named(runs, tmp_path, number):
    kind, family = (
        audit_faults.KINDS[number % 6],
        ("fedit", "fedmerge", "fedproto, image models", "scaffold")[number % 4],
    )
    config, clean = runs[family]
    draw, fault = random.Random(number), None
    while fault is None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        fault = audit_faults.inject(kind, family, config, clean, tmp_path / "run", draw)
    found = audit_runs.audited(tmp_path / "run", config)
    assert fault.named(found), (kind, family, fault, found.findings)


def test_one_clients_fault_is_no_finding_about_another(runs, tmp_path):
    """Nor are the rounds that follow from it: they cannot be made again, which is said."""
    config, clean = runs["fedit"]
    fault = audit_faults.inject("stale message", "fedit", config, clean, tmp_path / "run", random.Random(1))
    found = audit_runs.audited(tmp_path / "run", config)
    assert {(item.round, item.client) for item in found.findings} == {(fault.round, fault.client)}
    assert any("the server's step of round" in line for line in found.unchecked)


def test_a_line_of_the_chain_cannot_be_changed_alone(runs, tmp_path):
    config, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    lines = (folder / digests.FILE).read_text().splitlines()
    line = json.loads(lines[2])
    line["uploads"]["ada"] = line["uploads"]["bob"]
    (folder / digests.FILE).write_text("\n".join([*lines[:2], json.dumps(line), *lines[3:], ""]))
    kinds = {(item.round, item.client, item.kind) for item in audit_runs.audited(folder, config).findings}
    assert {(2, "", "chain"), (2, "ada", "client pass")} <= kinds


@pytest.mark.parametrize("name", ["fedmerge", "feddpa", "local", "fedem", "potara"])
def test_a_run_whose_method_was_changed_by_hand_is_found(runs, tmp_path, name):
    """The states are those of another method, which then may rely on what they do not have."""
    _, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"method": {"name": name}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = audit(folder, sample=1, reporter=Reporter(Console(quiet=True)))
    assert found.findings


@pytest.mark.parametrize("round", [2, 3])
def test_scores_that_are_missing_are_found_without_training(runs, tmp_path, round):
    """Of a round that was to be scored, and of the last one, which always is."""
    config, clean = runs["scored every second round"]
    folder = shutil.copytree(clean, tmp_path / "run")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if f'"round": {round}, "split": "validation"' not in line))
    found = audit(folder, sample=0, reporter=Reporter(Console(quiet=True))).findings
    assert (round, "", "scores") in {(item.round, item.client, item.kind) for item in found}
    assert not [item for item in found if item.kind == "scores" and item.round != round]


@pytest.mark.parametrize("family", every.quick(["fedit", "fedsa", "fedbn, image models"], ["fedsa"]))
def test_elsewhere_a_clean_run_gives_no_finding(runs, tmp_path, family):
    config, clean = runs[family]
    folder = shutil.copytree(clean, tmp_path / "run")
    found = audit_runs.audited(folder, config, elsewhere=1)
    assert not found.findings and not any("trained again" in line and "within" not in line for line in found.checked)
    assert any("another environment" in line and "torch another ->" in line for line in found.unchecked)
    assert list(found.drift) == ["run 0-2", "run 2-3"]


@pytest.mark.parametrize(("share", "found"), [(0.009, []), (0.011, [(3, "server")])])
def test_elsewhere_a_round_that_ends_aside_is_found_from_the_tolerance_on(runs, tmp_path, monkeypatch, share, found):
    """Each round of the replay ends a share of the server's step too far."""
    config, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    real = Replay.next

    def further(self, lr):
        before = self.progress.state
        said = real(self, lr)
        self.progress.state += share * (self.progress.state - before)
        return said

    monkeypatch.setattr(Replay, "next", further)
    outcome = audit_runs.audited(folder, config, elsewhere=1)
    assert outcome.drift["run 2-3"] == pytest.approx(share, rel=1e-3)
    assert [(item.round, item.client) for item in outcome.findings if item.round == 3] == found


@pytest.mark.parametrize(("kind", "family"), [("no broadcast", "fedit"), ("swapped clients", "fedmerge")])
def test_elsewhere_a_fault_between_kept_checkpoints_is_found(runs, tmp_path, kind, family):
    config, clean = runs[family]
    fault = audit_faults.inject(kind, family, config, clean, tmp_path / "run", random.Random(1))
    found = audit_runs.audited(tmp_path / "run", config, elsewhere=1)
    assert fault and ("server", "server step") in {(item.client, item.kind) for item in found.findings}


def test_elsewhere_a_score_that_does_not_follow_is_found(runs, tmp_path):
    """Also where the chain was written anew to match."""
    config, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if (line["kind"], line["round"], line.get("split")) == ("score", 2, "validation"):
            line["losses"]["ada"] *= 0.98
            line["mean"] += 60
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = audit_runs.audited(folder, config, elsewhere=1).findings
    assert {(item.round, item.client) for item in found if item.kind == "scores"} == {(2, "ada"), (2, "")}


def test_a_run_that_was_continued_elsewhere_is_not_expected_to_be_equal_to_the_last_bit(runs, tmp_path):
    config, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    path = folder / "environment.json"
    said = checksum.checked(json.loads(path.read_text()))
    path.write_text(json.dumps(checksum.added({**said, "continued": [{"torch": "another"}]})))
    take_down(folder, {path.name: digests.of_file(path)})
    found = audit_runs.audited(folder, config)
    assert not found.findings and any("was continued in another environment" in line for line in found.unchecked)
    assert list(found.drift) == ["run 0-2", "run 2-3"]


def test_the_command(llm_fed, finished, tmp_path):
    said = llm_fed("audit", finished, "--rounds", "2")
    assert said.code == 0 and "rounds 1, 2, trained again" in said.out and said.out.endswith("nothing differs\n")
    folder = shutil.copytree(finished, tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"steps": 8', '"steps": 9', 1))
    said = llm_fed("audit", folder, "--sample", 0, "--json")
    (finding,) = json.loads(said.out)["findings"]
    assert said.code == 1 and (finding["round"], finding["kind"]) == (1, "chain")
    llm_fed("audit", finished, "--rounds", "9").assert_refused("--rounds 9", "digests of rounds 1 to 3")
    llm_fed("audit", finished, "--rounds", "9", "--all").assert_refused("one of --rounds, --sample and --all")
    llm_fed("audit", finished, "--rounds", "x").assert_refused("--rounds x is not a list of rounds")
    (folder / digests.FILE).unlink()
    said = llm_fed("audit", folder)
    assert said.code == 1 and "digests.jsonl was there when this checkpoint was written" in said.out


def _files(folder: Path) -> list[str]:
    """All files of a run but locks, one of those that only differ in their client or round."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    alike = {re.sub(r"adapters/\w+|rows/.*|\d+", "", name): name for name in names if not name.startswith(".lock")}
    return sorted(alike.values())


def test_every_file_of_a_run_counts(runs, tmp_path):
    """Each in turn changed, which differs; removed or added, which is not verified; never silence."""
    config, clean = runs["fedit"]
    for name in _files(clean):
        for change in ("changed", "removed", "added"):
            folder = shutil.copytree(clean, tmp_path / "run")
            path = folder / name
            if change == "changed":
                data = path.read_bytes()
                path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
            elif change == "removed":
                path.unlink()
            else:
                path.with_name(f"more-{path.name}").write_bytes(path.read_bytes())
            found = audit(folder, sample=0, reporter=Reporter(Console(quiet=True)), base=audit_runs.base_of(config))
            assert found.code in ((1,) if change == "changed" else (1, 3)), (name, change, found)
            if change == "added":
                assert any(f"more-{path.name}" in line for line in found.unchecked) and not found.findings
            shutil.rmtree(folder)


def _with_another_torch(folder: Path) -> None:
    said = checksum.checked(json.loads((folder / "environment.json").read_text()))
    (folder / "environment.json").write_text(json.dumps(checksum.added(said | {"torch": "another"})))


def _with_another_alpha(folder: Path) -> None:
    path = folder / "adapters/ada/adapter_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"lora_alpha": 10 * said["lora_alpha"]}))


def _with_another_row(folder: Path) -> None:
    with (Path(read_config(folder).task.path or "") / ROWS).open("a") as file:
        file.write('{"instruction": "w1 w2", "output": "w4 w5"}\n')


def _with_a_line_more(name: str) -> Callable[[Path], Any]:
    """A text that somebody else has written into, at its end or before the end of its JSON object."""

    def forge(folder: Path) -> None:
        path = folder / name
        data = path.read_bytes().rstrip()
        path.write_bytes(data[:-1] + b" }" if data.endswith(b"}") else data + b" ")

    return forge


def _signed_anew(folder: Path) -> None:
    """Whoever changes a file can change its digest: then it does not follow from the rounds."""
    _with_another_alpha(folder)
    path = folder / "adapters/ada/adapter_config.json"
    take_down(folder, {"adapters/ada/adapter_config.json": digests.of_file(path)})


@pytest.mark.parametrize(
    ("forge", "code", "said"),
    [
        (lambda folder: None, 0, "rounds 1, 2, 3, trained again"),
        (lambda folder: (folder / "network.json").write_text("{}"), 3, "network.json: the run has not written it"),
        (_with_another_torch, 1, "environment.json is not what the run wrote"),
        (lambda folder: shutil.rmtree(folder / "checkpoints/round-0002"), 3, "round-0002/manifest.json: it is missing"),
        (_with_another_alpha, 1, "adapter_config.json is not what the run wrote"),
        (_signed_anew, 1, "the exported model does not follow"),
        (lambda folder: (folder / digests.DELIVERED).unlink(), 3, "their digests are in delivered.json"),
        (_with_another_row, 3, "the data have changed since the run (1 row is new)"),
        *(
            (_with_a_line_more(name), 1, f"{name} is not what the run wrote")
            for name in (
                "adapters/ada/prompt.json", "adapters/ada/README.md", "test_scores.jsonl", "samples.jsonl",
                "report.html", "summary.json",
            )
        ),
    ],
)  # fmt: skip
def test_a_forged_folder_is_told(runs, tmp_path, forge, code, said):
    config, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    rows = Path(config.task.path or "") / ROWS
    kept = rows.read_bytes()
    forge(folder)
    found = audit_runs.audited(folder, config)
    rows.write_bytes(kept)
    text = "\n".join([*found.checked, *found.unchecked, *(item.what for item in found.findings)])
    assert found.code == code and said in text, found


def test_nobody_knows_beforehand_which_rounds_are_trained_again(runs):
    config, clean = runs["half of the clients"]
    quiet = Reporter(Console(quiet=True))
    drawn = {tuple(audit(clean, sample=1, reporter=quiet, base=audit_runs.base_of(config)).checked) for _ in range(12)}
    assert len(drawn) > 1


def test_an_audit_writes_nothing(runs, tmp_path):
    """So it needs no lock, and reads a colleague's run."""
    config, clean = runs["fedit"]
    folder = shutil.copytree(clean, tmp_path / "run")
    for path in folder.glob(".lock*"):
        path.unlink()
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    assert audit_runs.audited(folder, config).code == 0
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before
