"""`llm-fed forget`: the run is that of the others alone, bit for bit, and nothing in its folder is of the client."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import equal_runs
import pytest
from rich.console import Console

from llm_fed.audit.audit import audit
from llm_fed.basics import documents, files
from llm_fed.basics.errors import RunError, UserError
from llm_fed.commands import forget as forgetting
from llm_fed.experiment import run as experiment
from llm_fed.experiment import splits
from llm_fed.experiment.simulation import Simulation
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.lock import Lock
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict

pytestmark = pytest.mark.usefixtures("quick")
WORDS = "w10 w11"  # cyd's answers


class Killed(BaseException):
    pass


def train(small, folder: Path, known=None, **changes):
    config = from_dict(small.tree(**{"rounds": 2, "eval": {"every": 2}, **changes}))
    experiment.train(config, folder, reporter=Reporter(Console(quiet=True)), mode=Simulation(known=known))


def forget(folder: Path, client: str = "cyd", agreed=lambda cost: True) -> list[str]:
    return forgetting.forget(folder, client, agreed, Reporter(Console(quiet=True)))


@pytest.fixture
def own(small, tmp_path):
    """The small federation, with data of its own."""
    return replace(small, data=shutil.copytree(small.data, tmp_path / "data"))


def everything(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    skipped = ("timing.jsonl", "delivered.json", "report.html", ".lock")  # which tell times
    return {name: path.read_bytes() for name, path in found.items() if not path.name.startswith(skipped)}


def one_file(own) -> None:
    """The rows of all clients in one file, without splits, so that what is held out goes by hashes."""
    rows = [
        {**json.loads(line), "who": path.parent.name}
        for path in sorted(own.data.rglob("*.jsonl")) for line in path.read_text().splitlines()
    ]  # fmt: skip
    shutil.rmtree(own.data)
    own.data.mkdir()
    (own.data / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def leave_out(own, client: str) -> None:
    """The data as they are once a client has left."""
    shutil.rmtree(own.data / client, ignore_errors=True)
    for path in own.data.glob("all.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["who"] != client))


# Who is forgotten, and whether the rows were deleted before; with which settings the run began, and which of these the
# others have where they go by places or names.
CASES = {
    "all take part": ("cyd", True, {}, {}),
    "half of them": ("bob", False, {"participation": 0.5, "rounds": 4, "method": {"name": "fedsa"}}, {}),
    "unequal ranks": (
        "bob", False,
        {"method": {"name": "flora"}, "adapter": {"rank": [1, 2, 3]}, "export": {"clients": ["bob", "cyd"]}},
        {"adapter": {"rank": [1, 3]}, "export": {"clients": ["cyd"]}},
    ),
    "one file": ("cyd", False, {"task": {"columns": {"client": "who"}, "validation": 0.3}}, {}),
    "one file, deleted": ("cyd", True, {"task": {"columns": {"client": "who"}, "validation": 0.3}}, {}),
    "server's examples": ("ada", False, {"method": {"name": "fed+ft"}, "task": {"server": {"examples": 2}}}, {}),
    "two runs merged": ("cyd", False, {"method": {"name": "mean"}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_run_is_that_of_the_others_alone(own, tmp_path, name):
    """As one that began with these alone, on data without the client's; and their rows stay in their splits."""
    client, deleted, settings, places = CASES[name]
    if "one file" in name:
        one_file(own)
    train(own, tmp_path / "run", **settings)
    before = splits.recall(tmp_path / "run")
    if deleted:
        leave_out(own, client)
    forget(tmp_path / "run", client)
    leave_out(own, client)
    task = {**settings.get("task", {}), "groups": [other for other in ("ada", "bob", "cyd") if other != client]}
    known = before if name == "server's examples" else None  # which it would draw anew, from what others test
    train(own, tmp_path / "fresh/run", known, **{**settings, **places, "task": task})
    found, fresh = everything(tmp_path / "run"), everything(tmp_path / "fresh/run")
    if name == "one file":  # which was another one
        found["inputs.json"] = fresh["inputs.json"]
    assert [path for path in found.keys() | fresh if found.get(path) != fresh.get(path)] == []
    record = splits.recall(tmp_path / "run")
    assert (record.splits == before.splits_of(record.digests) | 16).all()
    assert client not in {path.name for path in tmp_path.rglob("*") if path.is_dir()}
    assert {path.name for path in tmp_path.iterdir()} == {"data", "run", "fresh"}


