"""Run files by name: those of llm_fed where no such file is here, and what is said where there is none at all."""

import json
from pathlib import Path

import pytest

from llm_fed.basics.errors import UserError
from llm_fed.settings import configfile, shipped

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_a_file_of_llm_fed_is_found_by_its_name_from_anywhere(here):
    for name in ("flan.yaml", "scripts/runs/flan.yaml", Path("flan.yaml")):
        assert shipped.find(name) == SCRIPTS / "runs/flan.yaml"
    assert configfile.load("flan.yaml", ["rounds=7"]).rounds == 7


def test_a_file_that_is_here_wins(here):
    (here / "flan.yaml").write_text("rounds: 3\n")
    assert shipped.find("flan.yaml") == Path("flan.yaml") and configfile.load("flan.yaml").rounds == 3
    assert shipped.find(SCRIPTS / "runs/xnli.yaml") == SCRIPTS / "runs/xnli.yaml"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flan_cpo.yaml", "; did you mean flan_cpu.yaml or "),
        ("scripts/runs/rolebanch.yaml", "; did you mean rolebench.yaml"),
        ("clinic.yaml", "; did you mean clinics.yaml"),  # one that is here
        ("other/flan.yaml", "; did you mean flan.yaml or "),  # the name alone would do
        ("zzz", "; llm-fed runs lists those that llm_fed ships"),
        ("gpu-8.yaml", "there is no configuration file gpu-8.yaml; "),  # of a launch, not of a run
    ],
)
def test_a_name_that_nobody_has(here, name, said):
    (here / "clinics.yaml").write_text("rounds: 3\n")
    with pytest.raises(UserError) as caught:
        configfile.read(name)
    assert str(caught.value).startswith(f"there is no configuration file {name}; ") and said in str(caught.value)


def test_runs_lists_them(llm_fed):
    rows = json.loads(llm_fed("runs", "--json").out)
    assert {row["file"] for row in rows} == {
        str(path) for folder in ("runs", "launch") for path in SCRIPTS.glob(f"{folder}/*.yaml")
    }
    about = {row["name"]: row["about"] for row in rows}
    assert about["flan.yaml"] == "FedMerge on federated Flan" and about["gpu-1.yaml"].startswith("One GPU")
    assert all(5 < len(text) < 160 for text in about.values()), about
    assert "flan.yaml\n  about: FedMerge on federated Flan\n" in llm_fed("runs").out
