"""Every file in scripts/runs loads, and every row of its comparison resolves to a run that could begin."""

import re
from pathlib import Path

import every
import pytest

from llm_fed import methods
from llm_fed.basics.errors import lookup
from llm_fed.bench import parents
from llm_fed.commands import section
from llm_fed.scoring.scores import METRICS
from llm_fed.settings import configfile
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict, from_dict
from llm_fed.tasks import TASKS
from llm_fed.tasks.partition import OWN

FOLDER = Path(__file__).parents[2] / "scripts" / "runs"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
_PATH, _BOTH = ["task.path=data"], ["base.name=base", "task.path=data"]
OPEN = {  # what a file leaves to the command line
    **dict.fromkeys((
        "feddle_cpu.yaml", "fedmerge_cifar100_cpu.yaml", "fedmerge_pacs_cpu.yaml", "fedmoe_cpu.yaml",
        "fedmoe_gate.yaml", *(path.name for path in FOLDER.glob("fedllm_bench_*.yaml")),
    ), _PATH),
    **dict.fromkeys((
        "flan_cpu.yaml", "flan_curve.yaml", "flan_methods.yaml", "potara_vit_cpu.yaml", "flan_smollm2.yaml",
        "flan_smollm2_cpu.yaml", "preferences_cpu.yaml", "default_method.yaml", "default_method_200.yaml",
        "default_method_rates.yaml", "real_rows.yaml", "real_potara.yaml", "contradictions.yaml", "shared_facts.yaml",
        "classification_cpu.yaml",
    ), _BOTH),
    "quickstart_ifca.yaml": ["base.name=base"],
}  # fmt: skip


def checked(name: str, words: list[str]) -> Config:
    """The configuration, after what `prepare` checks before it reads any data or model."""
    config = configfile.load(FOLDER / name, [*words, *OPEN.get(name, [])])
    method, partition = methods.build(config.method), config.task.partition
    parents.check(config, method)
    assert method.any_model or not config.base.clients
    assert all((getattr(partition, name) is not None) == (partition.kind == kind) for name, kind in OWN.items())
    task = lookup("task.name", config.task.name, TASKS)
    assert (config.eval.metric or task.metric) in METRICS
    if config.task.server.name is not None:
        assert lookup("task.server.name", config.task.server.name, TASKS).images == task.images
    return config


@pytest.mark.parametrize("name", FILES)
def test_a_file_and_each_of_its_rows_resolve_to_what_they_say(name):
    """A file without rows is a configuration; as a run saves it, it is the same one."""
    config = checked(name, [])
    assert config == from_dict(as_dict(config))
    rows, _ = section.read_section(FOLDER / name)
    if rows:
        every.passes(rows, lambda label: row_is_what_its_label_says(name, label, rows[label]))


def row_is_what_its_label_says(name: str, label: str, words: list[str]) -> None:
    config = checked(name, words)
    kind, _, number = label.partition(" ")
    method = "mean" if re.match(r"(local|fedit)\(", kind) else kind.partition("(")[0]  # a mean of one is its parent
    assert config.method["name"] == method
    if name.startswith("feddle_table"):
        assert (config.task.server.name is not None) == label.endswith("out of domain")
    if number.startswith("r="):
        assert config.adapter is not None
        assert (config.adapter.rank, config.adapter.alpha) == (int(number[2:]), 2 * int(number[2:]))
    elif match := re.fullmatch(r"d=(\d+)( lr=(.+))?", number):
        assert config.method["num_models"] == int(match[1])
        weight_lr = config.method.get("weight_lr", 0.1)
        assert float(match[3]) in (weight_lr, config.local.lr) if match[3] else weight_lr == 0.1
    elif match := re.fullmatch(r"lr=(.+)", number):
        assert config.local.lr == float(match[1])
    elif number.startswith("w="):
        assert config.method["weight"] == float(number[2:])
    elif number.startswith("resnet-"):
        assert config.base.name == number
    elif match := re.fullmatch(r"(\d+)/15", number):  # of 15 models
        assert (config.method["models_per_client"], config.method["num_models"]) == (int(match[1]), 15)
    elif match := re.fullmatch(r"(\d+)/(10|100)", number):  # classes
        assert config.task.partition.classes == int(match[1])
        assert config.task.name == {"10": "cifar10", "100": "cifar100-fine"}[match[2]]
    elif match := re.fullmatch(r"(cifar-100 )?(gamma|gate_lr)=(.+)", number):
        assert config.task.name == ("cifar100-fine" if match[1] else "cifar10")
        value = config.task.partition.alpha if match[2] == "gamma" else config.method["gate_lr"]
        assert value == float(match[3])
    elif kind.startswith(("potara(", "grid(", "fedit(")):
        assert config.method["fed_round"] == int(kind.partition("(")[2][:-1]) and config.method["local_round"] == 300


def test_ifca_is_compared_on_the_quickstart():
    """Its row `fedmerge` is the quickstart itself."""
    words = section.read_section(FOLDER / "quickstart_ifca.yaml")[0]["fedmerge"]
    config = checked("quickstart_ifca.yaml", words)
    assert config == configfile.load(FOLDER.parents[1] / "llm_fed/assets/quickstart.yaml", OPEN["quickstart_ifca.yaml"])