def test_nothing_in_the_folder_is_of_the_client(own, tmp_path, llm_fed):
    settings = {"method": {"name": "fedsa"}, "report": {"samples": 3}}  # which remembers at the clients, too
    (own.data / "cyd/extra.jsonl").write_text("not JSON\n")
    with open(own.data / "cyd/train.jsonl", "a") as file:
        file.write("not JSON\n")
    train(own, tmp_path / "run", **settings, task={"bad_rows": "skip"})
    old = tmp_path / "run"
    digests = [json.loads(line) for line in (old / "digests.jsonl").read_text().splitlines()]
    hidden = [b"cyd", WORDS.encode()]
    hidden += [
        line[kind]["cyd"].encode() for line in digests for kind in ("uploads", "memory") if "cyd" in line.get(kind, {})
    ]
    for path in [*(old / "adapters/cyd").glob("*.safetensors")]:
        hidden.append(path.read_bytes()[-64:])
    assert len(hidden) > 5 and all(any(each in data for data in everything(old).values()) for each in hidden[:3])
    said = llm_fed("forget", old, "--client", "cyd")
    assert said.code == 0 and "2 rounds with 2 clients, about 8 steps of theirs in all" in said.err.splitlines()[0]
    assert "cannot take back" in said.out and "llm-fed push" in said.out and str(own.data) in said.out
    for name, data in everything(old).items() | {"names": "\n".join(everything(old)).encode()}.items():
        assert not [each for each in hidden if each in data], name
    report = audit(old, every=True)
    assert report.code == 0 and "rounds 1, 2, trained again" in report.checked
    llm_fed("forget", old, "--client", "cyd").assert_refused("--client='cyd' is unknown", "known: ada, bob")


def edited(folder: Path, **changes) -> None:
    """The configuration, with other settings than it began with."""
    tree = documents.load((folder / "config.yaml").read_text())
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) else value
    (folder / "config.yaml").write_text(documents.dump(tree))


