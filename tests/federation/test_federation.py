"""The round loop and its checkpoints, on a federation with closed-form clients (tests/support/toy.py)."""

import json
import os
import shutil
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from toy_rounds import TARGETS, go

from llm_fed.basics.errors import RunError, UserError
from llm_fed.federation.clients import Messages
from llm_fed.federation.progress import restore
from llm_fed.method import Method
from llm_fed.methods.cfl import CFL
from llm_fed.methods.fedit import FedIT
from llm_fed.methods.local import Local
from llm_fed.runs.checkpoint import Checkpoints, CheckpointWarning
from llm_fed.runs.folder import Run
from llm_fed.scoring.scores import summarize


def test_fedit_takes_the_weighted_mean_of_what_clients_trained(tmp_path):
    """Two half steps go three quarters of the way: theta_i = x + 3/4 (t_i - x). With n = 1, 2, 3 the mean target is
    (1 * 1 + 2 * 2 + 3 * 4) / 6 = 17/6, so one round from a zero entry gives 3/4 * 17/6 = 2.125, and two rounds
    17/6 * (1 - 1/16) = 2.65625."""
    first, *_ = go(tmp_path / "one", rounds=1)
    second, *_ = go(tmp_path / "two", rounds=2)
    assert first.state["model.layers.0.q.lora_B"].flatten().tolist() == pytest.approx([2.125] * 6, abs=1e-12)
    assert second.state["model.layers.1.q.lora_B"].flatten().tolist() == pytest.approx([2.65625] * 6, abs=1e-12)


def test_local_keeps_each_client_alone_and_sends_nothing(tmp_path):
    progress, clients, _, _, lines = go(tmp_path, Local(), rounds=2)
    assert progress.state is None
    got = {name: site.memory["adapter"]["model.layers.0.q.lora_B"][0, 0].item() for name, site in clients.items()}
    assert got == pytest.approx({name: target * 15 / 16 for name, target in TARGETS.items()}, abs=1e-12)
    sent = [line for line in lines if line["kind"] == "client"]
    assert {line["bytes_up"] for line in sent} == {line["bytes_down"] for line in sent} and sent[0]["bytes_up"] < 100


def test_bytes_are_those_of_the_messages(tmp_path):
    """24 float64 numbers are 192 bytes; the header is the same up and down, since names and shapes are."""
    *_, lines = go(tmp_path, rounds=1)
    client, total = lines[0], next(line for line in lines if line["kind"] == "round")
    assert client["bytes_up"] == client["bytes_down"] and 192 < client["bytes_up"] < 192 + 600
    assert total["bytes_up"] == 3 * client["bytes_up"] and total["asked"] == total["arrived"] == 3


