"""`llm-fed join`: a client that was never part of a run gets an adapter from the run's pool."""

import json
import math
from pathlib import Path

import peft
import pytest
import torch
import yaml
from small_run import CLIENTS
from transformers import AutoModelForCausalLM

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.commands.join import join
from llm_fed.experiment import joining, run
from llm_fed.export import peft_folders
from llm_fed.kinds.language import load_base
from llm_fed.method.site import Site
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.reading import FORMAT, read_config
from llm_fed.settings import configfile
from llm_fed.state import State, combine


def file_of(small, client: str) -> Path:
    return small.data / client / "train.jsonl"


def train(small, folder: Path, method: dict, **changes) -> Path:
    quick = {"local": {"steps": 8}, "eval": {"cross": False, "max_new_tokens": 1}}
    config = small.config(folder / "c.yaml", method=method, **quick, **changes)
    run.train(configfile.load(config), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def local(small, tmp_path_factory) -> Path:
    """Clients with opposite answers, each with an adapter that knows only its own."""
    return train(small, tmp_path_factory.mktemp("local"), {"name": "local"})


@pytest.fixture(scope="module")
def base(finished):
    return load_base(read_config(finished).base, "cpu")


def adapter(folder: Path, base) -> State:
    return peft_folders.read(folder, base)[0]


def test_the_weights_are_a_softmax_of_the_losses():
    """At temperature 0.5, losses 0 and 0.5 differ by one e-fold: 1 / (1 + 1 / e)."""
    losses = torch.tensor([0.0, 0.5], dtype=torch.float64)
    share = 1 / (1 + math.exp(-1))
    assert joining.softmax(losses, 0.5).tolist() == pytest.approx([share, 1 - share])
    assert joining.softmax(losses, math.inf).tolist() == [0.5, 0.5]
    assert joining.softmax(losses, 0).tolist() == [1, 0]


def test_a_pool_of_clients_is_weighed_by_the_examples(local, small, base, tmp_path):
    """A newcomer with bob's examples gets mostly bob's adapter, and what is written is the sum that the card tells."""
    joined = join(local, file_of(small, "bob"), tmp_path / "new")
    weights = joined["weights"]
    assert list(weights) == list(CLIENTS) and sum(weights.values()) == pytest.approx(1, abs=1e-5)
    assert max(weights, key=weights.get) == "bob"
    assert joined["loss"] < joined["loss_of_equal_weights"]
    assert joined["pool"] == "the adapters of the 3 clients of local after round 3"
    assert joined["examples"] == 6
    states = [adapter(local / "adapters" / client, base) for client in weights]
    expected = combine(states, torch.tensor(list(weights.values())))
    assert torch.allclose(adapter(tmp_path / "new", base).row, expected.row, atol=1e-4)
    card = (tmp_path / "new/README.md").read_text()
    recipe = yaml.safe_load(card.partition("## Recipe of the merge\n\n```yaml\n")[2].partition("```")[0])
    assert recipe == joined and recipe["run"] == "run" and str(tmp_path) not in card


def test_the_pool_of_fedmerge_is_its_soup(finished, small, base, tmp_path, llm_fed):
    """From the checkpoint of the tested round; stock PEFT loads what comes of it."""
    said = llm_fed("join", finished, "--data", file_of(small, "ada"), "--out", tmp_path / "new", "--json")
    assert said.code == 0
    found = json.loads(said.out)
    assert list(found["weights"]) == ["model 0", "model 1"]
    tested = json.loads((finished / "summary.json").read_text())["round"]
    soup = Checkpoints(finished / "checkpoints").load(tested).state["state"]["soup"]
    expected = combine(soup, torch.tensor(list(found["weights"].values())))
    assert torch.allclose(adapter(tmp_path / "new", base).row, expected.row, atol=1e-4)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small.base), tmp_path / "new")
    ((name, entry), *_) = ((n, p) for n, p in model.named_parameters() if "lora_B" in n)
    short = name.removeprefix("base_model.model.").removesuffix(".default.weight")
    assert torch.equal(entry, adapter(tmp_path / "new", base)[short])


@pytest.mark.parametrize("name", ["ifca", "fedmerge-fixed"])
def test_other_methods_with_several_models_at_the_server(small, tmp_path, name):
    settings = {"ifca": {"warmup_rounds": 1}, "fedmerge-fixed": {"models_per_client": 1}}[name]
    folder = train(small, tmp_path, {"name": name, "num_models": 2, **settings}, rounds=1, export={"clients": "none"})
    recipe = join(folder, file_of(small, "ada"), tmp_path / "new")
    assert recipe["pool"] == f"the 2 models of {name}'s server after round 1"
    assert sum(recipe["weights"].values()) == pytest.approx(1, abs=1e-5)


def test_steps_train_the_merge_further(local, small, base, tmp_path):
    data = file_of(small, "cyd")
    alone, trained = (join(local, data, tmp_path / name, steps=k) for name, k in (("alone", None), ("trained", 4)))
    assert trained == {**alone, "steps": 4}
    assert not adapter(tmp_path / "alone", base).equal(adapter(tmp_path / "trained", base))
    again = join(local, data, tmp_path / "again", steps=4)
    assert again == trained
    assert adapter(tmp_path / "again", base).equal(adapter(tmp_path / "trained", base))


def test_fewer_examples_are_a_draw_of_them(local, small, tmp_path):
    assert join(local, file_of(small, "ada"), tmp_path / "new", examples=2)["examples"] == 2


