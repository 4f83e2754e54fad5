"""One peer's rounds of the work that peers.py has laid out, in a process of its own.

    python scripts/bench/peer_loops.py PEER FOLDER

FOLDER/work.json says who is asked in each round, and of which tokens each step is made. The last line printed has the
seconds and the tokens of each round, and FOLDER/PEER.safetensors is the adapter after the last one. What one peer alone
needs is imported within its function, since the memory of each is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

Example = tuple[list[int], list[int]]  # token ids and labels; -100 where a token is not in the loss
Asked = dict[str, Any]  # one client in one round: client, number, num_examples, batches (a list of examples per step)
Adapter = dict[str, Tensor]
Round = Callable[[Adapter, Sequence[Asked]], Adapter]  # the global adapter before and after


class Work:
    """What is to be done, and what a peer says of it.

    Attributes:
        rounds: who is asked in each, and for what.
        clients: how many are registered.
        seconds: of the rounds that are done.
        tokens: in each of them, without padding.
    """

    def __init__(self, folder: Path):
        given = json.loads((folder / "work.json").read_text())
        self.folder, self.rounds, self.clients = folder, given["rounds"], given["clients"]
        self.base, self.lr, self.threads, self.actors = given["base"], given["lr"], given["threads"], given["actors"]
        self.adapter = SimpleNamespace(**given["adapter"])
        self.settings = given["settings"]  # of llm_fed, which say the same
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def start(self) -> Adapter:
        return load_file(self.folder / "start.safetensors")

    def model(self) -> nn.Module:
        """The base under a stock PEFT adapter, in training; `tokens_seen` counts what it reads."""
        model: Any = adapted(self.base, self.adapter).train()
        model.tokens_seen = 0

        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            model.tokens_seen += int(kwargs["attention_mask"].sum())

        model.get_base_model().register_forward_pre_hook(count, with_kwargs=True)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.0)

    def run(self, model: Any, round: Round) -> Adapter:
        """All rounds, timed one by one; the adapter after the last."""
        adapter = self.start()
        for clients in self.rounds:
            before, began = model.tokens_seen, time.perf_counter()
            adapter = round(adapter, clients)
            self.seconds.append(time.perf_counter() - began)
            self.tokens.append(model.tokens_seen - before)
        return adapter


def adapted(base: str, adapter: Any) -> nn.Module:
    """A base in float32 under a stock PEFT adapter without dropout.

    Args:
        adapter: with rank, alpha and target_modules.
    """
    model, modules = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), list(adapter.target_modules)
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=modules))


def padded(batch: Sequence[Example]) -> dict[str, Tensor]:
    """What transformers' models take: input_ids, attention_mask and labels, (N, T) each."""
    ids = [torch.tensor(ids) for ids, _ in batch]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence([torch.tensor(row) for _, row in batch], batch_first=True, padding_value=-100),
    }


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(work: Work, model: Any, adapter: Adapter, batches: Sequence[Sequence[Example]]) -> Adapter:
    """A client's update as anyone would write it: load the adapter, a fresh AdamW, its steps, read the adapter."""
    set_peft_model_state_dict(model, adapter)
    optimizer = work.optimizer(model)
    for batch in batches:
        stepped(model, optimizer, padded(batch))
    return {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}


def mean(adapters: Sequence[Adapter], clients: Sequence[Asked]) -> Adapter:
    """Weighted by numbers of examples."""
    weights = [client["num_examples"] / sum(other["num_examples"] for other in clients) for client in clients]
    return {
        name: torch.stack([w * each[name] for w, each in zip(weights, adapters, strict=True)]).sum(0)
        for name in adapters[0]
    }


def peft(work: Work) -> Adapter:
    """A plain loop of PyTorch and PEFT over rounds and clients."""
    model: Any = work.model()

    def round(adapter: Adapter, clients: Sequence[Asked]) -> Adapter:
        return mean([trained(work, model, adapter, client["batches"]) for client in clients], clients)

    return work.run(model, round)


def floor(work: Work) -> Adapter:
    """Forward, backward and step on batches that are padded before the clock runs: one adapter, nothing averaged."""
    model: Any = work.model()
    set_peft_model_state_dict(model, work.start())
    ready = [[padded(batch) for client in clients for batch in client["batches"]] for clients in work.rounds]
    waiting, optimizer = iter(ready), work.optimizer(model)

    def round(adapter: Adapter, clients: Sequence[Asked]) -> Adapter:
        for batch in next(waiting):
            stepped(model, optimizer, batch)
        return adapter

    return work.run(model, round)


