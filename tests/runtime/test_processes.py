"""Processes that carry out orders: what they answer and print, and that none of them outlives who gives orders."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from llm_fed.runtime import processes
from llm_fed.runtime.processes import ChildProcess, end_all, next_reply


@pytest.fixture
def started() -> Iterator[list[ChildProcess]]:
    """Processes, which end with the test."""
    children = [ChildProcess("order_taker", {"ASKED_FOR": str(number)}) for number in range(2)]
    yield children
    for child in children:
        child.kill()


def said(lines: list[tuple[str, str]]):
    return lambda name, text: lines.append((name, text))


def test_orders_are_answered_and_prints_come_line_by_line(started):
    lines: list[tuple[str, str]] = []
    one, other = started
    one.order("one", b"environment ASKED_FOR")
    assert next_reply([one], said(lines)) is one
    value, path, pid = ast.literal_eval((one.reply() or b"").decode())
    assert value == "0" and path == sys.path and pid != os.getpid()
    other.order("other", "print ü\n\n1 %\r50 %\r100 %\nend".encode())
    assert next_reply(started, said(lines)) is other and other.reply().startswith(b"print")
    assert lines == [
        ("one", "imports are done"), ("other", "imports are done"), ("other", "ü"), ("other", "100 %"), ("other", "end")
    ]  # fmt: skip


@pytest.mark.parametrize("order, code", [(b"dies SIGKILL", -9), (b"dies SIGSEGV", -11), (b"exits 3", 3)])
def test_a_process_that_ends_is_noticed_with_what_it_printed(started, order, code):
    lines: list[tuple[str, str]] = []
    child = started[0]
    child.order("name", b"print last words")
    assert next_reply([child], said(lines)) is child and child.reply()
    child.order("name", order)
    assert next_reply([child], said(lines)) is child and child.reply() is None
    assert child.end() == code and not child.runs
    assert ("name", "last words") in lines
    child.order("name", b"print nobody listens")  # is no error; the next reply says so
    assert child.reply() is None


def test_all_leave_what_they_do_and_who_does_not_is_killed(started, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    for child, word in zip(started, ("counts", "stubborn"), strict=True):
        child.order(word, f"{word} {tmp_path / word}".encode())
    wait_for(lambda: (tmp_path / "counts").exists() and (tmp_path / "stubborn").exists())
    began = time.monotonic()
    end_all(started, lambda name, text: None)
    assert not any(child.runs for child in started) and time.monotonic() - began < 10
    codes = [child.kill() for child in started]
    assert codes[0] == -signal.SIGTERM and codes[1] in (1, -signal.SIGKILL)  # by itself, or by this process


def test_a_second_interrupt_kills_at_once(started, tmp_path, monkeypatch, request):
    monkeypatch.setattr(processes, "_GRACE", 600)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, heard))
    started[0].order("stubborn", f"stubborn {tmp_path / 'file'}".encode())
    wait_for((tmp_path / "file").exists)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        end_all(started, lambda name, text: None)
    assert not started[0].runs


@pytest.mark.parametrize("word", ["counts", "stubborn"])
def test_nothing_is_written_once_the_one_that_gives_orders_was_killed(tmp_path, word):
    file = tmp_path / "file"
    code = (
        "import time\nfrom llm_fed.runtime import processes\nchild = processes.ChildProcess('order_taker', {})\n"
        f"child.order('name', b'{word} {file}')\nprint(child._process.pid, flush=True)\ntime.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for(file.exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=processes._GRACE + 10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    before = file.read_bytes()
    time.sleep(0.1)
    assert file.read_bytes() == before


def test_ctrl_c_at_the_terminal_reaches_only_who_gives_orders(started, tmp_path):
    """It is sent to all processes of the group."""
    started[0].order("counts", f"counts {tmp_path / 'file'}".encode())
    wait_for((tmp_path / "file").exists)
    os.kill(started[0]._process.pid, signal.SIGINT)
    before = (tmp_path / "file").read_text()
    wait_for(lambda: (tmp_path / "file").read_text() not in ("", before))
    assert started[0].runs


def wait_for(happened) -> None:
    until = time.monotonic() + 60
    while not happened() and time.monotonic() < until:
        time.sleep(0.01)
    assert happened()
