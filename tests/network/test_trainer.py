"""One's own Trainer as the client of a node: equal to our client where settings agree, and refused where it would be
another client than the federation's."""

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import every
import peft
import pytest
import torch
import yaml
from network import HELLO, NETWORK, NetworkInProcess, tree
from safetensors.torch import load_file
from small_run import CLIENTS
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import llm_fed
from llm_fed.basics.errors import UserError
from llm_fed.bench import build
from llm_fed.network import server, worker
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import as_dict, from_dict

pytestmark = pytest.mark.usefixtures("quick")
AGREE: dict[str, Any] = {
    "adapter": {"dropout": 0.0},
    "local": {"steps": 3, "batch_size": 64, "lr": 0.02, "lr_end": 0.02, "clip": 1.0},
    "rounds": 2,
    "network": {**NETWORK, "deadline": 60.0, "patience": 60.0},  # a Trainer may take its time on a busy machine
}


def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    padded = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: pad_sequence([torch.tensor(each[key]) for each in examples], batch_first=True, padding_value=value)
        for key, value in padded.items()
    }


def rows_of(settings: dict[str, Any], client: str) -> list[dict[str, list[int]]]:
    """A client's training examples as a Trainer takes them."""
    site = build.prepare(from_dict(settings), Reporter()).clients[client]
    return [
        {
            "input_ids": list(each.input_ids),
            "attention_mask": [1] * len(each.input_ids),
            "labels": [id if wanted else -100 for id, wanted in zip(each.input_ids, each.target, strict=True)],
        }
        for each in site.train
    ]