def written(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def private(folder: Path) -> None:
    edited(folder, privacy={"clip": 1.0, "noise": 1.0})
    written(folder, "environment.json", json.loads((folder / "environment.json").read_text()) | {"secret": "0" * 16})
    here = json.loads((folder / "environment.json").read_text())
    here.pop("checksum", None)
    written(folder, "environment.json", here)


def another_row(folder: Path) -> None:
    with open(folder.parent / "data/ada/train.jsonl", "a") as file:
        file.write(json.dumps({"instruction": "w1", "output": "w2"}) + "\n")


REFUSED = {
    "over a network": (lambda run: written(run, "network.json", {}), "over a network"),
    "not finished": (lambda run: (run / "summary.json").unlink(), "has not come to its end"),
    "no rows known": (lambda run: (run / "splits.json").unlink(), "has no splits.json"),
    "no settings": (lambda run: (run / "config.yaml").unlink(), "has no config.yaml"),
    "damaged settings": (lambda run: (run / "config.yaml").write_text("rounds: ["), "config.yaml is damaged"),
    "of a program": (partial(edited, task={"name": "object::data"}), "no command can load it"),
    "dealt": (partial(edited, task={"partition": {"kind": "iid", "clients": 3}}), "out of the data"),
    "private": (private, "spend their epsilon twice"),
    "nobody else": (lambda run: only_cyd(run), "is the only client of"),
    "too few for a sum": (partial(edited, privacy={"secure": True}), "adds up 3 to 65,535 clients"),
    "ended by hand": (lambda run: written(run, "ended.json", {"round": 1, "why": "Ctrl-C"}), "--continue"),
    "begun from another": (lambda run: edited(run, adapter={"start": str(run)}), "forget it there first"),
    "another's file": (lambda run: (run / "notes.txt").touch(), "notes.txt in it is not of the run"),
    "other rows": (another_row, "1 row is new"),
    "another base": (lambda run: edited(run, base={"revision": "1"}) or base_changed(run), "is not the base any more"),
}  # fmt: skip


def only_cyd(folder: Path) -> None:
    known = json.loads((folder / "splits.json").read_text())
    known.pop("checksum", None)
    written(folder, "splits.json", known | {"clients": ["cyd"]})


def base_changed(folder: Path) -> None:
    inputs = json.loads((folder / "inputs.json").read_text())
    inputs["base.name"]["config.json"] = "0" * 64
    inputs.pop("checksum", None)
    written(folder, "inputs.json", inputs)


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    own = replace(small, data=shutil.copytree(small.data, folder / "data"))
    train(own, folder / "run")
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused_and_stays(trained, tmp_path, name):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    edited(tmp_path / "run", task={"path": str(tmp_path / "data")})
    change, said = REFUSED[name]
    change(tmp_path / "run")
    before = everything(tmp_path)
    with pytest.raises(UserError, match=said):
        forget(tmp_path / "run")
    assert everything(tmp_path) == before and {path.name for path in tmp_path.iterdir()} == {"data", "run"}


def test_a_run_in_progress_and_one_that_is_not_agreed_to_stay(trained, tmp_path):
    before, lock = everything(trained), Lock(trained / "run")
    lock.acquire(print)
    with pytest.raises(RunError, match="is writing to .*run; wait for its end"):
        forget(trained / "run")
    lock.release()
    costs: list[str] = []
    assert forget(trained / "run", agreed=costs.append) == []
    assert "from the start without cyd: 2 rounds" in costs[0] and everything(trained) == before


def kill(*given, **more):
    raise Killed


def renaming_the_run(place: int):
    """The swap is two renames: the first is of the run (0), and the second into its place (1)."""
    rename = os.replace
    return lambda *paths: kill() if str(paths[place]).endswith("/run") else rename(*paths)


def deleting_the_old_one(first: str = ""):
    """Killed after this file or empty folder of the old run is deleted, and nothing else of it."""

    def remove(path: Path) -> None:
        if (path / ".run.replaced").exists():
            if first:
                files.remove(path / first)
            kill()
        files.remove(path)

    return remove


KILLS = {
    "after a round": (Checkpoints, "prune", kill),
    "before the swap": (os, "replace", renaming_the_run(0)),
    "between two renames": (os, "replace", renaming_the_run(1)),
    "before the names are on the disk": (forgetting, "sync_folder", kill),
    "before the old one is deleted": (forgetting, "remove", deleting_the_old_one()),
    "while the old one is deleted": (forgetting, "remove", deleting_the_old_one(".run.replaced/config.yaml")),
    "before an empty folder is deleted": (forgetting, "remove", deleting_the_old_one(".run.replaced")),
}


@pytest.mark.parametrize("point", KILLS)
def test_killed_anywhere_nothing_is_lost_and_the_same_command_ends_the_same(trained, tmp_path, monkeypatch, point):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    before = everything(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(*KILLS[point])
        with pytest.raises(Killed):
            forget(tmp_path / "run")
    if point in ("after a round", "before the swap"):
        assert everything(tmp_path / "run") == before
    if point == "before the swap":
        with pytest.raises(UserError, match="--client='cid' is unknown .*'cyd'"):
            forget(tmp_path / "run", "cid")
    assert forget(tmp_path / "run")
    wanted = shutil.copytree(trained, tmp_path / "whole")
    forget(wanted / "run")
    assert equal_runs.files(tmp_path / "run") == equal_runs.files(wanted / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "run", "whole"}
