"""scripts/accept_gpu.sh: what it would run on a GPU can be run, and without one it says so."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def started(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/accept_gpu.sh", str(tmp_path)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def test_its_commands_have_the_options_that_they_are_given(tmp_path):
    said = started(tmp_path, DRY="1")
    assert said.returncode == 0 and not list(tmp_path.iterdir())
    commands = dict(line.split(": ", 1) for line in said.stdout.splitlines())
    assert len(commands) == len(said.stdout.splitlines()) >= 8
    for name, command in commands.items():
        script = next((word for word in shlex.split(command) if word.startswith("scripts/")), None)
        if script is None:
            continue
        source = (ROOT / script).read_text()
        options = [word for word in re.findall(r"--[\w-]+", command.partition(script)[2])]
        assert all(f'"{option}"' in source for option in options if script.startswith("scripts/bench")), name
        for shapes in re.findall(r"--shapes (\S+)", command):
            assert shapes in source, name


def test_without_a_gpu_nothing_is_run(tmp_path):
    if torch.cuda.is_available():
        return
    said = started(tmp_path / "out")
    assert said.returncode == 1 and "sees no GPU" in said.stderr and not list((tmp_path / "out").iterdir())
