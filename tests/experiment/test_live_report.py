"""The report of a run while it goes on, and Ctrl-C: in processes of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from llm_fed.eval.report import write_report


def test_the_command_writes_it_anew_and_refuses_what_is_no_run(finished, tmp_path, llm_fed):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = write_report(folder).read_bytes()
    (folder / "report.html").unlink()
    said = llm_fed("report", folder)
    assert said.code == 0 and said.out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_bytes() == before
    llm_fed("report", f"{folder}@2").assert_refused("is not a run folder", "without @ROUND")
    (folder / "summary.json").unlink()
    assert llm_fed("report", folder).code == 0 and (folder / "report.html").stat().st_size > 10_000
    (tmp_path / "other").mkdir()
    llm_fed("report", tmp_path / "other").assert_refused("is not a run folder: it has no config.yaml")
    (tmp_path / "other/table.json").write_text("{}")
    llm_fed("report", tmp_path / "other").assert_refused("is not a run folder: it holds a comparison")


@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own(small, tmp_path):
    """Meanwhile others read beside it. It has more rounds than it could train, however long these others take."""
    config, run = small.config(tmp_path / "c.yaml", rounds=100_000), tmp_path / "run"
    words = [sys.executable, "-m", "llm_fed.cli"]
    own = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True}
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"  # a pipe that nobody reads would stop it
    with out.open("w") as to_out, err.open("w") as to_err:
        process = subprocess.Popen(
            [*words, "run", str(config), "--out", str(run)], stdout=to_out, stderr=to_err, **own,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )  # fmt: skip
    try:
        metrics = run / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and '"round": 2' in metrics.read_text()):
            time.sleep(0.01)
        beside = [*words, "chat", str(run)]
        chat = subprocess.run(beside, input="w20 w21\n", capture_output=True, **own)
        assert chat.returncode == 0 and "the newest that it has kept" in chat.stderr, chat.stderr
        finish = [*words, "run", str(config), "--out", str(run), "--finish"]
        busy = subprocess.run(finish, capture_output=True, **own)
        assert process.poll() is None, err.read_text()
        assert busy.returncode == 1 and "is writing to" in busy.stderr, busy.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, err.read_text()
    finally:
        process.kill()
        process.wait()
    ended = json.loads((run / "summary.json").read_text())["ended"]
    assert ended["why"] == "Ctrl-C", err.read_text()
    said = " ".join(out.read_text().split())
    assert f"ended after round {ended['round']} of 100000: Ctrl-C; --continue goes on" in said
