"""A Trainer of transformers, or of a library that derives from it as TRL does, as the client of a node.

The node answers all that a server asks as every other does. Only training is the Trainer's: its data, optimizer,
schedule, batches and number of steps, for each round anew. It begins with the adapter that the method gives the client,
and the adapter that it ends with is what the method continues with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import Trainer

from llm_fed.basics.errors import ClientError, UserError, refuse
from llm_fed.bench.build import Experiment
from llm_fed.method.requests import Executor, Fit, Fitted, Request
from llm_fed.network import worker
from llm_fed.network.node import Node
from llm_fed.network.node_folders import RowsAtNode
from llm_fed.network.policy import Policy
from llm_fed.settings.config import Config
from llm_fed.state import State

_PREFIX, _ADAPTER = "base_model.model.", "default"  # of PEFT's names


class TrainerNode(Node):
    """A node whose one client trains with a Trainer; see `patch`."""

    def __init__(self, trainer: Trainer):
        super().__init__()
        self._adapter = TrainedAdapter(trainer)

    def serve(self, home: str | Path, idle: float = worker.IDLE) -> None:
        """Answer what the SuperNode with this `home` in its `--node-config` passes on, instead of the worker that it
        would start. Returns when nothing has come for `idle` seconds. UserError: another process serves this home."""
        folder = Path(home)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not worker.serve(folder, idle, answering=self):
            raise UserError(f"another process answers for {folder}; stop it, or wait until it ends with its SuperNode")

    def _build(self, here: Config, rows: RowsAtNode, rules: Policy) -> Experiment:
        built = super()._build(here, rows, rules)
        self._adapter.check(built)
        built.runtime.engine = _TrainerEngine(built.engine, self._adapter)
        return built


class TrainedAdapter:
    """The adapter that a Trainer trains. UserError: see `patch`."""

    def __init__(self, trainer: Trainer):
        if not isinstance(trainer, Trainer):
            raise UserError(f"{type(trainer).__name__} is no Trainer of transformers")
        model = trainer.model
        lora = model.peft_config.get(_ADAPTER) if isinstance(model, PeftModel) else None
        if not isinstance(model, PeftModel) or not isinstance(lora, LoraConfig):
            raise UserError(
                f"the Trainer trains a {type(model).__name__} without an adapter named {_ADAPTER!r}, and adapters are "
                "what clients send; give it peft.get_peft_model(model, LoraConfig(...)), or TRL's peft_config"
            )
        self.trainer, self.model, self.lora = trainer, model, lora
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = {_entry(name): p for name, p in trained.items()}
        if others := [name for name in trained if not _entry(name)]:
            raise UserError(
                f"the Trainer also trains {others[0]}, and only the A and B of one LoRA adapter are sent; leave out "
                "modules_to_save, biases, DoRA and other adapters"
            )
        reasons = {
            "it was given an optimizer, whose memory would go on from round to round; give optimizer_cls_and_kwargs or "
            "settings of its arguments": trainer.optimizer is not None,
            "it trains with several processes; start it alone": trainer.accelerator.num_processes > 1,
            "it makes its model anew at each start (model_init); give the model": trainer.model_init is not None,
            "it is to go on from a checkpoint, and each round begins with what the server sends; leave out "
            "resume_from_checkpoint": trainer.args.resume_from_checkpoint is not None,
            "its adapter is not float32, and small updates are lost; see PEFT's autocast_adapter_dtype":
                any(p.dtype != torch.float32 for p in trained.values()),
        }  # fmt: skip
        refuse(reasons, "this Trainer cannot be a client: ")

    def check(self, built: Experiment) -> None:
        """Refuse a federation whose one client is not what the Trainer trains. UserError: what differs."""
        if len(built.trainers) != 1:
            names = ", ".join(built.trainers) or "none"
            raise UserError(f"a Trainer is one client, and the data here have {names}; name one in clients=")
        (site,) = built.trainers.values()
        structure, lora = site.structure, self.lora
        if not (structure.fused and structure.plain and not structure.delta):
            raise UserError("a Trainer trains one LoRA adapter, and the method gives its clients something else")
        wanted = {name: tuple(shape) for name, shape in site.initial().layout.shape_of.items()}
        own = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        for name in [*wanted, *own]:
            if wanted.get(name) != own.get(name):
                raise UserError(
                    f"{name} is {own.get(name, 'absent')} in the Trainer's adapter and {wanted.get(name, 'absent')} in "
                    "the federation's; give both the same adapter.rank and target_modules"
                )
        scaling = lora.lora_alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)
        if not math.isclose(scaling, structure.scaling, rel_tol=1e-6):
            raise UserError(
                f"the Trainer's adapter is scaled by {scaling:g} and the federation's by {structure.scaling:g}; give "
                "both the same lora_alpha"
            )
        models = self.model, built.base.model
        theirs, own = (model.get_input_embeddings().weight.detach().cpu() for model in models)
        coarse = min(theirs.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
        if theirs.shape != own.shape or not torch.equal(theirs.to(coarse), own.to(coarse)):
            raise UserError("the Trainer's model has other embeddings than the federation's base; load the same base")
        data = self.trainer.train_dataset
        if isinstance(data, Sized) and len(data) != site.num_examples:
            said = f"the server weighs {site.id} by the {site.num_examples} that lie here"
            print(f"the Trainer has {len(data)} training examples, and {said}", flush=True)

    def fit(self, request: Fit) -> Fitted | ClientError:
        """What the Trainer makes of where a fit starts. UserError: the method asks for what no Trainer does."""
        refuse(_foreign(request), "a Trainer cannot carry this method: ")
        trainer, start = self.trainer, request.start
        trained = set(start.layout.matching(request.train))
        if frozen := request.optimizer.frozen:
            trained -= set(start.layout.matching(frozen, "local.freeze"))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(start[name])
                parameter.requires_grad_(name in trained)
        trainer.optimizer = trainer.lr_scheduler = None  # made for the last round
        self.model.train()
        # Draws that belong to this fit, whatever was drawn before, and that change nothing afterwards.
        trainer.accelerator.dataloader_config.data_seed = request.seed % 2**31
        with torch.random.fork_rng():
            torch.manual_seed(request.seed % 2**63)
            done = trainer.train()
        # Else each round would wrap it once more.
        trainer.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        with torch.no_grad():
            tensors = {name: self.parameters[name].detach().to(start.row) for name in start.layout.names}
            result = start.like(State.of(tensors).row)
        if not (result.is_finite() and math.isfinite(done.training_loss)):
            return ClientError("training with its Trainer ended in NaN or infinite numbers")
        return Fitted(result, (float(done.training_loss),) * int(done.global_step))


class _TrainerEngine:
    """An engine whose fits are a Trainer's."""

    def __init__(self, engine: Executor, adapter: TrainedAdapter):
        self._engine, self._adapter = engine, adapter
        self.take_work = engine.take_work

    def execute(self, requests: Sequence[Request[Any]]) -> Sequence[Any]:
        if isinstance(requests[0], Fit):
            return [self._adapter.fit(request) for request in requests if isinstance(request, Fit)]
        return self._engine.execute(requests)


def _foreign(request: Fit) -> dict[str, bool]:
    """What no Trainer does, and whether a fit asks for it."""
    optimizer = request.optimizer
    return {
        "it corrects gradients, as SCAFFOLD does": optimizer.correction is not None,
        "it pulls towards the server's model (proximal), as FedProx does": optimizer.proximal > 0,
        "it gives entries learning rates of their own": bool(optimizer.lr_of),
        "it makes the last components of an adapter small": optimizer.tail is not None,
        "it has a loss of its own": request.loss is not None,
        "it asks for noise in each step (privacy at the examples)": request.private is not None,
    }


def _entry(name: str) -> str:
    """The name here of a parameter that PEFT calls so; empty where it is no A or B of the adapter."""
    entry = name.removeprefix(_PREFIX).removesuffix(f".{_ADAPTER}.weight")
    return entry if name.startswith(_PREFIX) and entry.endswith((".lora_A", ".lora_B")) else ""
