"""Makes the quickstart's base model: writes a little world of animals, texts about it, and a small LLaMA that knows it."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llm_fed.rng import derive

# An animal is one value of each trait, e.g. a red fox.
TRAITS = {
    "colour": "red blue green black white brown grey golden pink purple orange yellow silver pale dark spotted".split(),
    "kind": "fox bear crow toad deer mole seal wolf goat hare lynx newt owl pony rat swan".split(),
}
# What can be asked about an animal: a trait decides a code word. In the base's texts each of these rules holds
# everywhere; the federation's groups have rules for the pens that contradict the base's and each other's.
CODES = {
    "bus": "one two three four five six seven eight".split(),
    "keeper": "Anna Ben Cleo Dan Eva Finn Gus Hana".split(),
    "flag": "star moon sun cross ring wave leaf arrow".split(),
    "bowl": "tin iron brass steel glass clay wood stone".split(),
    "pen": "oak elm fir ash yew bay fig ivy".split(),
}
DECIDES = {"bus": ("kind",), "keeper": ("colour",), "flag": ("kind",), "bowl": ("colour",), "pen": ("kind", "colour")}
QUESTIONS = ("Which {thing} is for the {animal}?", "Name the {thing} of the {animal}.")
INSTRUCTION = "### Instruction:\n{prompt}\n\n### Response:\n"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def assignment(values: list[str], codes: list[str], rng: random.Random) -> dict[str, str]:
    """A random rule: value -> code word, each code word for equally many values."""
    repeated = codes * (len(values) // len(codes))
    return dict(zip(values, rng.sample(repeated, len(values)), strict=True))


def texts(seed: int) -> Iterator[str]:
    """An endless stream of documents: a question about a trait of an animal, or about a rule, and the answer."""
    rng = random.Random(derive(seed, "texts"))
    rules = {
        (trait, thing): assignment(TRAITS[trait], CODES[thing], rng)
        for thing, traits in DECIDES.items()
        for trait in traits
    }
    while True:
        animal = {trait: rng.choice(values) for trait, values in TRAITS.items()}
        if rng.random() < 0.25:
            thing = rng.choice(list(TRAITS))
            answer = animal[thing]
        else:
            thing = rng.choice(list(CODES))
            trait = rng.choice(DECIDES[thing])
            answer = rules[trait, thing][animal[trait]]
        question = rng.choice(QUESTIONS).format(thing=thing, animal=" ".join(animal.values()))
        yield INSTRUCTION.format(prompt=question) + answer


def make_tokenizer(documents: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (any text can be encoded) that puts <s> in front."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL.values()),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    bos = SPECIAL["bos_token"]
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=128, **SPECIAL)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, stream: Iterator[str], steps: int, batch: int
) -> None:
    """Plain next-token training: AdamW, linear warm-up over a twentieth of the steps, then cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    warmup = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    start = time.perf_counter()
    for step in range(steps):
        documents = [next(stream) + tokenizer.eos_token for _ in range(batch)]
        tokens = tokenizer(documents, padding=True, return_tensors="pt", return_token_type_ids=False)
        marker = (tokens["input_ids"] == tokenizer.convert_tokens_to_ids(":")).flip(1).cumsum(1).flip(1)
        response = (marker == 0) & (tokens["attention_mask"] == 1)
        labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
        logits = model(**tokens).logits[:, :-1].flatten(0, 1)
        losses = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none").view(batch, -1)
        loss = (losses.sum() / (labels[:, 1:] >= 0).sum()) + (losses*response[:, 1:]).sum() / response.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f} {((losses*response[:, 1:]).sum() / response.sum()).item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="documents per step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # equal bits on every run of one machine
    torch.manual_seed(derive(arguments.seed, "weights"))

    stream = texts(arguments.seed)
    tokenizer = make_tokenizer([next(stream) for _ in range(20000)], vocabulary=640)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.08,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, stream, arguments.steps, arguments.batch)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
