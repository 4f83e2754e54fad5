"""Training in the bank, and the same training as anyone would write it with stock PEFT."""

import math
from contextlib import contextmanager
from functools import partial

import tiny
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.fit import fit
from llm_fed.engine.gradients import evidence
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Fitted, GradientMoments
from llm_fed.models.lora import draw, targets
from llm_fed.state import State


def cohort(model, structure, dtype=torch.float64, clients=(0, 1, 2), lr=1e-2, steps=(6, 3, 4), **settings) -> list[Fit]:
    """Clients with so many steps each, batches of 1 to 4 examples, lengths of 3 to 40 tokens; B is not zero."""
    jobs = []
    for client in clients:
        draws = generator(3, client)
        start = draw(model, structure, draws, dtype)
        start = start.like(start.row + 0.02 * torch.randn(start.row.shape, dtype=dtype, generator=draws))
        batches = []
        for step in range(steps[client]):
            count = 1 + (client + step) % 4
            lengths = torch.randint(3, 41, (count,), generator=draws).tolist()
            batches.append(tiny.examples(100 * client + step, lengths))
        optimizer = Optimizer(lr * (1 + client / 2), **settings)
        jobs.append(tiny.fit_on(f"c{client}", structure, start, batches, optimizer, seed=client))
    return jobs


def stock(model, structure, job: Fit, train="", autocast=None, checkpointing=False):
    """One client's training as anyone would write it: padding, attention mask, labels, the model's own loss."""
    wrapped = tiny.stock_peft(model, structure, job.start)
    if checkpointing:
        wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wrapped.train()  # the tiny model has no dropout
    entries = tiny.peft_entries(wrapped)
    for name, parameter in entries.items():
        parameter.requires_grad_(name.endswith(train))
    parameters = [p for p in entries.values() if p.requires_grad]
    settings = job.optimizer
    makers = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    momentum = {"momentum": settings.momentum} if settings.momentum else {}
    optimizer = makers[settings.name](parameters, lr=settings.lr, weight_decay=settings.weight_decay, **momentum)
    count, warmup = len(job.batches), settings.warmup

    def factor(step: int) -> float:
        left = (count - step) / max(1, count - warmup)
        falling = {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}
        return (step + 1) / (warmup + 1) if step < warmup else falling[settings.decay]

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    anchor, losses = settings.anchor or job.start, []
    for batch in batches_of(job):
        ids = [torch.tensor(example.input_ids) for example in batch]
        labels = [i.masked_fill(~torch.tensor(e.target), -100) for i, e in zip(ids, batch, strict=True)]
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = wrapped(
                input_ids=pad_sequence(ids, batch_first=True),
                attention_mask=pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
                labels=pad_sequence(labels, batch_first=True, padding_value=-100),
            ).loss
        losses.append(loss.item())
        drift = sum((p - anchor[name]).square().sum() for name, p in entries.items() if p.requires_grad)
        (loss + settings.proximal * drift).backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(parameters, settings.clip)
        if settings.correction is not None:
            for name, p in entries.items():
                if p.requires_grad:
                    p.grad += settings.correction[name]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return State.of({name: parameter.detach() for name, parameter in entries.items()}), losses


def per_example_gradients(model: AdaptedModel, state: State, examples) -> torch.Tensor:
    """d log p(targets of example n) / d adapter, (N, P): the mean of the moments of each one alone."""
    asked = [GradientMoments(str(n), model.structure, state, state, [each]) for n, each in enumerate(examples)]
    return torch.stack([each.moments.mean[0] for each in evidence(model, asked)]).to(state.row.dtype)


@contextmanager
def by_the_formula(model, structure, entries, mix=(0.25, 0.75)):
    """The model with y + s sum_e g_e B_e (A_e x) on every adapted layer, one expert after another, g as the gate says;
    and W x + b for layers that are trained whole."""

    def adapted(name):
        def add(module, inputs, output):
            (x,) = inputs
            gates = torch.as_tensor(mix, dtype=x.dtype).reshape(-1, 1, 2).expand(len(x), x.shape[1], 2)
            if structure.gate == "router":
                gates = torch.softmax(x @ entries[f"{name}.router"].T, dim=-1)
            for e, expert in enumerate(structure.experts):
                a, b = entries[f"{name}.{expert}.lora_A"], entries[f"{name}.{expert}.lora_B"]
                output = output + structure.alpha / structure.rank * gates[..., e : e + 1] * (x @ a.T @ b.T)
            return output

        return add

    def whole(module, inputs, output, name):
        return inputs[0] @ entries[f"{name}.weight"].T + entries[f"{name}.bias"]

    handles = [module.register_forward_hook(adapted(name)) for name, module in targets(model, structure).items()]
    handles += [model.get_submodule(n).register_forward_hook(partial(whole, name=n)) for n in structure.whole]
    yield model
    for handle in handles:
        handle.remove()


def batches_of(job: Fit) -> list:
    return [job.batch(step) for step in range(len(job.batches))]


def fitted(model, structure, jobs, **options) -> list[Fitted]:
    """What `fit` returns where no client fails."""
    return successes(fit(AdaptedModel(model, structure, **options), jobs)[0])


def successes(results) -> list[Fitted]:
    return [result for result in results if isinstance(result, Fitted)]
