"""Whom `init` names, and how long it waits for the Hub."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from llm_fed.commands import known_base


def federation(folder: Path, **sizes: int) -> Path:
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


def test_a_hub_that_cannot_be_reached_is_asked_once(llm_fed, tmp_path, online, hub, monkeypatch):
    data = federation(tmp_path / "d", north=30, south=30)
    read = []
    monkeypatch.setattr(
        known_base, "_read", lambda name, id, local: read.append(local) or known_base.KnownBase(problem="-")
    )

    def refuse():
        raise OSError("Name or service not known")

    hub(refuse)
    said = llm_fed("init", data, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and read == [True]
    assert "looking up Qwen/Qwen3-0.6B on the Hub" in said.err and "--base FOLDER needs no network" in said.err
    assert "https://huggingface.co cannot be reached (Name or service not known)" in said.out
    text = (tmp_path / "c.yaml").read_text()
    assert "template: chat" in text and "max_length" not in text


def test_a_hub_that_answers_is_read_from(online, hub, monkeypatch):
    read = []
    monkeypatch.setattr(
        known_base, "_read", lambda name, id, local: read.append(local) or known_base.KnownBase(problem="-")
    )
    hub(lambda: None)
    lines: list[str] = []
    assert known_base.look_up("a/b", lines.append).problem == "-"
    assert read == [True, False] and len(lines) == 1


def test_offline_the_hub_is_not_asked(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub(lambda: pytest.fail("it was asked"))
    assert "HF_HUB_OFFLINE is set" in known_base.look_up("a/b", pytest.fail).problem


def test_a_folder_needs_no_hub(small, hub):
    hub(lambda: pytest.fail("it was asked"))
    assert known_base.look_up(str(small.base), pytest.fail).config is not None


@pytest.mark.parametrize("sizes", [{"north": 40}, {"north": 40, "south": 40}])
def test_a_federation_of_one_client_is_named(small, llm_fed, tmp_path, sizes):
    data = federation(tmp_path / "d", **sizes)
    told = "there is only one client, north, so nothing is federated"
    said = llm_fed("init", data, "--base", small.base, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and (told in said.out) == (len(sizes) == 1)
    assert "method: {name: local}" in (tmp_path / "c.yaml").read_text()
    assert ("compare" in said.out) == (len(sizes) > 1)
    ran = llm_fed("run", tmp_path / "c.yaml", "--dry-run")
    assert ran.code == 0 and (told in ran.err) == (len(sizes) == 1)


@pytest.mark.parametrize("count", [1, 20])
def test_a_client_of_one_example_is_named(small, llm_fed, tmp_path, count):
    data = federation(tmp_path / "d", north=20, south=20)
    for client in ("north", "south"):
        (data / f"{client}.jsonl").rename(data / f"{client}-train.jsonl")
        (data / f"{client}-test.jsonl").write_text('{"question": "w1 w1", "answer": "w2"}\n')
    kept = (data / "south-train.jsonl").read_text().splitlines(keepends=True)[:count]
    (data / "south-train.jsonl").write_text("".join(kept))
    said = llm_fed("init", data, "--base", small.base, "--out", tmp_path / "c.yaml")
    assert said.code == 0 and ("south (1) has fewer than" in said.out) == (count == 1)
    ran = llm_fed("run", tmp_path / "c.yaml", "--dry-run")
    assert ran.code == 0 and ("train on a single example (1 of 2): south" in ran.err) == (count == 1)
