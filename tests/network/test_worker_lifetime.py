"""A worker ends with the SuperNodes that it serves, and with nothing else: not with its caller, nor while another node
of the machine needs it. The nodes here are scripts with the names of Flower's commands."""

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
import json, os, subprocess, sys, time
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
    node = lifetime.node_of_this_process()
    with worker._connect(home, 600, node) as connection:
        connection.send_bytes(json.dumps({"node": node}).encode())
"""


def running(*words: object) -> list[psutil.Process]:
    """The running processes with all of these words in their command lines."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if all(any(str(word) in each for each in line) for word in words) and lifetime._runs(process):
                found.append(process)
    return found


def workers(home: Path) -> list[psutil.Process]:
    return running("llm_fed.network.worker", home)


def until(true: Callable[[], object], seconds: float = 60.0) -> float:
    """The seconds after which it is true."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it did not come to that"
        time.sleep(0.05)
    return time.monotonic() - began


class Machine:
    """Nodes and their workers on one machine, in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("flower-supernode", "flower-superexec", "flwr-clientapp"):
            (folder / name).write_text(NODE)

    def start(self, home: str) -> psutil.Process:
        """A SuperNode, once it has a worker."""
        node = subprocess.Popen([sys.executable, self.folder / "flower-supernode", self.folder / home])
        until(lambda: workers(self.folder / home) and "caller went away" in self.log(home))
        return psutil.Process(node.pid)

    def log(self, home: str) -> str:
        path = self.folder / home / "worker.log"
        return path.read_text() if path.exists() else ""

    def superexec(self, node: psutil.Process) -> psutil.Process:
        (found,) = [child for child in node.children() if "flower-superexec" in " ".join(child.cmdline())]
        return found

    def end(self) -> None:
        for process in running(self.folder):
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    found = Machine(tmp_path)
    yield found
    found.end()


@pytest.mark.parametrize("kill", every.quick([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], [signal.SIGKILL]))
def test_a_worker_ends_with_its_supernode_and_leaves_no_socket(machine, kill):
    node = machine.start("home")
    node.send_signal(kill)
    until(lambda: not workers(machine.folder / "home"))
    assert "its node has ended" in machine.log("home") and not worker.address(machine.folder / "home").exists()


@pytest.mark.slow
def test_a_worker_ends_with_its_superexec_without_which_no_message_comes(machine):
    node = machine.start("home")
    machine.superexec(node).kill()
    until(lambda: not workers(machine.folder / "home"))
    assert lifetime._runs(node)


@pytest.mark.slow
def test_a_worker_outlives_the_node_with_which_it_shares_a_machine_with_another(machine):
    """Of two homes the other's worker stays; of one home its worker stays until both nodes have ended."""
    one, two, other = machine.start("home"), machine.start("home"), machine.start("other")
    (shared,), (apart,) = workers(machine.folder / "home"), workers(machine.folder / "other")
    time.sleep(1)  # so that both have called
    one.kill()
    time.sleep(4 * lifetime.LOOK)
    assert workers(machine.folder / "home") == [shared] and workers(machine.folder / "other") == [apart]
    two.kill()
    until(lambda: not workers(machine.folder / "home"))
    assert workers(machine.folder / "other") == [apart]
    other.kill()
    until(lambda: not workers(machine.folder / "other"))


@pytest.mark.slow
def test_a_worker_stays_while_its_node_sleeps(machine):
    """As on a machine that is suspended."""
    node = machine.start("home")
    (serving,) = workers(machine.folder / "home")
    for process in (node, machine.superexec(node)):
        process.suspend()
    time.sleep(4 * lifetime.LOOK)
    assert workers(machine.folder / "home") == [serving]


@pytest.mark.slow
def test_a_worker_whose_node_ends_while_it_starts_ends_too(machine):
    """Nobody ever asks it anything."""
    home = machine.folder / "home"
    home.mkdir()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", "llm_fed.network.worker", str(home), "--node", str(gone.pid)]
    assert subprocess.run(command, timeout=60).returncode == 0


@pytest.mark.slow
def test_a_worker_that_is_at_work_ends_with_its_node_too(machine):
    """Even where the work does not end: the main thread here sleeps, whatever signal comes."""
    home = machine.folder / "home"
    code = (
        "import signal, sys, time; from pathlib import Path; from llm_fed.network import worker\n"
        "def busy(*_):\n"
        "    until = time.monotonic() + 600\n"
        "    while time.monotonic() < until:\n"
        "        try: time.sleep(600)\n"
        "        except SystemExit: pass\n"
        "worker._node = object; worker._answer = busy\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "worker.serve(Path(sys.argv[1]), 600, [int(sys.argv[2])])"
    )
    home.mkdir()
    node = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    serving = subprocess.Popen([sys.executable, "-c", code, str(home), str(node.pid)])
    until(worker.address(home).exists)
    caller = (
        f"from pathlib import Path; from llm_fed.network import worker; worker.call(Path({str(home)!r}), {{}}, b'')"
    )
    waiting = subprocess.Popen([sys.executable, "-c", caller], stderr=subprocess.DEVNULL)
    time.sleep(2)
    waiting.kill()
    node.kill()
    node.wait()
    assert serving.wait(60) == 0


def test_a_caller_that_is_none_of_flowers_is_its_own_node(machine):
    """A worker that a script has started ends with the script."""
    home = machine.folder / "home"
    code = (
        "import json, sys; from pathlib import Path; from llm_fed.network import lifetime, worker\n"
        "node = lifetime.node_of_this_process()\n"
        "with worker._connect(Path(sys.argv[1]), 600, node) as connection:\n"
        "    connection.send_bytes(json.dumps({'node': node}).encode())\n"
        "sys.stdin.read()"
    )
    script = subprocess.Popen([sys.executable, "-c", code, str(home)], stdin=subprocess.PIPE)
    until(lambda: "caller went away" in machine.log("home"))
    time.sleep(1.5 * lifetime.LOOK)
    assert len(workers(home)) == 1
    script.communicate()
    until(lambda: not workers(home))


def test_a_process_id_that_is_used_again_is_not_the_node(monkeypatch):
    nodes = lifetime.Nodes([os.getpid()])
    assert not nodes.ended
    monkeypatch.setattr(psutil.Process, "is_running", lambda self: False)  # as psutil says of another's start time
    assert nodes.ended and not lifetime.Nodes().ended


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_worker_is_left_whenever_its_nodes_are_killed(machine, seed):
    """Up to three nodes with two homes, each killed at a random time, also while its worker starts."""
    draws = random.Random(seed)
    for _ in range(10):
        nodes = []
        for _ in range(draws.randint(1, 3)):
            home = machine.folder / draws.choice(["home", "other"])
            node = subprocess.Popen([sys.executable, machine.folder / "flower-supernode", home])
            nodes.append(node)
        for node in draws.sample(nodes, len(nodes)):
            time.sleep(draws.choice([0.0, draws.uniform(0, 1), draws.uniform(0, 4)]))
            node.send_signal(draws.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]))
            node.wait()
        # A caller whose node was killed still waits so long for a worker, each of which ends when it starts.
        until(lambda: not running(machine.folder), 60 + worker._START)
