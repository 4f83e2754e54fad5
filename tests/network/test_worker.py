"""The process that keeps a machine's base between orders: private, found again, and one per machine."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from network import HELLO, work
from small_run import Small

from llm_fed.basics.errors import RunError, UserError
from llm_fed.network import worker
from llm_fed.settings.configfile import as_dict, from_dict
from llm_fed.state.wire import pack


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    yield tmp_path / "home"
    for process in workers(tmp_path / "home"):
        process.kill()
        process.wait()


def workers(home: Path) -> list[psutil.Process]:
    wanted = {"llm_fed.network.worker", str(home)}
    return [process for process in psutil.process_iter() if wanted <= set(_words(process))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def request(small: Small, home: Path, order: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = from_dict(small.tree(**changes))
    place = {"home": str(home), "path": str(small.data), "clients": ["ada"]}
    return {"place": place, "config": yaml.safe_dump(as_dict(config)), "order": order}


def train(message: bytes, round: int, after: int = 0) -> dict[str, Any]:
    order = {"kind": "train", "run": "r", "client": "ada", "round": round, "lr": 0.1, "after": after, "kept": []}
    return work(order, content=message)


def state(small: Small) -> bytes:
    from llm_fed.bench import build
    from llm_fed.runs.tracking import Reporter

    return pack(build.prepare(from_dict(small.tree()), Reporter()).server.initial())


@pytest.mark.slow
def test_one_worker_serves_all_callers_and_outlives_those_that_are_killed(small, home):
    """A second one gives way. When it dies at work its caller is told, and the next one goes on from the disk."""
    reply, _ = worker.call(home, request(small, home, HELLO), b"")
    assert reply["clients"] == {"ada": 6}
    (process,) = workers(home)
    path = worker.address(home)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0

    message = state(small)
    order = request(small, home, train(message, 1), local={"steps": 200})
    (home / "message").write_bytes(message)
    (home / "order").write_text(json.dumps(order))
    code = f"""
        import json
        from pathlib import Path
        from llm_fed.network import worker
        home = Path({str(home)!r})
        worker.call(home, json.loads((home / "order").read_text()), (home / "message").read_bytes())
    """
    caller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    deadline = time.monotonic() + 60
    while not list(home.glob("runs/r/ada")) and time.monotonic() < deadline:
        time.sleep(0.02)
    caller.kill()
    assert caller.wait() == -9
    again, answer = worker.call(home, request(small, home, train(message, 1)), message)
    assert again["replies"][0]["examples"] == 6 and len(answer) > 1000
    log = (home / "worker.log").read_text()
    assert "a caller went away" in log and "bases loaded so far: 1" in log and "so far: 2" not in log

    subprocess.run([sys.executable, "-m", "llm_fed.network.worker", str(home)], check=True, timeout=60)
    assert [other.pid for other in workers(home)] == [process.pid]

    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"])
    with pytest.raises(RunError, match=r"ended while it worked; see .*worker\.log"):
        worker.call(home, request(small, home, train(message, 2, after=1), local={"steps": 100_000}), message)
    killer.wait()
    process.wait()
    second, _ = worker.call(
        home, request(small, home, train(message, 2, after=1)), message
    )  # its memory is on the disk
    assert second["replies"][0]["examples"] == 6 and workers(home)[0].pid != process.pid


def test_a_worker_ends_when_nobody_needs_it(small, home):
    subprocess.run([sys.executable, "-m", "llm_fed.network.worker", str(_made(home)), "--idle", "0.2"], check=True)
    assert not worker.address(home).exists()


def test_a_worker_that_cannot_start_says_where_to_look(home):
    _made(home)
    (home / "worker.lock").symlink_to(home / "absent/lock")
    with pytest.raises(RunError, match=r"does not start; see .*worker\.log"):
        worker.call(home, {}, b"")


def test_a_folder_that_others_may_enter_takes_no_socket(home):
    home.parent.chmod(0o755)
    with pytest.raises(UserError, match="must be yours and closed to others"):
        worker.address(home)


def test_a_full_disk_at_a_client_is_its_own_trouble(small, tmp_path, monkeypatch):
    """The server learns its code, nothing half-written stays, and the next order continues from what was there."""
    from network import NetworkInProcess

    from llm_fed.network import clients, server
    from llm_fed.runs import checkpoint
    from llm_fed.runs.records import read_records

    monkeypatch.setattr(clients, "_PAUSE", 0.01)
    real = checkpoint.write_file
    link = NetworkInProcess(tmp_path, small, small.tree(method={"name": "local"}, network={"clients": 3}))

    def full(path: Path, data: bytes, **options: Any) -> None:
        if "home-bob" in str(path) and link.orders[-1]["round"] == 2:
            raise OSError(28, "No space left on device", str(path))
        real(path, data, **options)

    monkeypatch.setattr(checkpoint, "write_file", full)
    server.train(link.config, tmp_path / "run", link)
    events = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "event"]
    assert [(line["round"], line["client"]) for line in events] == [(2, "bob")]
    assert "the node's disk is full (disk)" in events[0]["reason"]
    assert not list((tmp_path / "home-bob").rglob("*.partial"))
    afters = [order["after"] for order in link.orders if order["kind"] == "train" and order["client"] == "bob"]
    assert afters == [0, 1, 1]


def _made(home: Path) -> Path:
    home.mkdir()
    shutil.rmtree(home / "runs", ignore_errors=True)
    return home


def test_what_lies_at_a_sockets_place_is_looked_at_before_it_is_trusted(tmp_path, monkeypatch):
    """A link to a folder, and a file where the socket should be: neither is followed or removed."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(worker.tempfile, "gettempdir", lambda: str(tmp_path))
    own = tmp_path / f"llm_fed-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="must be yours and closed to others"):
        worker.address(tmp_path / "home")
    own.unlink()
    place = worker.address(tmp_path / "home")
    place.write_text("precious")
    (tmp_path / "home").mkdir()
    with pytest.raises(UserError, match="is not a socket"):
        worker.serve(tmp_path / "home")
    assert place.read_text() == "precious"
