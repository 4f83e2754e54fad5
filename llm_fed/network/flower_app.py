"""Writes a Flower app: what `flwr run` needs to run a configuration on SuperNodes."""

from __future__ import annotations

from pathlib import Path

import yaml

from llm_fed import methods, tasks
from llm_fed.config import Config
from llm_fed.configfile import as_dict
from llm_fed.files import write_folder

_PROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "A federation of llm_fed: {method} on {task}"

[tool.flwr.app]
publisher = "llm-fed"

[tool.flwr.app.components]
serverapp = "federation.server:app"
clientapp = "federation.client:app"

[tool.flwr.app.config]
out = "{out}"    # the run folder at the server; another one: flwr run . --run-config 'out="FOLDER"'
path = ""        # where the server's own examples lie, if it has any
fresh = false    # true: delete what an earlier run left in the folder
"""

_MODULE = '''\
"""The {side} of this federation; what it does is in config.yaml."""

from llm_fed.network.flower import {side}_app

app = {side}_app(__file__)
'''


def write(folder: Path, config: Config, name: str) -> str:
    """Write the app: pyproject.toml and a package of two modules and the configuration.

    Args:
        name: of the project, and of the run folder at the server.

    Returns:
        What of the configuration has no meaning on a network, and what else nodes need, as lines to add to a message.

    Raises:
        UserError: the folder holds something else.
        RunError: it cannot be written.
    """
    method, task = config.method["name"], config.task.name
    files = {
        "pyproject.toml": _PROJECT.format(name=name, method=method, task=task, out=f"runs/{name}"),
        "federation/__init__.py": "",
        "federation/server.py": _MODULE.format(side="server"),
        "federation/client.py": _MODULE.format(side="client"),
        "federation/config.yaml": yaml.safe_dump(as_dict(config), sort_keys=False),
    }
    write_folder(folder, {path: text.encode() for path, text in files.items()}, "a Flower app")
    notes = []
    if config.delay.sigma or config.delay.drop_out:
        notes.append("(delay.* is virtual time of a simulation; over a network answers are late by themselves)")
    outside = [name for name, known in ((method, methods.NAMES), (task, tasks.TASKS)) if name not in known]
    if outside:
        notes.append(
            f"{' and '.join(outside)}: install what this names at the server and at every node, and let each node's "
            f'operator add allow="{",".join(outside)}" to --node-config'
        )
    return "".join(f"\n{note}" for note in notes)