def trl(work: Work) -> Adapter:
    """A new SFTTrainer for each client and round, as OpenFedLLM does it. Data sets of tokens are made before the clock
    runs; what costs time without need (checkpointing of activations, logs, saving) is off."""
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from trl import SFTConfig, SFTTrainer

    class Planned(SFTTrainer):  # type: ignore[misc]
        """Takes the planned batches in the place of a random order."""

        def get_train_dataloader(self) -> Any:
            places = iter(range(len(self.train_dataset)))
            sampler = [[next(places) for _ in range(size)] for size in self.sizes]
            return self.accelerator.prepare(
                DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
            )

    def dataset(client: Asked) -> Dataset:
        ids, labels = zip(*(example for batch in client["batches"] for example in batch), strict=True)
        return Dataset.from_dict({"input_ids": ids, "labels": labels})

    model: Any = work.model()
    tokenizer = AutoTokenizer.from_pretrained(work.base)
    data = {id(client): dataset(client) for clients in work.rounds for client in clients}

    def update(adapter: Adapter, client: Asked) -> Adapter:
        set_peft_model_state_dict(model, adapter)
        steps = client["batches"]
        settings = SFTConfig(
            output_dir=str(work.folder / "trl"), per_device_train_batch_size=max(map(len, steps)), max_steps=len(steps),
            learning_rate=work.lr, lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.0,
            max_grad_norm=0.0, max_length=None, gradient_checkpointing=False, bf16=False, use_cpu=True,
            dataloader_pin_memory=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Planned(model, settings, train_dataset=data[id(client)], processing_class=tokenizer)
        trainer.sizes = [len(batch) for batch in steps]
        trainer.train()
        return {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}

    def round(adapter: Adapter, clients: Sequence[Asked]) -> Adapter:
        return mean([update(adapter, client) for client in clients], clients)

    return work.run(model, round)


def flower(work: Work) -> Adapter:
    """Clients of Flower's simulation."""
    from peer_flower import simulated

    return simulated(work)


def ours(work: Work) -> Adapter:
    """llm_fed's own loop with messages, checks, metrics and a checkpoint in every round; nobody is scored."""
    from rich.console import Console

    from llm_fed.bench.build import prepare
    from llm_fed.federation.clients import LocalClients
    from llm_fed.federation.loop import Federation, federate
    from llm_fed.method.requests import Work as Counted
    from llm_fed.runs.folder import Run
    from llm_fed.runs.records import timed_rounds
    from llm_fed.runs.tracking import Reporter
    from llm_fed.runtime.local import LocalRuntime
    from llm_fed.settings import configfile

    class Counting(LocalRuntime):
        def take_work(self) -> Counted:
            taken = super().take_work()
            work.tokens.append(taken.tokens)
            return taken

    config, folder = configfile.load({}, work.settings), work.folder / "ours"
    reporter = Reporter(Console(quiet=True))
    with Run(folder, config, True) as run:
        built = prepare(run.config, reporter)
        runtime = Counting(built.engine, built.runtime.clients_per_pass)
        run.begin()
        clients = LocalClients(built.clients, built.schedule, runtime)
        progress = federate(Federation(built.method, clients, built.server, runtime), run)
    work.seconds = [line["seconds"] for line in timed_rounds(folder)]
    return {entry_of_peft(name): progress.state[name].clone() for name in progress.state}


def entry_of_peft(name: str) -> str:
    """What PEFT calls an entry of a state."""
    return f"base_model.model.{name}.weight"


PEERS: dict[str, Callable[[Work], Adapter]] = {"ours": ours, "peft": peft, "trl": trl, "flower": flower, "floor": floor}


def main() -> None:
    peer, folder = sys.argv[1], Path(sys.argv[2])
    work = Work(folder)
    torch.set_num_threads(work.threads)
    save_file(PEERS[peer](work), folder / f"{peer}.safetensors")
    print(json.dumps({"seconds": work.seconds, "tokens": work.tokens}))


if __name__ == "__main__":
    main()
