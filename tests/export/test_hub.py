"""`llm-fed push` against a Hub on loopback: what arrives there, what a second push sends, and every refusal."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import every
import peft
import pytest
import tiny
import torch
import yaml
from hub_server import TOKEN, Hub, Repository, connected
from huggingface_hub import constants, snapshot_download
from transformers import AutoModelForCausalLM

from llm_fed.basics.errors import UserError
from llm_fed.export.card import model_card
from llm_fed.export.hub import repository_names
from llm_fed.kinds.wording import Model
from llm_fed.models.prompt import Prompt
from llm_fed.tasks.common import Template

ROOT = Path(__file__).parents[2]
ADA, BOB, CYD = (f"ann/run-fedmerge-{client}" for client in ("ada", "bob", "cyd"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with connected(monkeypatch, tmp_path) as hub:
        yield hub


def front(hub: Hub, repository: str) -> dict:
    return yaml.safe_load(hub.repositories[repository].files["README.md"].decode().split("---\n")[1])


def logits(base: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(model, adapter).eval()(**tiny.inputs("llama", 2)).logits


def test_what_is_pushed_loads_with_stock_peft(hub, llm_fed, finished, small, tmp_path):
    said = llm_fed("push", finished, "ann")
    assert said.code == 0, said.err
    assert said.out.splitlines() == [f"pushed    {hub.url}/{name}" for name in (ADA, BOB, CYD)]
    outputs = []
    for client, repository in zip(("ada", "bob", "cyd"), (ADA, BOB, CYD), strict=True):
        folder = Path(snapshot_download(repository, local_dir=tmp_path / client))
        outputs.append(logits(small.base, folder))
        assert torch.equal(outputs[-1], logits(small.base, finished / "adapters" / client))
        scores = json.loads((finished / "summary.json").read_text())["scores"]["clients"]
        (result,) = front(hub, repository)["model-index"][0]["results"]
        assert result["metrics"] == [{"type": "rouge1", "value": round(scores[client], 2)}]
        assert result["dataset"] == {"name": f"files, client {client}", "type": "files", "split": "test"}
    assert not torch.equal(outputs[0], outputs[2])
    assert front(hub, ADA)["library_name"] == "peft" and front(hub, ADA)["license"] == "other"
    text = hub.repositories[ADA].files["README.md"].decode()
    for part in ("`fedmerge` (FedMerge", "num_models: 2", "`other`: no licence was given"):
        assert part in text


def test_neither_paths_nor_the_token_leave_this_machine(hub, llm_fed, finished, small):
    said = llm_fed("push", finished, "ann")
    pushed = {name: data for repository in hub.repositories.values() for name, data in repository.files.items()}
    assert pushed.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors", "prompt.json"}
    for data in [*pushed.values(), said.out.encode(), said.err.encode()]:
        for secret in (TOKEN, str(small.base.parent), str(finished.parent), str(Path.home()), os.uname().nodename):
            assert secret.encode() not in data
    assert json.loads(pushed["adapter_config.json"])["base_model_name_or_path"] == small.base.name


@pytest.mark.parametrize("more", [[], ["--one-repository"], ["--client", "ada", "--prefix", "mine"]])
def test_a_dry_run_lists_what_would_arrive_and_asks_the_hub_nothing(hub, llm_fed, finished, more):
    planned = llm_fed("push", finished, "ann", "--dry-run", *more)
    assert planned.code == 0 and not hub.repositories, planned.err
    assert llm_fed("push", finished, "ann", *more).code == 0
    for line, (name, repository) in zip(planned.out.splitlines(), sorted(hub.repositories.items()), strict=True):
        would, _, files = line.partition(" in ")
        assert would.startswith(f"would push {hub.url}/{name}: ")
        assert {*files.split(", ")} == repository.files.keys() - {".gitattributes"}


def test_pushing_again_sends_only_what_changed(hub, llm_fed, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    assert llm_fed("push", tmp_path / "run", "ann").code == 0
    assert hub.commits() == 3
    said = llm_fed("push", tmp_path / "run", "ann")
    assert (said.code, said.err) == (0, "")
    assert [line.split()[0] for line in said.out.splitlines()] == ["unchanged"] * 3
    assert hub.commits() == 3 and len([request for request in hub.requests if request.startswith("PUT")]) == 3
    shutil.copy(finished / "adapters/cyd/adapter_model.safetensors", tmp_path / "run/adapters/ada")
    said = llm_fed("push", tmp_path / "run", "ann")
    assert [line.split()[0] for line in said.out.splitlines()] == ["pushed", "unchanged", "unchanged"]
    large = [hub.repositories[name].files["adapter_model.safetensors"] for name in (ADA, CYD)]
    assert large[0] == large[1] and hub.commits() == 4


STEPS = ("repos/create", "models/" + BOB, "preupload", "objects/batch", "PUT", "commit")


@pytest.mark.parametrize("step", every.quick(STEPS, ["PUT", "commit"]))
def test_an_interrupted_push_continues(step, hub, llm_fed, finished):
    """The Hub fails with the second client, at each step of a push; what the first one has is left alone afterwards."""
    seen = []

    def refuse(request):
        seen.append(request)
        return 413 if step in request and len([one for one in seen if step in one]) > ("models" not in step) else None

    hub.refuse = refuse
    said = llm_fed("push", finished, "ann")
    assert said.code == 1 and said.out == f"pushed    {hub.url}/{ADA}\n"
    assert said.err == (
        f"llm-fed: {BOB} is not pushed, the Hub answers 413: no more today; give the same command again to continue\n"
    )
    hub.refuse = lambda request: None
    said = llm_fed("push", finished, "ann")
    assert [line.split()[0] for line in said.out.splitlines()] == ["unchanged", "pushed", "pushed"]
    assert hub.commits() == 3


def test_the_connection_breaks(hub, llm_fed, finished, monkeypatch):
    hub.refuse = lambda request: 0 if request.endswith("repos/create") and hub.repositories else None
    said = llm_fed("push", finished, "ann")
    assert said.code == 1 and said.out == f"pushed    {hub.url}/{ADA}\n"
    assert said.err.startswith(f"llm-fed: {BOB} is not pushed: ") and "check the network and HF_ENDPOINT" in said.err
    assert said.err.count("\n") == 1
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    llm_fed("push", finished, "ann").assert_refused("http://127.0.0.1:9", "check the network", code=1)


def test_refusals_before_anything_is_sent(hub, llm_fed, finished, small, tmp_path, monkeypatch):
    llm_fed("push", finished, "ann", "--client", "bop").assert_refused("--client='bop'", "closest is 'bob'")
    llm_fed("push", tmp_path, "ann").assert_refused("is not a run folder")
    llm_fed("push", finished, "ann/me").assert_refused("ann/me/run-fedmerge-ada", "NAMESPACE")
    llm_fed("push", finished, "ann", "--prefix", "my run").assert_refused("my run", "--prefix")
    llm_fed("push", finished, "ann", "--prefix", "x" * 99).assert_refused("maximum length is 96", "--prefix")
    shutil.copytree(finished, tmp_path / "half")
    (tmp_path / "half/summary.json").unlink()
    llm_fed("push", tmp_path / "half", "ann").assert_refused("is not finished", "llm-fed run")
    shutil.copytree(finished, tmp_path / "bare")
    (tmp_path / "bare/adapters/bob/README.md").unlink()
    llm_fed("push", tmp_path / "bare", "ann").assert_refused("bob/README.md is not a valid model card")
    monkeypatch.delenv("HF_TOKEN")
    llm_fed("push", finished, "ann").assert_refused("no token for the Hub", "hf auth login")
    assert hub.requests == []


def test_tokens_and_rights(hub, llm_fed, finished, monkeypatch):
    llm_fed("push", finished, "bobs-lab").assert_refused(
        "ann may not write to bobs-lab/run-fedmerge-ada", "don't have the rights", "hf auth login"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said = llm_fed("push", finished, "ann")
    said.assert_refused("refuses the token", "HF_TOKEN", "hf auth login")
    assert "hf_wrong" not in said.err and not hub.repositories
    monkeypatch.setenv("HF_TOKEN", "hf_sécret")  # what no header can hold
    said = llm_fed("push", finished, "ann")
    said.assert_refused("does not say whose token this is", code=1)
    assert "cret" not in said.err
    Path(constants.HF_TOKEN_PATH).write_text(TOKEN)  # where `hf auth login` puts it
    monkeypatch.delenv("HF_TOKEN")
    assert llm_fed("push", finished, "lab").code == 0


def test_private_repositories_of_chosen_clients(hub, llm_fed, finished):
    said = llm_fed("push", finished, "lab", "--private", "--client", "cyd", "--client", "ada", "--prefix", "v1")
    assert said.code == 0
    assert {name: one.private for name, one in hub.repositories.items()} == {"lab/v1-cyd": True, "lab/v1-ada": True}
    assert llm_fed("push", finished, "lab", "--client", "bob", "--prefix", "v1").code == 0
    assert not hub.repositories["lab/v1-bob"].private
    before = hub.commits()
    said = llm_fed("push", finished, "lab", "--private", "--client", "bob", "--prefix", "v1")
    said.assert_refused("lab/v1-bob exists and is public", "--prefix")
    assert hub.commits() == before


def test_the_licence_is_given_or_the_bases_own(hub, llm_fed, finished, small, tmp_path):
    """A run that says its base lies elsewhere: there, a model card with a licence is next to the weights."""
    shutil.copytree(finished, tmp_path / "run")
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config["base"]["name"] = str(tmp_path / "base")
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "base").mkdir()
    words = ("push", tmp_path / "run", "ann", "--client", "ada")
    (tmp_path / "base/README.md").write_text("---\nlicense: llama3.2\nlicense_link: LICENSE.txt\n---\nA base.\n")
    assert llm_fed(*words).code == 0
    assert {**front(hub, ADA)}.items() >= {"license": "llama3.2", "license_link": "LICENSE.txt"}.items()
    assert "`llama3.2`: the base's licence, by its model card." in hub.repositories[ADA].files["README.md"].decode()
    assert llm_fed(*words, "--license", "mit").code == 0
    assert front(hub, ADA)["license"] == "mit" and "license_link" not in front(hub, ADA)
    llm_fed(*words, "--license", "mine").assert_refused('"license" must be one of', code=1)
    (tmp_path / "base/README.md").write_text("---\n: [\n---\n")
    llm_fed(*words).assert_refused("base/README.md is not a valid model card")


def test_the_licence_of_a_base_on_the_hub(hub, llm_fed, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    card = tmp_path / "run/adapters/ada/README.md"
    card.write_text(card.read_text().replace("library_name", "base_model: org/base\nlibrary_name", 1))
    words = ("push", tmp_path / "run", "ann", "--client", "ada")
    assert llm_fed(*words).code == 0
    assert front(hub, ADA)["license"] == "other"  # a base that this user cannot see
    hub.repositories["org/base"] = Repository(False, {"README.md": b"---\nlicense: apache-2.0\n---\n"})
    assert llm_fed(*words).code == 0
    assert front(hub, ADA)["license"] == "apache-2.0"


def test_a_client_of_several_adapters_is_one_repository(hub, llm_fed, finished, small, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    ada = tmp_path / "run/adapters/ada"
    for expert in ("global", "local"):
        shutil.copytree(finished / "adapters/cyd", ada / expert)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (ada / name).unlink()
    (ada / "gate.safetensors").write_bytes(b"gate")
    assert llm_fed("push", tmp_path / "run", "ann", "--client", "ada").code == 0
    files = hub.repositories[ADA].files
    assert files.keys() == {path.relative_to(ada).as_posix() for path in ada.rglob("*") if path.is_file()}
    assert json.loads(files["local/adapter_config.json"])["base_model_name_or_path"] == small.base.name
    folder = Path(snapshot_download(ADA, local_dir=tmp_path / "back"))
    assert torch.equal(logits(small.base, folder / "local"), logits(small.base, finished / "adapters/cyd"))


def test_one_repository_with_a_folder_per_client(hub, llm_fed, finished, small, tmp_path):
    said = llm_fed("push", finished, "ann", "--one-repository")
    assert (said.code, said.out) == (0, f"pushed    {hub.url}/ann/run-fedmerge\n"), said.err
    repository = hub.repositories["ann/run-fedmerge"]
    assert len(hub.repositories) == 1 and hub.commits() == 1
    inside = {f"{client}/{name}" for client in ("ada", "bob", "cyd") for name in os.listdir(finished / "adapters/ada")}
    assert repository.files.keys() == {*inside, "README.md"}
    for client in ("ada", "cyd"):  # over the Hub's protocol, file by file
        model = AutoModelForCausalLM.from_pretrained(small.base)
        model = peft.PeftModel.from_pretrained(model, "ann/run-fedmerge", subfolder=client).eval()
        with torch.no_grad():
            found = model(**tiny.inputs("llama", 2)).logits
        assert torch.equal(found, logits(small.base, finished / "adapters" / client))
    settings = json.loads(repository.files["cyd/adapter_config.json"])
    assert settings["base_model_name_or_path"] == small.base.name  # what a server compares with its own base

    said = llm_fed("push", finished, "ann", "--one-repository")
    assert said.out == f"unchanged {hub.url}/ann/run-fedmerge\n" and hub.commits() == 1
    words = ("push", finished, "lab", "--one-repository", "--prefix", "v1", "--client")
    assert llm_fed(*words, "cyd", "--private").code == 0 and llm_fed(*words, "bob").code == 0  # what is there stays
    later = hub.repositories["lab/v1"]
    assert later.private and {name.split("/")[0] for name in later.files} == {"bob", "cyd", "README.md"}


def test_the_card_of_one_repository(hub, llm_fed, finished, tmp_path):
    """Its example is of the first client, if PEFT can load that; the licence is in all cards."""
    assert llm_fed("push", finished, "ann", "--one-repository", "--license", "mit").code == 0
    text = hub.repositories["ann/run-fedmerge"].files["README.md"].decode()
    assert "PeftModel.from_pretrained(base, 'ann/run-fedmerge', subfolder='ada')" in text
    tags = ["llm_fed", "lora", "federated-learning"]
    assert front(hub, "ann/run-fedmerge") == {
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": tags, "license": "mit",
    }  # fmt: skip
    assert b"license: mit" in hub.repositories["ann/run-fedmerge"].files["bob/README.md"]
    shutil.copytree(finished, tmp_path / "run")
    for change in ({"modules_to_save": ["head"]}, None):
        config = tmp_path / "run/adapters/ada/adapter_config.json"
        if change:
            config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
        else:
            config.unlink()
        assert llm_fed("push", tmp_path / "run", "ann", "--one-repository").code == 0
        assert b"PeftModel" not in hub.repositories["ann/run-fedmerge"].files["README.md"]


def test_refusals_of_one_repository(hub, llm_fed, finished):
    """A repository's name is the same for all clients, so it is this that is named."""
    words = ("push", finished, "ann", "--one-repository")
    llm_fed(*words, "--prefix", "my run").assert_refused("this run: ", "my run", "--prefix")
    assert llm_fed(*words).code == 0
    llm_fed(*words, "--private").assert_refused("ann/run-fedmerge exists and is public", "--prefix")
    hub.refuse = lambda request: 413 if "commit" in request else None
    llm_fed(*words, "--client", "ada", "--license", "mit").assert_refused("ann/run-fedmerge is not pushed", code=1)


