"""Mergers of one's own: functions under @Merger, named where a method is named."""

import json
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import outside
import pytest
import torch
import yaml
from safetensors.torch import load_file

from llm_fed import methods
from llm_fed.basics.errors import UserError
from llm_fed.merge.mean import mix_factors
from llm_fed.mergers.interpolation import mean
from llm_fed.method.merge import kind_of
from llm_fed.runs.records import read_records
from llm_fed.settings.plugins import allowing
from llm_fed.state import State

IMPORTS = """
from typing import Annotated, Literal
from llm_fed.basics.errors import UserError
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.settings import AtLeast, AtMost
from llm_fed.state import State
"""
BLEND = f"""
{IMPORTS}
def whole(settings):
    if settings.share == 1 and settings.of == "local":
        raise UserError("method.share=1 keeps nothing of the other")


@Merger(paper="Blend (Doe 2026)", refuse=whole)
async def blend(
    client: Client, fed: State, local: State, *, share: Annotated[float, AtLeast(0), AtMost(1)] = 0.25,
    of: Literal["fed", "local"] = "fed",
) -> Merged:
    '''A share of one, and the rest of the other.'''
    losses = await client.losses_of([fed, local])
    one, other = (fed, local) if of == "fed" else (local, fed)
    return share * one + (1 - share) * other, {{"share": share, "losses": [round(loss, 4) for loss in losses]}}
"""
NAME = "blends:blend"
BODY = ":\n    return fed, {}\n"
OWN = "@Merger()\ndef own(client, fed, local"


@pytest.fixture
def blends(here) -> Path:
    outside.module(here, "blends", BLEND)
    return here


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_a_built_in_merger_is_a_plain_function():
    """It is called with two states, and says what it made of them."""
    fed, local = (State.of({"l.lora_A": torch.full((2, 3), x), "l.lora_B": torch.full((3, 2), x)}) for x in (1.0, 3.0))
    state, recipe = mean(SimpleNamespace(), fed, local, weight=0.25)
    assert state.equal(mix_factors(fed, local, 0.25)) and recipe == {"lambda_fed": 0.25}
    assert kind_of(wraps(mean)(lambda *given, **settings: None)) is kind_of(mean)  # also under another decorator


def test_its_keyword_arguments_are_its_settings(blends):
    built = methods.build({"name": NAME, "share": 1, "local_round": 2})
    assert (built.share, built.of, built.local_round, built.paper) == (1.0, "fed", 2, "Blend (Doe 2026)")
    assert [parent.name for parent in built.parents] == ["fedit", "local"] and built.parents[1].round == 2
    assert methods.canonical({"name": NAME, "share": 0.25, "of": "local"}) == {"name": NAME, "of": "local"}
    assert type(built) is methods.find(NAME) and type(built).__doc__.startswith("A share of one")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"share": 2}, "method.share is 2.0; it must be at least 0 and at most 1"),
        (
            {"shar": 1},
            "unknown key method.shar (the closest is 'share'); known: fed_round, local_round, private_head, ",
        ),
        ({"of": "fd"}, "method.of='fd' is unknown (the closest is 'fed'); known: fed, local"),
        ({"fed_round": 0}, "method.fed_round is 0; it must be at least 1, or null"),
        ({"share": 1, "of": "local"}, "method.share=1 keeps nothing of the other"),
    ],
)
def test_its_settings_are_checked(blends, settings, part):
    with pytest.raises(UserError) as refused:
        methods.build({"name": NAME, **settings})
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "def own(client, fed, local):\n    return fed, {}\n",
            "or a function under @Merger(...) of llm_fed.method.merge",
        ),
        (
            "@Merger()\ndef own(client, fed, local, *, paper=1):\n    return fed, {}\n",
            "own: paper is taken by every merge",
        ),
        (
            "@Merger()\ndef own(client, fed, local, *, parents=1):\n    return fed, {}\n",
            "own: parents is taken by every",
        ),
        (OWN + ", *, x)" + BODY, "setting x is of the type typing.Any"),
        (
            "@Merger()\ndef own(client, fed, local, *, x: list[int]):\n    return fed, {}\n",
            "x is of the type list[int]",
        ),
        (
            "@Merger()\ndef own(client, fed, local, *, x: 'Nowhere' = 1):\n    return fed, {}\n",
            "'Nowhere' is not defined",
        ),
        (
            "def make():\n    @Merger()\n    def inner(client, fed, local):\n        return fed, {}\n    return inner\n"
            "own = make()\n",
            "is not found as own:make.<locals>.inner; define it at the top level of its module",
        ),
    ],
)
def test_what_is_no_merger_is_refused(here, text, part):
    outside.module(here, "own", IMPORTS + text)
    with pytest.raises(UserError) as refused:
        methods.build({"name": "own:own"})
    assert part in str(refused.value), refused.value


