"""A run that starts from the adapters of another: `adapter.start`, `llm-fed run --from`."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from network import NetworkInProcess, tree
from safetensors.torch import load_file, save_file

from llm_fed.basics.errors import UserError
from llm_fed.bench import build, start
from llm_fed.commands import evaluate
from llm_fed.experiment import run as experiment
from llm_fed.export import models, peft_folders
from llm_fed.merge.delta import joined
from llm_fed.methods import METHODS
from llm_fed.models.base import Base
from llm_fed.network import server
from llm_fed.runs import tracking
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State


@pytest.fixture(scope="module")
def origins(small, tmp_path_factory) -> dict[str, Path]:
    """Finished runs: one adapter for all, one per client, and two experts per client."""
    folder = tmp_path_factory.mktemp("origins")
    for name in ("fedit", "local", "pfedmoe"):
        path = small.config(folder / f"{name}.yaml", rounds=1, method={"name": name}, local={"steps": 1})
        experiment.train(configfile.load(path), folder / name)
    return {path.name: path for path in folder.iterdir() if path.is_dir()}


def prepared(small, origin: Any, method: str | dict[str, Any], **changes: Any) -> build.Experiment:
    settings = {"name": method} if isinstance(method, str) else method
    adapter = {"start": str(origin), **changes.pop("adapter", {})}
    return build.prepare(from_dict(small.tree(method=settings, adapter=adapter, **changes)), tracking.Reporter())


def exported(folder: Path, made: build.Experiment) -> dict[str, State]:
    assert isinstance(made.base, Base)
    return {
        name: models.read(folder / "adapters" / name, site.structure, made.base) for name, site in made.clients.items()
    }


def test_equal_adapters_are_the_start_bit_for_bit(small, origins):
    made = prepared(small, origins["fedit"], "fedit")
    adapter = exported(origins["fedit"], made)["ada"]
    assert adapter["model.layers.0.self_attn.q_proj.lora_B"].any()
    assert all(site.initial().equal(adapter) for site in [*made.clients.values(), made.server])
    assert made.method.init(made.server).equal(adapter)


@pytest.mark.parametrize("method", ["fedit", "ffa", "fedsa", "fedbuff", "local"])
def test_a_client_starts_from_its_own_adapter_only_where_nothing_is_shared(small, origins, method, tmp_path):
    """The mean has the numbers of training examples as weights; of clients that the origin does not know it is all
    that there is."""
    origin = tmp_path / "origin"
    shutil.copytree(origins["local"], origin)
    lines = read_records(origin / "metrics.jsonl")
    sizes = {"ada": 1, "bob": 2, "cyd": 5}
    for line in lines:
        if line["kind"] == "client":
            line["examples"] = sizes[line["client"]]
    (origin / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = prepared(small, origin, method)
    own = exported(origin, made)
    mean = sum(size * own[name].row.double() for name, size in sizes.items()) / 8
    torch.testing.assert_close(made.server.initial().row.double(), mean, rtol=0, atol=1e-7)
    for name, site in made.clients.items():
        assert site.initial().equal(own[name] if method == "local" else made.server.initial())


def test_folders_without_metrics_weigh_alike_and_one_folder_is_all(small, origins):
    made = prepared(small, origins["local"] / "adapters", "fedit")
    own = exported(origins["local"], made)
    mean = sum(state.row.double() for state in own.values()) / 3
    torch.testing.assert_close(made.server.initial().row.double(), mean, rtol=0, atol=1e-7)
    made = prepared(small, origins["local"] / "adapters" / "bob", "fedit")
    assert all(site.initial().equal(own["bob"]) for site in [*made.clients.values(), made.server])
    said = start.give(made.config, made.method, made.clients.values(), made.base)
    assert said == f"starting from the adapter in {made.config.start}"


def test_every_method_starts_there_or_says_why_not(small, origins):
    """What starts has the adapter at every site: its server's, and what a client that was never asked makes of the
    first message."""
    refused = {}
    for name, kind in METHODS.items():
        if kind.whole_models:
            continue
        for origin in ("fedit", "pfedmoe") if name in ("fedit", "pfedmoe", "fedem") else ("fedit",):
            try:
                made = prepared(small, origins[origin], name, task={"server": {"examples": 1}})
            except UserError as error:
                refused[name, origin] = str(error)
                continue
            start = made.server.initial()
            assert all(site.initial().equal(start) for site in made.clients.values())
            if made.server.structure.plain:
                state = made.method.init(made.server)
                work = {
                    id: made.method.personalize(site, made.method.broadcast(state, id))
                    for id, site in made.clients.items()
                }
                for found in made.runtime.run(work).values():
                    if not made.server.structure.delta:
                        assert found.equal(start), name
                    else:  # it may lie beneath a fresh adapter
                        torch.testing.assert_close(joined(found, made.server.structure.scaling).row, start.row)
    several = {name for (name, origin), reason in refused.items() if "several models that differ" in reason}
    assert several == {"fedmerge", "fedmerge-fixed", "ifca"}
    experts = {name for (name, origin), reason in refused.items() if origin == "fedit" and "one adapter, but" in reason}
    assert experts == {"feddpa", "fedalt", "pfedmoe", "fedem"}
    assert "several experts, but fedit gives" in refused["fedit", "pfedmoe"]
    assert ("pfedmoe", "pfedmoe") not in refused and not any("Traceback" in reason for reason in refused.values())


def test_a_run_from_another_goes_on_and_is_repeated_from_its_own_configuration(small, origins, tmp_path, llm_fed):
    """The first round's start is the old adapter: with a rate of nearly nothing it is what comes out."""
    config = small.config(tmp_path / "c.yaml", rounds=1, local={"steps": 1, "lr": 1e-12, "lr_end": 1e-12})
    said = llm_fed("run", config, "--from", origins["fedit"], "--out", tmp_path / "new")
    assert said.code == 0 and "starting from the 3 adapters in" in said.err
    saved = tmp_path / "new/config.yaml"
    assert yaml.safe_load(saved.read_text())["adapter"]["start"] == str(origins["fedit"])
    made = prepared(small, origins["fedit"], "fedit")
    old, new = (exported(folder, made)["ada"].row for folder in (origins["fedit"], tmp_path / "new"))
    torch.testing.assert_close(new, old, rtol=0, atol=1e-6)
    assert llm_fed("run", saved, "--out", tmp_path / "again").code == 0
    assert (tmp_path / "again/metrics.jsonl").read_bytes() == (tmp_path / "new/metrics.jsonl").read_bytes()
    llm_fed("run", config, "--out", tmp_path / "new").assert_refused("adapter.start", "--out")