@pytest.mark.slow
def test_the_script_and_the_environment(hub, finished, tmp_path):
    """In a process of its own, where huggingface_hub reads HF_ENDPOINT by itself."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    words = [sys.executable, ROOT / "scripts/push.py", finished, "ann", "--client", "ada"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert (said.returncode, said.stdout) == (0, f"pushed    {hub.url}/{ADA}\n"), said.stderr
    assert hub.commits() == 1 and TOKEN not in said.stderr


def test_names():
    """What the Hub does not allow is replaced; no two clients meet at one name, however alike they are."""
    assert repository_names("ann", "p", ["site: 7", "a..b--c.", "x_Y"]) == {
        "site: 7": "ann/p-site-7",
        "a..b--c.": "ann/p-a.b-c",
        "x_Y": "ann/p-x_Y",
    }
    alike = ["a b", "a-b", "A b", "å", "ä", "c"]
    names = repository_names("ann", "p", alike)
    assert len({name.lower() for name in names.values()}) == len(alike)
    assert names["c"] == "ann/p-c" and names["a b"].startswith("ann/p-a-b-")
    assert names == repository_names("ann", "p", alike[::-1])
    with pytest.raises(UserError, match="client x.git: .*--prefix"):
        repository_names("ann", "p", ["x.git"])


@pytest.mark.parametrize(("base", "on_hub"), [("someone/some-model", True), ("/models/some-model", False)])
def test_model_card(base, on_hub):
    settings = {
        "base": {"name": base},
        "task": {"name": "files", "path": "~/data/clinics"},
        "method": {"name": "potara", "fed": "../runs/fed"},
        "adapter": {"target_modules": ["q_proj", r".*layers\.1\..*"]},
    }
    card = model_card(
        Model(base, prompt=Prompt(Template("plain", "{prompt}\n"), (2,), 64)),
        client="site: 7",
        method="fedit",
        paper="FedIT, ICASSP 2024",
        metrics={"rouge1": 41.237},
        config=yaml.safe_dump(settings, sort_keys=False),
    )
    header, text = card.removeprefix("---\n").split("\n---\n", 1)
    dataset = {"name": "files, client site: 7", "type": "files", "split": "test"}
    result = {"task": {"type": "text-generation"}, "dataset": dataset, "metrics": [{"type": "rouge1", "value": 41.24}]}
    assert yaml.safe_load(header) == {
        **({"base_model": base} if on_hub else {}),
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["llm_fed", "lora", "federated-learning"],
        "model-index": [{"name": "fedit-site: 7", "results": [result]}],
    }
    for part in ("site: 7", "`fedit` (FedIT, ICASSP 2024)", "| rouge1 | 41.24 |"):
        assert part in text
    shown = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    settings["base"]["name"] = base if on_hub else "some-model"
    settings["task"]["path"], settings["method"]["fed"] = "clinics", "fed"
    assert shown == settings
    assert ("base, folder = 'someone/some-model'," if on_hub else "base, folder = 'path/to/some-model',") in text
