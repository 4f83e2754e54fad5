"""Reads models and adapters with whatever versions of transformers and PEFT it finds, and compares what they compute.

    PYTHONPATH=FOLDER python tests/support/reader.py LIST.json RESULT.jsonl

LIST.json holds a list of objects: `folder` of a model, maybe `adapter` for a PEFT folder on it, and `expected`, a
safetensors file with `ids` (N, T), `logits` (N, T, V), `prompt` (P,) and `answer` (A,), the greedy tokens after it. For
each RESULT.jsonl gets a line: an object with `apart` and `answer`, or with `error`. Nothing of this project is imported.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with open(sys.argv[1], encoding="utf-8") as file:
        items = json.load(file)
    with open(sys.argv[2], "w", encoding="utf-8") as results:
        for item in items:
            try:
                said = read(item)
            except Exception as error:  # whatever an older version raises at what it cannot read
                said = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(said), file=results, flush=True)


@torch.no_grad()
def read(item):
    expected = load_file(item["expected"])
    model = AutoModelForCausalLM.from_pretrained(item["folder"], torch_dtype=torch.float32).eval()
    if "adapter" in item:
        import peft

        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Unexpected keyword|Found missing")
            model = peft.PeftModel.from_pretrained(model, item["adapter"]).eval()
    found, wanted = (
        rows - rows.mean(-1, keepdim=True) for rows in (model(input_ids=expected["ids"]).logits, expected["logits"])
    )
    apart = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()
    prompt, answer = expected["prompt"][None], expected["answer"].tolist()
    output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(answer))
    said = {"apart": apart, "answer": output[0, prompt.shape[1] :].tolist() == answer}
    if "text" in item:
        said["tokens"] = AutoTokenizer.from_pretrained(item["folder"])(item["text"]).input_ids
    return said


if __name__ == "__main__":
    main()
