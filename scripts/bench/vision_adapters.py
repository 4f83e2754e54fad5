"""Training of image adapters: the cohort fused, and one client after another, against plain loops around stock PEFT.

    python scripts/bench/vision_adapters.py [--clients 10] [--steps 5] [--repeats 5] [--budgets 512 1024] [--device cpu]

Random images; a ViT (hidden 192, 6 layers, 32 pixels in patches of 4, hence 65 tokens), LoRA of rank 8 on query and
value and a trained head, batches of 10, Adam: POTARA's vision settings on a small model. The variants alternate; a time
is the median over repeats, in CPU or GPU seconds for all clients and steps.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial

import peft
import torch
from alternating import compare
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import generator
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.fit import fit
from llm_fed.kinds.images import Images
from llm_fed.kinds.pictures import Pictures
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.models.images import head_of
from llm_fed.models.lora import Lora
from llm_fed.tasks.common import Picture

LABELS = tuple(map(str, range(10)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help="more token budgets per micro-batch to time")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    names = ("q_proj", "v_proj")
    structure = Lora(rank=8, alpha=16, dropout=given.dropout, target_modules=names, whole=("classifier",))
    base = make(given.device)
    jobs = [job(base, structure, client, given.steps) for client in range(given.clients)]
    wrapped = stock(base, structure)
    variants: dict[str, Callable[[], object]] = {
        "stock PEFT, one client after another": partial(one_by_one, base, wrapped, jobs),
        "llm_fed, one client after another": partial(passes, base, structure, [[job] for job in jobs]),
        "llm_fed, fused": partial(passes, base, structure, [jobs]),
        **{f"llm_fed, fused, {b} tokens": partial(passes, base, structure, [jobs], b) for b in given.budgets},
    }
    compare(variants, given.repeats, given.device)


def make(device: str) -> Images:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768, image_size=32, patch_size=4,
        num_labels=len(LABELS),  # type: ignore[call-arg]
    )  # fmt: skip
    model = ViTForImageClassification(config).to(device).eval()  # type: ignore[arg-type]
    return Images(model=model, name="bench", labels=LABELS, size=32, head=head_of(model), pretrained=True)


def job(base: Images, structure: Lora, client: int, steps: int) -> Fit:
    draws = generator(0, client)
    images = torch.randint(256, (steps, 10, 3, 32, 32), generator=draws, dtype=torch.uint8)
    labels = torch.randint(len(LABELS), (steps, 10), generator=draws).tolist()
    batches = [
        [Picture(pixels, label, "") for pixels, label in zip(*step, strict=True)]
        for step in zip(images, labels, strict=True)
    ]
    return Fit.on(f"{client}", structure, base.draw(structure, draws), batches, Optimizer(1e-3, "adam"))


def passes(base: Images, structure: Lora, groups: list[list[Fit]], budget: int | None = None) -> None:
    """The jobs of each group fused, the groups one after another."""
    kind = Pictures.of(base, structure)
    for jobs in groups:
        results, _ = fit(AdaptedModel(base.model, structure, kind, budget=budget), jobs)
        if failed := [result for result in results if isinstance(result, ClientError)]:
            raise failed[0]


def stock(base: Images, structure: Lora) -> nn.Module:
    names = list(structure.target_modules)
    config = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=structure.dropout, target_modules=names, modules_to_save=["classifier"]
    )
    return peft.get_peft_model(copy.deepcopy(base.model), config).train()  # type: ignore[arg-type]


def one_by_one(base: Images, wrapped: nn.Module, jobs: list[Fit]) -> None:
    """Each client's adapter is loaded, trained and read."""
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    for job in jobs:
        with torch.no_grad():
            for parameter, value in zip(trained, job.start.tensors().values(), strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.Adam(trained, lr=job.optimizer.lr)
        for step in range(len(job.batches)):
            batch = job.batch(step)
            inputs = base.prepare(torch.stack([picture.pixels for picture in batch]))
            labels = torch.tensor([picture.label for picture in batch], device=inputs.device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(pixel_values=inputs).logits, labels).backward()
            optimizer.step()
        torch.cat([parameter.detach().flatten() for parameter in trained]).cpu()


if __name__ == "__main__":
    main()