def test_it_runs_is_compared_merges_and_joins(blends, small, llm_fed, tmp_path):
    """With what it says of each client in metrics.jsonl and on the card; the same numbers by each way."""
    tree = small.tree(rounds=1, method={"name": NAME, "share": 0.75})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    assert llm_fed("run", tmp_path / "c.yaml", "--out", tmp_path / "run").code == 0
    recipes = {line["client"]: line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "merge"}
    assert recipes["ada"]["share"] == 0.75 and len(recipes["ada"]["losses"]) == 2
    fed, local = (tensors(tmp_path / "run/needs" / name / "adapters/ada") for name in ("fedit", "local"))
    found = tensors(tmp_path / "run/adapters/ada")
    for name, value in found.items():
        torch.testing.assert_close(value, 0.75 * fed[name] + 0.25 * local[name])
    card = (tmp_path / "run/adapters/ada/README.md").read_text()
    assert "Blend (Doe 2026)" in card and "share: 0.75" in card
    parents = "--fed", tmp_path / "run/needs/fedit", "--local", tmp_path / "run/needs/local"
    said = llm_fed("merge", NAME, *parents, "--out", tmp_path / "merged", "method.share=0.75", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["clients"]["ada"]["losses"] == recipes["ada"]["losses"]
    assert all(value.equal(found[name]) for name, value in tensors(tmp_path / "merged/ada").items())
    said = llm_fed("compare", tmp_path / "c.yaml", "--methods", f"local,{NAME}", "--out", tmp_path / "table")
    assert said.code == 0, said.err
    assert len(list((tmp_path / "table/needs").iterdir())) == 1  # FedIT's; the local run is a row
    with allowing([NAME]):
        data = "--data", small.data / "ada" / "train.jsonl"
        said = llm_fed("join", tmp_path / "run", *data, "--out", tmp_path / "new", "--steps", 2, "--json")
    assert said.code == 0 and json.loads(said.out)["share"] == 0.75
    llm_fed("join", tmp_path / "run", *data, "--out", tmp_path / "newer").assert_refused("--allow blends:blend")


def test_what_llm_fed_merge_takes(blends, tmp_path, llm_fed):
    words = "--fed", tmp_path, "--local", tmp_path, "--out", tmp_path / "out"
    outside.module(blends, "half", outside.HALF)
    llm_fed("merge", "half:Half", *words).assert_refused("is a method with rounds, which llm-fed run trains")
    llm_fed("merge", "fedit", *words).assert_refused("merge='fedit' is unknown; known: fisher, potara, ")
    llm_fed("merge", NAME, *words, "method.damping=1").assert_refused("neither a run folder nor a PEFT folder")


def test_a_failing_merger_names_its_client(here, small, tmp_path, llm_fed):
    """The parents stay; the next command trains neither of them."""
    text = "from llm_fed.basics.errors import ClientError\n" + IMPORTS + "@Merger()\ndef own(client, fed, local):\n"
    outside.module(here, "own", text + "    raise ClientError(f'client {client.id}: no way to merge')\n")
    config = small.config(tmp_path / "c.yaml", rounds=1, method={"name": "own:own"})
    said = llm_fed("run", config, "--out", tmp_path / "run")
    assert said.code == 1 and "client ada: no way to merge" in said.err.splitlines()[-1]
    assert (tmp_path / "run/needs/local/summary.json").is_file() and not (tmp_path / "run/summary.json").exists()
