"""What is exported names its base so that another machine finds the same, and is evaluated on the base as it was."""

import html
import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import tiny
import torch
import yaml
from hub_server import Hub, Repository, connected
from transformers import AutoModelForCausalLM

from llm_fed.experiment import run as experiment
from llm_fed.export.copies import public_content
from llm_fed.export.origins import as_trained, read_origin
from llm_fed.models.origin import Origin, weights_digest
from llm_fed.models.prompt import FILE
from llm_fed.settings import configfile
from llm_fed.settings.config import BaseConfig

NAME, COMMIT = "acme/llama-tiny", "0" * 40


@pytest.fixture(scope="module")
def hub(small, tmp_path_factory):
    """A Hub with a base, which has another tokenizer file than those that are loaded."""
    with pytest.MonkeyPatch.context() as patch, connected(patch, tmp_path_factory.mktemp("hub")) as hub:
        files = {path.name: path.read_bytes() for path in small.base.iterdir()}
        hub.repositories[NAME] = Repository(
            False, {**files, "vocab.txt": b"a b c", "README.md": b"---\nlicense: mit\n---\n"}
        )
        yield hub


@pytest.fixture(scope="module", params=["by name", "by folder"])
def run(request, hub, small, tmp_path_factory) -> Path:
    """A run on that base: under its name, and under its folder in the cache, to which a link leads."""
    folder = tmp_path_factory.mktemp("run")
    name = NAME
    if request.param == "by folder":
        from huggingface_hub import snapshot_download

        (folder / "my-base").symlink_to(snapshot_download(NAME))
        name = str(folder / "my-base")
    config = small.config(folder / "c.yaml", base={"name": name, "dtype": "float32"}, rounds=1)
    experiment.train(configfile.load(config), folder / "run")
    return folder / "run"


def card_of(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_a_base_of_the_hub_is_named_by_id_and_commit(run, small, llm_fed, tmp_path):
    folder = run / "adapters/ada"
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == (NAME, COMMIT)
    known = {"name": NAME, "revision": COMMIT, "dtype": "float32", "weights": weights_digest(small.base)}
    assert json.loads((folder / FILE).read_text())["base"] == known
    card = (folder / "README.md").read_text()
    assert card_of(card)["base_model"] == NAME
    assert f"of `{NAME}` (revision `{COMMIT}`, float32), trained" in card and "my-base" not in card
    assert f"base, folder = {NAME!r}," in card and card.count(f"revision={COMMIT!r}") == 2
    page = html.unescape(re.sub(r"<[^>]+>", "", (run / "report.html").read_text()))
    assert f"base {NAME} at revision {COMMIT} (float32)" in page and str(run.parent) not in page

    said = llm_fed("export", run, tmp_path / "out", "--client", "ada")
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "out/ada" / FILE).read_text())["base"] == known
    for file in (tmp_path / "out/ada").iterdir():
        assert b"my-base" not in file.read_bytes(), file


def test_peft_loads_the_base_that_the_adapter_names(run):
    """AutoPeftModel takes name and revision from the folder."""
    folder = run / "adapters/ada"
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    base = AutoModelForCausalLM.from_pretrained(NAME, revision=COMMIT)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, folder).eval()(**tiny.inputs("llama", 2)).logits
        assert torch.equal(model(**tiny.inputs("llama", 2)).logits, expected)