def trainer_of(base: Path, folder: Path, rows: Any, kind: type = Trainer, lora: Any = None, **options: Any) -> Any:
    torch.manual_seed(123)  # its own adapter begins elsewhere: the server's takes its place
    lora = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **(lora or {})}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**lora))
    settings = {
        "max_steps": 3, "per_device_train_batch_size": 64, "learning_rate": 0.02, "lr_scheduler_type": "constant",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "optim": "adamw_torch", "report_to": [], "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True, **options,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder / "trainer"), **settings)
    return kind(model=model, args=arguments, train_dataset=rows, data_collator=collate)


def adapters(folder: Path) -> dict[str, Any]:
    paths = {client: folder / f"home-{client}/adapters/run/{client}/adapter_model.safetensors" for client in CLIENTS}
    return {client: load_file(path) for client, path in paths.items()}


def assert_alike(small: Any, folder: Path, settings: dict[str, Any], trainer: Any) -> None:
    """A federation in which bob trains with this Trainer ends as one in which he does not."""
    folders = {"ours": None, "theirs": trainer}
    scores = {}
    for name, own in folders.items():
        network = NetworkInProcess(folder / name, small, settings)
        if own is not None:
            network.workers[2] = llm_fed.network.patch(own)
        scores[name] = server.train(network.config, folder / name / "run", network)["scores"]
    assert scores["theirs"]["clients"] == scores["ours"]["clients"]
    assert scores["theirs"]["losses"] == pytest.approx(scores["ours"]["losses"], rel=1e-5)
    before, after = adapters(folder / "ours"), adapters(folder / "theirs")
    for client in CLIENTS:
        assert before[client].keys() == after[client].keys() != set()
        for name, tensor in before[client].items():
            assert_close(after[client][name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", every.quick(["fedit", "ffa", "local", "fedmerge"], ["fedmerge"]))
def test_bobs_trainer_is_as_our_client(small, tmp_path, method):
    settings = tree(small, method={"name": method}, eval={"base": False}, **AGREE)
    assert_alike(small, tmp_path, settings, trainer_of(small.base, tmp_path, rows_of(settings, "bob")))


def test_a_trainer_of_trl_as_well(small, tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl")
    datasets = pytest.importorskip("datasets")
    settings = tree(small, eval={"base": False}, **AGREE)
    rows = rows_of(settings, "bob")
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), max_steps=3, per_device_train_batch_size=64, learning_rate=0.02,
        lr_scheduler_type="constant", max_grad_norm=1.0, optim="adamw_torch", report_to=[], save_strategy="no",
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(small.base), args=arguments,
        train_dataset=datasets.Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(small.base),
        peft_config=peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    assert_alike(small, tmp_path, settings, trainer)


class Ordered(Trainer):
    """Keeps the order in which it sees its rows."""

    seen: list[int]

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        self.seen += inputs["input_ids"].flatten().tolist()
        return super().compute_loss(model, inputs, **options)


def test_each_round_draws_its_own_batches(small, tmp_path):
    settings = tree(small, eval={"every": 0, "base": False}, **AGREE)
    trainer = trainer_of(
        small.base, tmp_path, rows_of(settings, "bob"), Ordered, per_device_train_batch_size=1, data_seed=5
    )
    trainer.seen = []
    network = NetworkInProcess(tmp_path, small, settings)
    network.workers[2] = llm_fed.network.patch(trainer)
    server.train(network.config, tmp_path / "run", network)
    half = len(trainer.seen) // 2
    assert half and trainer.seen[:half] != trainer.seen[half:]


WRONG = {
    "an optimizer": (lambda t: setattr(t, "optimizer", torch.optim.SGD(t.model.parameters())), "given an optimizer"),
    "another layer": (lambda t: t.model.get_input_embeddings().weight.requires_grad_(True), "also trains base_model"),
    "no adapter": (lambda t: setattr(t, "model", torch.nn.Linear(2, 2)), "without an adapter"),
    "half precision": (lambda t: t.model.bfloat16(), "small updates are lost"),
    "a checkpoint": (lambda t: setattr(t.args, "resume_from_checkpoint", "x"), "go on from a checkpoint"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_trainer_that_cannot_be_a_client_is_refused_at_once(small, tmp_path, case):
    trainer = trainer_of(small.base, tmp_path, [])
    llm_fed.network.patch(trainer)  # as it is, it can be one
    spoil, message = WRONG[case]
    spoil(trainer)
    with pytest.raises(UserError, match=message):
        llm_fed.network.patch(trainer)
    with pytest.raises(UserError, match="no Trainer"):
        llm_fed.network.patch(object())


OTHERS: dict[str, Any] = {
    "rank": ({}, {"r": 4}, "is \\(4, 24\\) in the Trainer's adapter and \\(2, 24\\)"),
    "alpha": ({}, {"lora_alpha": 2}, "scaled by 1 and the federation's by 4"),
    "layers": ({}, {"target_modules": ["q_proj"]}, "absent in the Trainer's adapter"),
    "scaffold": (
        {"method": {"name": "scaffold"}, "local": {**AGREE["local"], "optimizer": "sgd"}},
        {},
        "corrects gradients",
    ),
    "fedprox": ({"method": {"name": "fedprox"}}, {}, "proximal"),
    "experts": ({"method": {"name": "pfedmoe"}}, {}, "something else"),
}


@pytest.mark.parametrize("case", every.quick(OTHERS, ["rank", "alpha", "scaffold", "experts"]))
def test_what_it_cannot_carry_is_told_to_the_server(small, tmp_path, capfd, case):
    """The node's log says it, the server learns that its log says more, and the other clients go on."""
    changes, lora, message = OTHERS[case]
    settings = tree(small, **{**AGREE, "rounds": 1, "eval": {"every": 0, "base": False}, **changes})
    network = NetworkInProcess(tmp_path, small, settings)
    trainer = trainer_of(small.base, tmp_path, rows_of(tree(small, **AGREE), "bob"), lora=lora)
    network.workers[2] = llm_fed.network.patch(trainer)
    network_config = replace(network.config, network=replace(network.config.network, wait=0.1))
    server.train(network_config, tmp_path / "run", network)
    log, err = (re.sub(r"\s+", " ", text) for text in capfd.readouterr())  # a line of the terminal may break anywhere
    told = err + (tmp_path / "run/metrics.jsonl").read_text()
    assert re.search(message, log) and not re.search(message, told)
    assert "the node could not do it (failed); its log says more" in told


def test_it_answers_in_the_place_of_the_worker(small, tmp_path, monkeypatch, capfd):
    """`serve` listens where the process that Flower starts looks for its worker."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    settings = tree(small, **AGREE)
    node = llm_fed.network.patch(trainer_of(small.base, tmp_path, rows_of(settings, "bob")[1:]))
    network = NetworkInProcess(tmp_path, small, settings)
    home, text = tmp_path / "home-bob", yaml.safe_dump(as_dict(network.config))
    serving = threading.Thread(target=node.serve, args=[home], kwargs={"idle": 1.0})
    serving.start()
    place = {"home": str(home), "path": str(tmp_path / "data-bob"), "clients": ["bob"]}
    order = {"place": place, "config": text, "order": HELLO}
    monkeypatch.setattr(worker, "node_of_this_process", lambda: ())
    while not worker.address(home).exists():
        time.sleep(0.02)
    reply, _ = worker.call(home, order, b"")
    with pytest.raises(UserError, match="another process answers"):
        node.serve(home)
    serving.join()
    assert [*reply["clients"]] == ["bob"]
    assert re.search(r"has (\d+) training examples, and the server weighs bob by", capfd.readouterr().out)
    assert not (home / "worker.log").exists()
