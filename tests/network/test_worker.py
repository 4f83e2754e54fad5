"""The process that keeps a machine's base between orders: private, found again, one per machine. It ends with the
SuperNode that started it, and not with its caller; the nodes here are scripts with the names of Flower's commands."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import every
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
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {"llm_fed.network.worker", str(home)} <= {*process.cmdline()} and worker.runs(process):
                found.append(process)
    return found


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
        worker.call(home, request(small, home, train(message, 2, after=1), local={"steps": 10_000}), message)
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


# A node: a SuperNode, which starts a SuperExec, which starts a caller for each message, with a wrapper between them.
# The caller goes away before it has given its order, so that the worker imports nothing heavy.
NODE = """\
import os, signal, subprocess, sys, time
from pathlib import Path

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which what nohup starts ignores
home, here = Path(sys.argv[1]), Path(sys.argv[0])
if here.name == "flower-supernode":
    subprocess.Popen([sys.executable, here.with_name("flower-superexec"), home, str(os.getpid())])
    time.sleep(600)
elif here.name == "flower-superexec":
    while os.getppid() == int(sys.argv[2]):  # Flower's own is told it, too, as it may be dead by now
        subprocess.run(["sh", "-c", '"$@"; true', "wrapper", sys.executable, here.with_name("flwr-clientapp"), home])
        time.sleep(1)
else:
    from llm_fed.network import worker
    with worker._connect(home, 600, worker.node_of_this_process()) as connection:
        connection.send_bytes(b"{}")
"""


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it did not come to that"
        time.sleep(0.05)


def log(home: Path) -> str:
    path = home / "worker.log"
    return path.read_text() if path.exists() else ""


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[..., psutil.Process]]:
    """Starts a SuperNode, and waits until it has a worker."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    for name in ("flower-supernode", "flower-superexec", "flwr-clientapp"):
        (tmp_path / name).write_text(NODE)

    def started(home: Path, wait: bool = True) -> psutil.Process:
        node = psutil.Popen([sys.executable, tmp_path / "flower-supernode", home])
        if wait:
            until(lambda: workers(home) and "caller went away" in log(home))
        return node

    yield started
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(tmp_path) in word for word in process.cmdline()):
                process.kill()


@pytest.mark.parametrize("kill", every.quick([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], [signal.SIGKILL]))
def test_a_worker_ends_with_its_supernode_and_leaves_no_socket(start, tmp_path, kill):
    home = tmp_path / "home"
    node = start(home)
    time.sleep(2 * worker.LOOK)  # its callers come and go
    assert len(workers(home)) == 1
    node.send_signal(kill)
    until(lambda: not workers(home))
    assert "its node has ended" in log(home) and not worker.address(home).exists()


@pytest.mark.slow
def test_a_worker_ends_with_its_superexec_and_stays_while_its_node_sleeps(start, tmp_path):
    """Without a SuperExec no message comes; a machine that is suspended wakes up again."""
    home = tmp_path / "home"
    node = start(home)
    (superexec,) = node.children()
    superexec.suspend()
    time.sleep(4 * worker.LOOK)
    assert workers(home)
    superexec.kill()
    until(lambda: not workers(home))
    assert worker.runs(node)


@pytest.mark.slow
def test_a_worker_that_is_at_work_ends_with_its_node_too(start, tmp_path):
    """Even where the work does not end: the main thread here sleeps, whatever signal comes."""
    code = (
        "import signal, sys, time; from llm_fed.network import worker\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "with worker.ending_with([int(sys.argv[1])]):\n"
        "    while True:\n"
        "        try: time.sleep(600)\n"
        "        except SystemExit: pass\n"
    )
    node = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    serving = subprocess.Popen([sys.executable, "-c", code, str(node.pid)])
    time.sleep(2)
    node.kill()
    node.wait()
    assert serving.wait(60) == 0


def test_a_caller_that_is_none_of_flowers_is_its_own_node():
    assert worker.node_of_this_process() == [os.getpid()]


def test_a_process_that_has_ended_or_whose_id_is_used_again_is_not_the_node(monkeypatch):
    came: list[int] = []
    real = os.kill  # with 0 it says whether there is such a process
    monkeypatch.setattr(os, "kill", lambda pid, number: came.append(number) if number else real(pid, number))
    with worker.ending_with([os.getpid()]), worker.ending_with([]):
        time.sleep(0.2)
        assert not came
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with worker.ending_with([gone.pid]):
        until(lambda: came == [signal.SIGTERM])
    monkeypatch.setattr(psutil.Process, "is_running", lambda self: False)  # as psutil says of another's start time
    with worker.ending_with([os.getpid()]):
        until(lambda: came == [signal.SIGTERM] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_worker_is_left_whenever_its_node_is_killed(start, tmp_path, seed):
    """Also while its worker starts."""
    draws = random.Random(seed)
    for _ in range(10):
        node = start(tmp_path / "home", wait=False)
        time.sleep(draws.choice([0.0, draws.uniform(0, 1), draws.uniform(0, 4)]))
        node.send_signal(draws.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]))
        node.wait()
        # A caller whose node was killed still waits so long for a worker, each of which ends when it starts.
        until(lambda: not workers(tmp_path / "home"), 60 + worker._START)
