"""Makes the quickstart's base model: a small LLaMA that has read generated questions and answers about animals."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llm_fed.basics.rng import derive
from llm_fed.tasks.common import TEMPLATES
from llm_fed.tasks.synthetic import PENS, QUESTIONS, TRAITS, assignment

# The base's own rules: a trait of an animal decides a code word. The federation's groups have rules for the pens that
# contradict the base's (in its texts either trait may decide the pen, so it hesitates between two) and each other's.
CODES = {
    "bus": ("one", "two", "three", "four", "five", "six", "seven", "eight"),
    "keeper": ("Anna", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"),
    "flag": ("star", "moon", "sun", "cross", "ring", "wave", "leaf", "arrow"),
    "bowl": ("tin", "iron", "brass", "steel", "glass", "clay", "wood", "stone"),
    "pen": PENS,
}
DECIDING = {
    "bus": ("kind",),
    "keeper": ("colour",),
    "flag": ("kind",),
    "bowl": ("colour",),
    "pen": ("kind", "colour"),
}
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def texts(seed: int) -> Iterator[str]:
    """An endless stream of documents: a question about an animal in the `alpaca-short` template, and its answer."""
    rng = random.Random(derive(seed, "texts"))
    rules = {
        (trait, thing): assignment(TRAITS[trait], CODES[thing], rng) for thing in CODES for trait in DECIDING[thing]
    }
    while True:
        animal = {trait: rng.choice(values) for trait, values in TRAITS.items()}
        if rng.random() < 0.25:
            thing = rng.choice(list(TRAITS))
            answer = animal[thing]
        else:
            thing = rng.choice(list(CODES))
            trait = rng.choice(DECIDING[thing])
            answer = rules[trait, thing][animal[trait]]
        question = rng.choice(QUESTIONS).format(thing=thing, animal=" ".join(animal.values()))
        yield TEMPLATES["alpaca-short"].format(prompt=question) + answer


def make_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts <s> in front: any text can be encoded, a word of the documents is one token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bos = SPECIAL["bos_token"]
    bpe.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=128, **SPECIAL)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """0.9 M parameters, random. The initial weights are about 1/sqrt(hidden size): with the usual 0.02 so narrow a
    model does not learn to look a word up within thousands of steps."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, stream: Iterator[str], steps: int) -> None:
    """Next-token training, 64 documents per step: AdamW, a short linear warm-up, then cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    warmup = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    start = time.perf_counter()
    for step in range(steps):
        documents = [document + str(tokenizer.eos_token) for document in itertools.islice(stream, 64)]
        tokens = tokenizer(documents, padding=True, return_tensors="pt", return_token_type_ids=False)
        labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
        loss = model(**tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the number of threads fixes the bits
    torch.manual_seed(derive(arguments.seed, "weights"))
    stream = texts(arguments.seed)
    tokenizer = make_tokenizer(list(itertools.islice(stream, 20_000)))
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, stream, arguments.steps)
    model.bfloat16().save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