def test_a_push_names_it_as_well(run, hub: Hub, llm_fed):
    assert llm_fed("push", run, "ann", "--client", "ada").code == 0
    files = hub.repositories["ann/run-fedit-ada"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == NAME
    assert json.loads(files[FILE])["base"]["revision"] == COMMIT
    assert card_of(files["README.md"].decode())["license"] == "mit"  # of the base's own card
    hub.repositories.pop("ann/run-fedit-ada")


def test_a_merged_model_has_all_files_of_the_tokenizer(run, llm_fed, tmp_path):
    """Also those that lie on the Hub alone, as nothing here has loaded them."""
    assert llm_fed("export", run, tmp_path / "out", "--merged", "--client", "ada").code == 0
    assert (tmp_path / "out/ada/vocab.txt").read_bytes() == b"a b c"
    assert card_of((tmp_path / "out/ada/README.md").read_text())["base_model"] == NAME


def test_adapters_on_the_base_and_on_its_folder_are_merged(run, hub, small, llm_fed, tmp_path):
    """Under one name or another, and of a copy elsewhere: the weights are the same."""
    other = tmp_path / "other"
    shutil.copytree(run / "adapters/bob", other)
    shutil.copytree(small.base, tmp_path / "copied")
    settings = json.loads((other / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "copied")
    (other / "adapter_config.json").write_text(json.dumps(settings | {"revision": None}))
    said = llm_fed(
        "merge", "mean", "--fed", run / "adapters/ada", "--local", run / "adapters/bob", "--out", tmp_path / "m"
    )
    assert said.code == 0 and "fits" not in said.err, said.err
    said = llm_fed("merge", "mean", "--fed", run / "adapters/ada", "--local", other, "--out", tmp_path / "n")
    assert said.code == 0 and "fits" not in said.err, said.err
    tiny.build("llama", seed=1).save_pretrained(tmp_path / "copied")
    said = llm_fed("merge", "mean", "--fed", run / "adapters/ada", "--local", other, "--out", tmp_path / "o")
    said.assert_refused("--fed is an adapter of 'acme/llama-tiny'", "copied", "--base")


def test_a_base_that_was_renamed_in_the_settings_is_that_one(run, tmp_path):
    shutil.copytree(run / "adapters/ada", tmp_path / "ada")
    path = tmp_path / "ada/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "a/b", "revision": None}))
    assert read_origin(tmp_path / "ada") == Origin("a/b", dtype="float32")


@pytest.mark.parametrize(
    ("keys", "expected", "note"),
    [
        ([], ("v1", "nf4", "bfloat16"), "the base is quantised to nf4, as when the adapter was trained"),
        (["base.quantization"], ("v1", None, "bfloat16"), ""),
        (["base.dtype", "base.revision"], (None, "nf4", "float32"), "quantised to nf4"),
    ],
)
def test_the_base_is_loaded_as_in_training_but_for_what_is_set(keys, expected, note):
    notes: list[str] = []
    origin = Origin("a/b", "v1", quantization="nf4", dtype="bfloat16")
    found = as_trained(BaseConfig(name="a/b", dtype="float32"), origin, keys, notes.append)
    assert (found.revision, found.quantization, found.dtype) == expected
    assert (note in notes[0]) if note else not notes
    other = as_trained(BaseConfig(name="c/d", dtype="float32"), origin, [], notes.append)
    assert other.revision is None and other.quantization == "nf4"  # the revision is one of a/b


def test_without_bitsandbytes_it_is_said(monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr("llm_fed.export.origins.importlib.util.find_spec", lambda name: None)
    found = as_trained(BaseConfig(name="a/b"), Origin("a/b", quantization="nf4"), [], notes.append)
    assert found.quantization is None
    assert "trained on the base in nf4, but bitsandbytes is not installed" in notes[0]


def test_nothing_is_said_of_a_base_in_full_precision(capsys):
    as_trained(BaseConfig(name="a/b"), Origin("a/b", "v1", dtype="float32"), [], pytest.fail)
    as_trained(BaseConfig(name="a/b"), None, [], pytest.fail)


def test_a_damaged_origin_is_named(run, tmp_path):
    shutil.copytree(run / "adapters/ada", tmp_path / "ada")
    path = tmp_path / "ada" / FILE
    values = {key: value for key, value in json.loads(path.read_text()).items() if key != "checksum"}
    path.write_text(json.dumps(values | {"base": {"name": 5}}))
    for read in (lambda: read_origin(tmp_path / "ada"), lambda: public_content(path)):
        with pytest.raises(Exception, match="prompt.json is damaged: base is not an object with a name"):
            read()