@pytest.mark.parametrize("method", [FedIT(), Local()], ids=["fedit", "local"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_continued_is_uninterrupted(tmp_path, method, stop):
    whole, clients, _, _, _ = go(tmp_path / "whole", method)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", method, stop_after=stop)
    assert f'"round": {stop + 1}' in (tmp_path / "cut/metrics.jsonl").read_text()  # the cut round had begun its lines
    again, clients_again, runtime, resumed, _ = go(tmp_path / "cut", method)
    assert resumed == [stop + 1] and len(runtime.log) == 3 * (4 - stop)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    if method == FedIT():
        assert again.state.equal(whole.state)
    for name in clients:
        assert json.dumps(sorted(clients_again[name].memory)) == json.dumps(sorted(clients[name].memory))
        for key, value in clients[name].memory.items():
            assert clients_again[name].memory[key].equal(value)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    whole, *_ = go(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for folder, cut in (("run", lambda data: data[: len(data) // 2]), ("copy", lambda data: data[:-1] + b"\x01")):
        path = tmp_path / folder / "checkpoints/round-0004/state.safetensors"
        path.write_bytes(cut(path.read_bytes()))
        with pytest.warns(CheckpointWarning, match="round-0004 is damaged"):
            again, _, _, resumed, _ = go(tmp_path / folder)
        assert resumed == [4] and again.state.equal(whole.state)


def test_damaged_everywhere_is_an_error(tmp_path):
    go(tmp_path)
    for path in tmp_path.glob("checkpoints/round-*/manifest.json"):
        path.write_text("{")
    with pytest.warns(CheckpointWarning), pytest.raises(RunError, match="every checkpoint in .* is damaged.*--fresh"):
        go(tmp_path)
    progress, *_ = go(tmp_path, fresh=True)
    assert progress.round == 4


def test_checkpoints_kept(tmp_path):
    scores = iter([10.0, 30.0, 20.0, 5.0, 1.0, 0.0])
    config = toy.config(rounds=6, eval={"every": 1}, checkpoint={"every": 10, "keep": 1, "keep_rounds": [1, 3]})
    progress, *_ = go(
        tmp_path, rounds=6, config=config, evaluate=lambda m, s: summarize("rouge1", {"c0": next(scores)})
    )
    assert (progress.best.round, progress.best.score) == (2, 30.0)
    # every: 10 would write none; kept rounds, the best and the last are written all the same
    assert sorted(path.name for path in tmp_path.glob("checkpoints/round-*")) == [f"round-000{i}" for i in (1, 2, 3, 6)]


def test_what_a_kill_before_the_deletion_has_left_is_deleted_later(tmp_path):
    """Also where no further checkpoint comes; a damaged checkpoint is none of the newest that are kept."""
    config = toy.config(rounds=3, checkpoint={"keep": 1})
    go(tmp_path, rounds=3, config=config)
    for round in (1, 2, 4):
        shutil.copytree(tmp_path / "checkpoints/round-0003", tmp_path / f"checkpoints/round-000{round}")
    (tmp_path / "checkpoints/round-0004/state.safetensors").write_bytes(b"half")
    for left in (".round-0004.replaced", ".round-0004.partial"):
        shutil.copytree(tmp_path / "checkpoints/round-0004", tmp_path / "checkpoints" / left)
    with pytest.warns(CheckpointWarning, match="round-0004"):
        go(tmp_path, rounds=3, config=config)
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*round-*")) == ["round-0003", "round-0004"]


@pytest.mark.parametrize("letter", ["memory/c0", "sha256", "round"])
def test_one_changed_letter_of_a_manifest_is_damage(tmp_path, letter):
    """Once a client whose key no longer was its name had silently forgotten everything."""
    go(tmp_path, Local(), rounds=2, config=toy.config(rounds=2, checkpoint={"keep": 2}))
    manifest = tmp_path / "checkpoints/round-0002/manifest.json"
    manifest.write_text(manifest.read_text().replace(letter, letter[:-1] + "x", 1))
    with pytest.warns(CheckpointWarning, match="manifest.json: it does not match its checksum"):
        found = Checkpoints(tmp_path / "checkpoints").latest()
    assert found is not None and found.round == 1


def test_others_cannot_read_what_clients_remember(tmp_path):
    go(tmp_path, Local(), rounds=2)
    rows = list((tmp_path / "checkpoints/rows").iterdir())
    assert rows and {path.stat().st_mode & 0o777 for path in (*rows, rows[0].parent)} == {0o600, 0o700}
    assert {path.stat().st_mode & 0o777 for path in rows} == {0o600}


@pytest.mark.parametrize("at", [0.0, 0.5])
def test_damage_in_the_middle_of_the_metrics_is_found(tmp_path, at):
    """A digit that is another one, and a line that is no JSON any more."""
    go(tmp_path, rounds=2)
    metrics = tmp_path / "metrics.jsonl"
    data = metrics.read_bytes()
    place = data.index(b'"round": 1') + (len('"round": ') if at else 0)
    metrics.write_bytes(data[:place] + b"7" + data[place + 1 :])
    with pytest.raises(RunError, match="metrics.jsonl is damaged"):
        go(tmp_path, rounds=3)


def test_best_round_can_be_restored_with_its_memories(tmp_path):
    scores = iter([1.0, 9.0, 2.0])
    config = toy.config(rounds=3, eval={"every": 1})
    go(tmp_path, Local(), rounds=3, config=config, evaluate=lambda m, s: summarize("rouge1", {"c0": next(scores)}))
    with Run(tmp_path, config) as run:
        run.begin()
        clients = toy.clients(3)
        progress = restore(run.checkpoints.load(2), clients)
    assert progress.best.round == 2
    assert clients["c2"].memory["adapter"]["model.layers.0.q.lora_B"][0, 0].item() == pytest.approx(4 * 15 / 16)


def test_rows_of_clients_that_were_not_asked_are_stored_once(tmp_path):
    schedule = toy.Delayed(("c0", "c1", "c2"), 0.3)
    go(tmp_path, Local(), schedule=schedule, config=toy.config(rounds=4, checkpoint={"keep": 4}))
    asked = [ask.client for round in range(1, 5) for ask in schedule.asks(round)]
    assert len(list(tmp_path.glob("checkpoints/rows/*"))) == len(
        asked
    )  # one new row per round, shared by later checkpoints
    go(tmp_path, Local(), schedule=schedule, config=toy.config(rounds=4, checkpoint={"keep": 1}), fresh=True)
    assert len(list(tmp_path.glob("checkpoints/rows/*"))) == len(set(asked))


def test_late_answers_arrive_in_order_and_survive_a_stop(tmp_path):
    schedule = toy.LateSchedule(("c0", "c1", "c2"))
    whole, _, _, _, lines = go(tmp_path / "whole", schedule=schedule)
    rounds = {line["round"]: line for line in lines if line["kind"] == "round"}
    assert [rounds[i]["asked"] for i in range(1, 5)] == [3, 0, 0, 3] and [
        rounds[i]["arrived"] for i in range(1, 5)
    ] == [1, 1, 1, 1]
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "cut", schedule=schedule, stop_after=2)  # c2's answer was on its way when round 2 was saved
    again, _, _, resumed, _ = go(tmp_path / "cut", schedule=schedule)
    assert resumed == [3] and again.state.equal(whole.state)
    assert [(item.client, item.arrival) for item in again.in_flight] == [("c1", 5), ("c2", 6)]


def test_one_failing_client_is_logged_and_the_round_goes_on(tmp_path):
    """Without c2 the mean target is (1 * 1 + 2 * 2) / 3 = 5/3."""
    runtime = toy.ToyRuntime(TARGETS, fail={"c2"})
    progress, clients, _, _, lines = go(tmp_path, rounds=1, runtime=runtime)
    assert progress.state["model.layers.0.q.lora_B"][0, 0].item() == pytest.approx(0.75 * 5 / 3)
    event = next(line for line in lines if line["kind"] == "event")
    assert event["client"] == "c2" and event["event"] == "client failed" and "told to fail" in event["reason"]
    assert next(line for line in lines if line["kind"] == "round")["failed"] == 1


def test_a_failed_client_keeps_the_memory_it_had(tmp_path):
    @dataclass(frozen=True)
    class Careless(Method):
        async def client_update(self, client, message):
            client.memory["half"] = message
            return await super().client_update(client, message)

    _, clients, *_ = go(tmp_path, Careless(), rounds=1, runtime=toy.ToyRuntime(TARGETS, fail={"c1"}))
    assert "half" in clients["c0"].memory and "half" not in clients["c1"].memory


def test_no_client_left_ends_the_run(tmp_path):
    with pytest.raises(RunError, match="every client of round 1 failed; the first one: client c0: told to fail"):
        go(tmp_path, runtime=toy.ToyRuntime(TARGETS, fail=set(TARGETS)))


@dataclass(frozen=True)
class Overflowing(FedIT):
    """In round 3 the server's state overflows, from uploads that are all as they should be."""

    async def server_update(self, server, state, uploads):
        state = await super().server_update(server, state, uploads)
        return state * 1e300 * 1e300 if server.round == 3 else state


def test_a_servers_state_that_is_not_finite_ends_the_run_and_the_last_good_checkpoint_stays(tmp_path):
    with pytest.raises(RunError, match="round 3: the server's state holds NaN or infinite.*checkpoint of round 2"):
        go(tmp_path, Overflowing())
    assert sorted(path.name for path in tmp_path.glob("checkpoints/round-*")) == ["round-0001", "round-0002"]
    kept = Checkpoints(tmp_path / "checkpoints").latest()
    assert kept is not None and kept.state["state"].is_finite()


def test_another_configuration_is_refused_with_the_difference(tmp_path):
    go(tmp_path)
    with (
        pytest.raises(UserError, match=r"local.lr: 0.1 -> 0.2.*--fresh"),
        Run(tmp_path, toy.config(rounds=4, local={"lr": 0.2, "lr_end": 0.1})),
    ):
        pass
    with Run(tmp_path, toy.config(rounds=4, checkpoint={"keep": 5})):
        pass  # changes no number


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for fresh in (False, True):
        with pytest.raises(UserError, match="it holds thesis.tex"), Run(tmp_path, toy.config(), fresh):
            pass
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("part", ["state.safetensors", "manifest.json", "rows", "rename", "metrics.jsonl"])
def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch, part):
    """The disk is full when `part` of round 3 is written: an error, nothing half-written, and round 2 goes on to the
    same end."""
    whole, *_ = go(tmp_path / "whole", Local())
    fsync, replace = os.fsync, os.replace
    in_round_3 = (tmp_path / "full/checkpoints/round-0002").exists

    def full_fsync(handle):
        if part in os.readlink(f"/proc/self/fd/{handle}") and in_round_3():
            raise OSError(28, "No space left on device")
        return fsync(handle)

    def full_replace(source, target):
        if part == "rename" and str(target).endswith("round-0003"):
            raise OSError(28, "No space left on device")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", full_fsync)
    monkeypatch.setattr(os, "replace", full_replace)
    with pytest.raises(RunError, match="No space left on device"):
        go(tmp_path / "full", Local())
    monkeypatch.undo()
    assert not list((tmp_path / "full").rglob("*.partial"))
    _, _, _, resumed, _ = go(tmp_path / "full", Local())
    assert resumed == [3]
    assert (tmp_path / "full/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_messages_give_every_client_memory_of_its_own(tmp_path):
    progress, *_ = go(tmp_path, rounds=1)
    sent = Messages(FedIT(), progress.state, ["c0", "c1"])
    sent["c0"].row.zero_()
    assert torch.equal(sent["c1"].row, progress.state.row) and progress.state.row.abs().sum() > 0
    groups = {"models": [progress.state, 2 * progress.state], "groups": [["c0", "c2"], ["c1"]]}
    packed = Messages(CFL(stationary=1, incongruent=1), groups, ["c0", "c1", "c2"]).all_packed()
    assert packed["c0"] is packed["c2"] and packed["c0"] != packed["c1"]  # else each client takes a model's memory


def test_who_remembers_something_is_looked_at_again_after_a_restart():
    """Of the others nothing is looked at until they are asked; `save` would forget a client that is missing here."""
    state = {"state": None, "in_flight": [], "best_round": 0, "best_score": 0.0, "best_loss": 1.0}
    saved: Any = SimpleNamespace(rows={"memory/ada": {"own": 1}}, state=state, round=3)
    saved.memory = lambda owner: saved.rows.get(owner, {})
    clients: Any = {name: SimpleNamespace(memory={}) for name in ("ada", "bob")}
    progress = restore(saved, clients)
    assert progress.requested == {"ada"} and progress.round == 3
    assert clients["ada"].memory == {"own": 1} and clients["bob"].memory == {}