def test_one_adapter_for_all_is_handed_on(small, base, tmp_path):
    """And where the run hid its clients by noise, the card says that the newcomer is not hidden."""
    folder = train(small, tmp_path, {"name": "fedit"}, rounds=1, privacy={"clip": 1.0})
    joined = join(folder, file_of(small, "ada"), tmp_path / "new")
    assert joined["weights"] == {"fedit": 1.0}
    assert adapter(tmp_path / "new", base).equal(adapter(folder / "adapters/bob", base))
    assert "noise of the run does not cover" in (tmp_path / "new/README.md").read_text()


def test_a_method_with_two_parents_trains_the_local_one(small, base, tmp_path, llm_fed, monkeypatch):
    """Without steps the newcomer gets FedIT's adapter and is told so. With steps its own is trained from where FedIT
    started; training that adds 1 to every entry makes it the start plus 1, of which the merge has three quarters."""
    folder = train(small, tmp_path, {"name": "mean", "weight": 0.25}, rounds=1)
    words = ("join", folder, "--data", file_of(small, "ada"), "--out")
    said = llm_fed(*words, tmp_path / "fed")
    assert said.code == 0 and "which --steps K would train; without it the client gets the federated one" in said.err
    fed = adapter(folder / "needs/fedit/adapters/ada", base)
    assert adapter(tmp_path / "fed", base).equal(fed)

    async def fit(self: Site, state: State, *, steps: int) -> State:
        assert steps == 8
        return state.like(state.row + 1)

    monkeypatch.setattr(Site, "fit", fit)
    assert llm_fed(*words, tmp_path / "merged", "--steps", 8).code == 0
    start = base.draw(base.structure(read_config(folder).adapter), generator(0, "initial"))
    assert torch.allclose(adapter(tmp_path / "merged", base).row, 0.25 * fed.row + 0.75 * (start.row + 1))
    assert "lambda_fed: 0.25" in (tmp_path / "merged/README.md").read_text()


def test_potara_weighs_them_by_its_closed_form(small, tmp_path):
    folder = train(small, tmp_path, {"name": "potara"}, rounds=1)
    recipe = join(folder, file_of(small, "ada"), tmp_path / "new", steps=4)
    assert 0 <= recipe["lambda_fed"] <= 1 and recipe["steps"] == 4 and recipe["a"] > 0


def test_what_the_columns_are_called_is_the_runs(local, small, tmp_path, llm_fed):
    rows = [json.loads(line) for line in file_of(small, "ada").read_text().splitlines()]
    data = tmp_path / "odd.csv"
    data.write_text("ask,say\n" + "".join(f"{row['instruction']},{row['output']}\n" for row in rows))
    words = ("join", local, "--data", data, "--out", tmp_path / "new")
    llm_fed(*words).assert_refused("no column for the prompt", "task.columns.prompt")
    said = llm_fed(*words, "task.columns.prompt=ask", "task.columns.answer=say")
    assert said.code == 0 and "ada" in said.out.splitlines()[1] and str(tmp_path / "new") in said.out


def test_mistakes_are_said_in_a_line(local, finished, small, tmp_path, llm_fed):
    data, out = file_of(small, "ada"), tmp_path / "new"
    llm_fed("join", tmp_path / "none", "--data", data, "--out", out).assert_refused("is not a run folder")
    llm_fed("join", local, "--data", tmp_path / "none", "--out", out).assert_refused("there is no such file")
    llm_fed("join", local, "--data", data, "--out", out, "rounds=3").assert_refused("rounds only affects training")
    llm_fed("join", local, "--data", data, "--out", out, f"base.name={tmp_path}/base").assert_refused("/base")
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"instruction": "w20 " * 50, "output": "w4"}) + "\n")
    llm_fed("join", local, "--data", long, "--out", out).assert_refused("none of its 1 training examples fits")
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    llm_fed("join", local, "--data", data, "--out", out).assert_refused("already exists", "--out")


def test_runs_without_a_pool_are_refused(finished, local, small, tmp_path):
    """A copy of the configuration and the summary is all that is looked at before the base is loaded."""
    data, out = file_of(small, "ada"), tmp_path / "new"

    def lacking(name: str, source: Path, **changes) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        tree = configfile.as_dict(read_config(source))
        (folder / "config.yaml").write_text(yaml.safe_dump({"format": FORMAT} | tree | changes))
        (folder / "summary.json").write_bytes((source / "summary.json").read_bytes())
        return folder

    for folder, message in (
        (lacking("cleared", local), "no personal adapter of anybody any more"),
        (lacking("parents", local, method={"name": "potara"}), "of a run of fedit that is in another folder"),
        (lacking("soup", finished), "no checkpoint of round"),
    ):
        with pytest.raises(UserError, match=message):
            join(folder, data, out)
    assert not out.exists()


@pytest.mark.parametrize(
    "method, changes, message",
    [
        ("pfedmoe", {}, "several adapters with a gate"),
        ("local", {"adapter": {"rank": {"ada": 2, "bob": 1, "cyd": 2}}}, "rank or scaling \\(of ada and of bob\\)"),
    ],
)
def test_what_cannot_be_merged_is_refused(small, tmp_path, method, changes, message):
    folder = train(small, tmp_path, {"name": method}, rounds=1, **changes)
    with pytest.raises(UserError, match=message):
        join(folder, file_of(small, "ada"), tmp_path / "new")
