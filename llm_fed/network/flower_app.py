"""Writes a Flower app: what `flwr run` needs to run a configuration on SuperNodes."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

from llm_fed import methods, tasks
from llm_fed.basics import documents
from llm_fed.basics.errors import UserError
from llm_fed.basics.files import write_folders
from llm_fed.settings.config import Config, PartitionConfig
from llm_fed.settings.configfile import as_dict
from llm_fed.settings.plugins import short

LONGEST = 32  # letters of a name that Flower takes
RULE = f"Flower takes letters, digits and hyphens, {LONGEST} at most, with a letter first"

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
finish = false   # true: train no further round, and finish with those that the run has
continue = false # true: let a run go on that has ended before its last round
"""

_MODULE = '''\
"""The {side} of this federation; what it does is in config.yaml."""

from llm_fed.network.flower import {side}_app

app = {side}_app(__file__)
'''


_POLICY = """\
# What the owner of a node lets servers ask of it; no order changes it. Copy this to the node, take the # from what
# shall count, and give its place in --node-config: policy="/data/policy.yaml". Last in each line stands what
# holds without it.

configurations: [{digest}]  # `sha256sum federation/config.yaml` of what was agreed; any
# methods: [{method}]            # all built-in ones
# bases: [{base}]                # any
# requests: [training, answers]  # also `losses`, with gradients and features; all, with noise or epsilon [training]
# layers: [q_proj, v_proj]       # parts of names, one of which each trained parameter must have; any
# columns: [question, reply]     # of the data, that may be read; all
# noise: 1.0                     # least noise multiplier, of noise that this machine adds; 0, none
# clip: 1.0                      # largest clipping norm of private training; any
# secure: true                   # answers only where nobody sees through their sum (privacy.secure); false
# epsilon: 8.0                   # that a client's answers may spend together, at this delta:
# delta: 1.0e-05                 # for ever, whatever run they belong to; any epsilon
# batch_size: 8                  # smallest, and fewest examples of a fit without noise; 1
# steps: 10000                   # of one fit
# rank: 256
# length: 32768                  # tokens of an example, or pixels of an image's side
# new_tokens: 4096               # of an answer
# disk: 50.0                     # GB in `home`, with which work ends
# hours: 6.0                     # for one message
"""


def accepts(name: str) -> bool:
    """Whether Flower takes this as the name of an app and its folder (`flwr.supercore.utils.is_valid_name`)."""
    signs = name[1:].replace("-", "")
    return len(name) <= LONGEST and name[:1].isalpha() and (not signs or signs.isalnum())


def name_of(stem: str, method: str = "") -> str:
    """The name of an app that Flower takes: `stem-method` with hyphens for other signs, cut to LONGEST with digits of a
    hash, so that two differ. `stem`: of the configuration file. `method`: its name, or `package.module:Name`."""
    whole = unicodedata.normalize("NFC", "-".join(filter(None, [stem, short(method)])))
    if accepts(whole):
        return whole
    name = re.sub("-+", "-", "".join(sign if sign.isalnum() else "-" for sign in whole)).strip("-")
    name = name if name[:1].isalpha() else f"app-{name}".rstrip("-")
    mark = hashlib.sha256(whole.encode(errors="replace")).hexdigest()[:4]
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 5].rstrip('-')}-{mark}"


def natural(config: Config) -> Config:
    """A configuration without `task.partition`: over a network each machine names the data of its own clients."""
    return replace(config, task=replace(config.task, partition=PartitionConfig()))


def write(folder: Path, config: Config, name: str, source: Path | None = None) -> str:
    """Write the app: pyproject.toml, a package of two modules and the configuration, and an example of a policy.
    `name`: of the project, and of the run folder at the server. `source`: the configuration file. Returns what of the
    configuration has no meaning on a network, and what else is to be known, as lines to add to a message. UserError:
    the folder holds something else, or Flower would refuse its name. RunError: it cannot be written."""
    own = folder.resolve().name
    if not accepts(own):
        better = folder.parent / name_of(own)
        raise UserError(f"{RULE}, as the name of an app's folder, so it would refuse {own!r}; give --out {better}")
    method, task = config.method["name"], config.task.name
    text = documents.dump(as_dict(natural(config)))
    mark = hashlib.sha256(text.encode()).hexdigest()
    base = json.dumps(config.base.name)
    files = {
        "node-policy.yaml": _POLICY.format(digest=mark, method=json.dumps(method), base=base),
        "pyproject.toml": _PROJECT.format(name=name, method=method, task=task, out=f"runs/{name}"),
        "federation/__init__.py": "",
        "federation/server.py": _MODULE.format(side="server"),
        "federation/client.py": _MODULE.format(side="client"),
        "federation/config.yaml": text,
    }
    earlier = folder / "federation" / "config.yaml"
    replaced = earlier.is_file() and earlier.read_bytes() != text.encode()
    write_folders([(folder, {path: text.encode() for path, text in files.items()})], "a Flower app")
    outside = [name for name, known in ((method, methods.NAMES), (task, tasks.TASKS)) if name not in known]
    notes = {
        f"Its configuration has the digest {mark}, which an owner's policy names (node-policy.yaml).": True,
        "It replaces an app of another configuration; where both are needed, give one another --out.": replaced,
        f"The app is named {name}, as {RULE}.": source is not None and name != f"{source.stem}-{short(method)}",
        "(task.partition is left out: it divides one data set in a simulation; over a network each machine names its "
        "own data and clients, with their test split)": config.task.partition.kind != "natural",
        "(delay.* is virtual time of a simulation; over a network answers are late by themselves)":
            config.delay.sigma > 0 or config.delay.drop_out > 0,
        f"{' and '.join(outside)}: install what this names at the server and at every node, and let each node's "
        f'operator add allow="{",".join(outside)}" to --node-config': bool(outside),
    }  # fmt: skip
    return "".join(f"\n{note}" for note, applies in notes.items() if applies)
