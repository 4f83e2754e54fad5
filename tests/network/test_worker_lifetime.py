"""A worker ends with the SuperNode that started it, and not with its caller. The nodes here are scripts with the names
of Flower's commands."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import every
import psutil
import pytest

from llm_fed.network import lifetime, worker

# A node: a SuperNode, which starts a SuperExec, which starts a caller for each message, with a wrapper between them.
# The caller goes away before it has given its order, so that the worker imports nothing heavy.
NODE = """\
import subprocess, sys, time, os
from pathlib import Path

home, here = Path(sys.argv[1]), Path(sys.argv[0])
if here.name == "flower-supernode":
    subprocess.Popen([sys.executable, here.with_name("flower-superexec"), home])
    time.sleep(600)
elif here.name == "flower-superexec":
    supernode = os.getppid()
    while os.getppid() == supernode:
        subprocess.run(["sh", "-c", '"$@"; true', "wrapper", sys.executable, here.with_name("flwr-clientapp"), home])
        time.sleep(1)
else:
    from llm_fed.network import lifetime, worker
    with worker._connect(home, 600, lifetime.node_of_this_process()) as connection:
        connection.send_bytes(b"{}")
"""


def workers(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "llm_fed.network.worker" in line and str(home) in line and lifetime.runs(process):
                found.append(process)
    return found


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
    time.sleep(2 * lifetime.LOOK)  # its callers come and go
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
    time.sleep(4 * lifetime.LOOK)
    assert workers(home)
    superexec.kill()
    until(lambda: not workers(home))
    assert lifetime.runs(node)


@pytest.mark.slow
def test_a_worker_that_is_at_work_ends_with_its_node_too(start, tmp_path):
    """Even where the work does not end: the main thread here sleeps, whatever signal comes."""
    code = (
        "import signal, sys, time; from llm_fed.network import lifetime\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "with lifetime.ending_with([int(sys.argv[1])]):\n"
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
    assert lifetime.node_of_this_process() == [os.getpid()]


def test_a_process_that_has_ended_or_whose_id_is_used_again_is_not_the_node(monkeypatch):
    came: list[int] = []
    real = os.kill  # with 0 it says whether there is such a process
    monkeypatch.setattr(os, "kill", lambda pid, number: came.append(number) if number else real(pid, number))
    with lifetime.ending_with([os.getpid()]), lifetime.ending_with([]):
        time.sleep(0.2)
        assert not came
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with lifetime.ending_with([gone.pid]):
        until(lambda: came == [signal.SIGTERM])
    monkeypatch.setattr(psutil.Process, "is_running", lambda self: False)  # as psutil says of another's start time
    with lifetime.ending_with([os.getpid()]):
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
