"""The installed package is found from everywhere, also from the folder above a clone, which is named like it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_folder_named_like_the_package_does_not_hide_it(tmp_path):
    """`make install` in a clone from before setup.py was there is to be given again, if this fails."""
    for folder in ("llm_fed", "tasks"):
        (tmp_path / folder).mkdir()
    code = "import llm_fed.cli, llm_fed.tasks, llm_fed.scoring.scores; print(llm_fed.__file__, llm_fed.tasks.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(Path(found).name == "__init__.py" for found in done.stdout.split()), done.stdout


def test_nothing_with_a_general_name_is_installed(tmp_path):
    names = ["tasks", "eval", "tests", "scripts"]
    code = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