def test_a_start_that_changed_is_refused_but_what_was_exported_is_still_scored(small, origins, tmp_path):
    origin, run = tmp_path / "origin", tmp_path / "run"
    shutil.copytree(origins["fedit"], origin)
    config = from_dict(small.tree(rounds=1, adapter={"start": str(origin)}, local={"steps": 1}))
    experiment.train(config, run)
    shutil.rmtree(origin / "adapters")
    shutil.copytree(origins["local"] / "adapters", origin / "adapters")
    longer = from_dict(small.tree(rounds=2, adapter={"start": str(origin)}, local={"steps": 1, "lr_end": 0.05}))
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=r"another configuration \(local.lr_end"):
        experiment.train(longer, run)
    longer = from_dict(small.tree(rounds=2, adapter={"start": str(origin)}, local={"steps": 1}))
    with pytest.raises(UserError, match="have changed since"):
        experiment.train(longer, run)
    assert (run / "config.yaml").read_bytes() == before and (run / "summary.json").exists()
    shutil.rmtree(origin)
    assert evaluate.evaluate_run(run)["scores"]["clients"].keys() == {"ada", "bob", "cyd"}


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"adapter": {"rank": 4}}, "has rank 2 and alpha 8"),
        ({"adapter": {"alpha": 4}}, "has rank 2 and alpha 8"),
        ({"adapter": {"target_modules": ["q_proj"]}}, "adapter.target_modules must be those"),
        ({"privacy": {"clip": 1.0}}, "epsilon would not cover"),
        ({"adapter": {"start": "nowhere"}}, "adapter.start=nowhere holds no adapter"),
    ],
)
def test_what_does_not_fit_is_refused(small, origins, changes, part):
    with pytest.raises(UserError, match=part):
        prepared(small, origins["fedit"], "fedit", **changes)


@pytest.mark.parametrize(
    ("flag", "setting", "remedy"),
    [(True, {}, "has rank 2 and alpha 8, scaled by alpha / sqrt(rank) (adapter.rslora=true), where"),
     (False, {"rslora": True}, "has rank 2 and alpha 8, scaled by alpha / rank (adapter.rslora=false), where")],
)  # fmt: skip
def test_the_setting_of_another_scaling_is_named(small, origins, tmp_path, capsys, flag, setting, remedy):
    """An adapter of stock PEFT with rsLoRA, and one without for a run with it; with the setting each is a start. That
    its base was quantised is said."""
    folder = stranger(origins["fedit"] / "adapters/ada", tmp_path / "ada", use_rslora=flag)
    with pytest.raises(UserError, match=re.escape(remedy)):
        prepared(small, folder, "fedit", adapter=setting)
    made = prepared(small, folder, "fedit", adapter={"rslora": flag})
    assert "trained on the base" not in capsys.readouterr().err
    assert made.server.initial().equal(peft_folders.read(folder, made.base)[0])
    values = json.loads((path := folder / "prompt.json").read_text())
    values["base"]["quantization"] = values.pop("checksum") and "nf4"
    path.write_text(json.dumps(values))
    prepared(small, folder, "fedit", adapter={"rslora": flag})
    assert "trained on the base in nf4, and here it is in full precision" in capsys.readouterr().err


def stranger(adapter: Path, target: Path, **settings: Any) -> Path:
    """A copy of an adapter as another program has written it: without a checksum, and with other settings."""
    shutil.copytree(adapter, target)
    save_file(load_file(target / peft_folders.WEIGHTS), target / peft_folders.WEIGHTS)
    path = target / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return target


def test_an_unfinished_origin_and_the_run_itself_are_refused(small, origins, tmp_path, llm_fed):
    origin = tmp_path / "origin"
    shutil.copytree(origins["fedit"], origin)
    config = small.config(tmp_path / "c.yaml")
    llm_fed("run", config, "--from", origin, "--out", origin, "--fresh").assert_refused("the folder of this run itself")
    assert (origin / "adapters").is_dir()
    (origin / "summary.json").unlink()
    llm_fed("run", config, "--from", origin, "--out", tmp_path / "new").assert_refused("is not finished")
    assert not (tmp_path / "new").exists()


def test_over_a_network_it_is_refused(small, origins, tmp_path):
    settings = tree(small, adapter={"start": str(origins["fedit"])})
    network = NetworkInProcess(tmp_path, small, settings)
    with pytest.raises(UserError, match=r"adapter\.start: over a network"):
        server.train(from_dict(settings), tmp_path / "run", network)
