"""A whole Flower deployment on this machine: SuperLink and SuperNodes with TLS and keys, each as processes of its own.

    with Deployment(folder, {"anna": {"data": "/data/anna"}, "ben": {"data": "/data/ben"}}) as deployment:
        run = deployment.run(app, {"rounds": 3})
        assert deployment.wait(run, seconds=300) == "finished:completed", deployment.logs(run)

Everything lies under `folder`: `keys/`, and per place ("superlink", "cli" and the nodes' names) its working folder, its
FLWR_HOME and its log. Flower leaves processes behind when one of them is killed, and starts some in sessions of their
own; what belongs to a place is therefore recognised by FLWR_HOME in its environment, which all children inherit. A
helper process ends all of them as soon as this process leaves the `with` block or is gone, however it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keys
import psutil

HOST = "127.0.0.1"
NAME = "llm-fed"  # of the SuperLink in Flower's config.toml
FLOWER = ("superlink", "cli", "keys")  # places that are not nodes
START_SECONDS = 60.0
ONLINE_SECONDS = 90.0  # a node that was killed counts as online for up to 60 s, and until then it cannot come back
Value = str | int | float | bool


class Deployment:
    """See the module. `nodes` gives each node's name and its `--node-config`; strings must not contain quotes."""

    def __init__(self, folder: Path, nodes: Mapping[str, Mapping[str, Value]], env: Mapping[str, str] | None = None):
        """`env`: what all processes have in their environment on top of this process's own."""
        if taken := set(nodes) & set(FLOWER):
            raise ValueError(f"{sorted(taken)} cannot be names of nodes")
        self.folder = folder.resolve()
        self.nodes = nodes
        self.node_ids: dict[str, int] = {}  # what the SuperLink calls them; they stay the same over restarts
        self.address = f"{HOST}:{free_port()}"
        self._env = dict(env or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log_starts: dict[str, int] = {}  # in bytes: where the log of a place's last start begins
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Deployment:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        words = [sys.executable, __file__, str(self.folder)]
        self._reaper = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        try:
            keys.make(self.folder / "keys", HOST, list(self.nodes))
            self._write_config()
            self.start_superlink()
            for node in self.nodes:
                public = str(self.folder / "keys" / f"{node}.pub")
                self.node_ids[node] = self.flwr("supernode", "register", public, NAME, "--name", node)["node-id"]
                self.launch(node, self.supernode(node))
            for node in self.nodes:
                self._wait_for(node, "SuperNode ID", START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._reaper is not None and self._reaper.stdin is not None
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._reaper.stdin.close()
        self._reaper.wait()

    def run(self, app: Path, config: Mapping[str, Value] | None = None) -> int:
        """`flwr run` of an app folder, its settings replaced by those of `config`; the run's id, at once."""
        overrides = self.folder / "run-config.toml"
        overrides.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in (config or {}).items()))
        return int(self.flwr("run", str(app), NAME, "--run-config", str(overrides))["run-id"])

    def wait(self, run: int, seconds: float) -> str:
        """The status in which the run ends, such as "finished:completed"; TimeoutError, and the run goes on."""
        deadline = time.monotonic() + seconds
        while not (status := self.describe(run)["status"]).startswith("finished"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"run {run} is {status} after {seconds} s:\n{self.logs(run)}")
            # The stream of its log ends with the run: one process, where asking for the status costs one each time.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._call("flwr", "log", str(run), NAME, "--stream", seconds=left)
            time.sleep(0.2)
        return status

    def describe(self, run: int) -> dict[str, Any]:
        """What `flwr list` says of a run: status, status-details, network-traffic in bytes, compute-time."""
        return self.flwr("list", NAME, "--run-id", str(run))["runs"][0]

    def logs(self, run: int) -> str:
        """What the run's ServerApp has printed and logged so far."""
        return self._call("flwr", "log", str(run), NAME, "--show")

    def stop(self, run: int) -> None:
        """`flwr stop`."""
        self.flwr("stop", str(run), NAME)

    def log(self, place: str, new: bool = False) -> str:
        """What the processes of a place have printed, a SuperNode's ClientApps too; `new`: since its last start."""
        whole = (self.folder / place / "log.txt").read_bytes()
        return whole[self._log_starts[place] if new else 0 :].decode(errors="replace")

    def processes(self, place: str, command: str = "") -> list[psutil.Process]:
        """The running processes of a place with `command` in a word of their command line, apart from this folder."""
        return [
            process
            for process in marked(self.folder / place)
            if any(command in word for word in _words(process) if str(self.folder) not in word)
        ]

    def kill(self, place: str, command: str = "") -> None:
        """kill -9 of all processes of a place, as when the power fails, or of those with `command` in their command
        line: flower-superlink, flwr-serverapp, flower-supernode, flwr-clientapp. RuntimeError if there is none."""
        if not (processes := self.processes(place, command)):
            raise RuntimeError(f"nothing to kill: no {command or 'process'} at {place}")
        for process in processes:
            process.kill()
        if place in self._processes and self._processes[place].pid in {process.pid for process in processes}:
            self._processes[place].wait()  # as a zombie it would look alive to its children, and they would go on

    def reaped(self, place: str) -> None:
        """Take the place's process off the list as soon as it ends, as a shell or a service manager does."""
        threading.Thread(target=self._processes[place].wait, daemon=True).start()

    def start_superlink(self) -> None:
        """Start the SuperLink, again after it was killed: it knows the nodes and the runs from its database."""
        certificates = self.folder / "keys"
        host, _, port = self.address.rpartition(":")
        words = ["flower-superlink", "--host", host, "--port", port, "--enable-supernode-auth"]
        words += ["--ssl-ca-certfile", f"{certificates}/ca.crt", "--ssl-certfile", f"{certificates}/server.crt"]
        words += ["--ssl-keyfile", f"{certificates}/server.key", "--disable-runtime-dependency-installation"]
        self.launch("superlink", [*words, "--database", str(self.folder / "superlink" / "state.db")])
        self._wait_for("superlink", "Application startup complete", START_SECONDS)

    def start_node(self, node: str, words: Sequence[str] = ()) -> None:
        """Start a SuperNode that was killed, with another command if given. It takes up to a minute: ONLINE_SECONDS."""
        deadline = time.monotonic() + ONLINE_SECONDS
        while True:
            self.launch(node, words or self.supernode(node))
            try:
                return self._wait_for(node, "SuperNode ID", START_SECONDS)
            except RuntimeError as problem:
                if "code: 2004" not in str(problem) or time.monotonic() > deadline:
                    raise
                time.sleep(2)

    def supernode(self, node: str) -> list[str]:
        """The command of a node."""
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in self.nodes[node].items())
        words = ["flower-supernode", "--superlink", self.address, "--port", str(free_port())]
        words += ["--root-certificates", f"{self.folder}/keys/ca.crt"]
        words += ["--auth-supernode-private-key", f"{self.folder}/keys/{node}"]
        return [*words, "--node-config", settings] if settings else words

    def launch(self, place: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command at a place, in its folder and with its FLWR_HOME; what it prints goes to the place's log."""
        folder = self.folder / place
        folder.mkdir(exist_ok=True)
        with (folder / "log.txt").open("ab") as log:
            self._log_starts[place] = log.tell()
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=self._environment(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[place] = process
        return process

    def _wait_for(self, place: str, line: str, seconds: float) -> None:
        """Until the place's new log contains `line`; RuntimeError with it if the process ends first, or too late."""
        deadline = time.monotonic() + seconds
        while line not in (said := self.log(place, new=True)):
            if self._processes[place].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{place} did not start:\n{said}")
            time.sleep(0.1)

    def _write_config(self) -> None:
        home = self.folder / "cli" / "flwr"
        home.mkdir(parents=True)
        certificate = json.dumps(str(self.folder / "keys" / "ca.crt"))
        text = f'[superlink.{NAME}]\naddress = "{self.address}"\nroot-certificates = {certificate}\n'
        (home / "config.toml").write_text(text)

    def flwr(self, *words: str) -> dict[str, Any]:
        """The JSON with which a `flwr` command answers; RuntimeError with what it says if it fails."""
        said = self._call("flwr", *words, "--format", "json")
        answer = said[max(said.find("{"), 0) :]  # notes for people may stand around it
        try:
            reply = json.JSONDecoder().raw_decode(answer)[0]
        except json.JSONDecodeError:
            reply = {}
        if not reply.get("success"):
            raise RuntimeError(f"flwr {' '.join(words)}: {said}")
        return reply

    def _call(self, *words: str, seconds: float = START_SECONDS) -> str:
        """What a command prints; subprocess.TimeoutExpired if it takes longer, and it is ended."""
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self._environment("cli"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        ).stdout

    def _environment(self, place: str) -> dict[str, str]:
        """Flower's own switches: its home, no telemetry, no look for updates; tasks are noticed in 0.1 s, not in 1."""
        return {
            **os.environ,
            "FLWR_HOME": str(self.folder / place / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            **self._env,
        }


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def marked(folder: Path) -> list[psutil.Process]:
    """All running processes whose FLWR_HOME lies under a folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            home = process.environ().get("FLWR_HOME")
        except (psutil.Error, OSError):  # it has ended, or is somebody else's
            continue
        if home and Path(home).is_relative_to(folder):
            processes.append(process)
    return processes


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []


def reap(folder: Path) -> None:
    """Wait until standard input ends, with whoever holds it open; then end all marked processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.read()
    while processes := marked(folder):
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=1)


if __name__ == "__main__":
    reap(Path(sys.argv[1]))
