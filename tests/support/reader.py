"""Reads models and adapters with older versions of transformers and PEFT, and compares what they compute.

    PYTHONPATH=FOLDER python tests/support/reader.py LIST.json RESULT.jsonl

LIST.json holds a list of objects: `folder` of a model, maybe `adapter` for a PEFT folder on it, maybe a `text` for its
tokenizer, and `expected`, a safetensors file with `ids` (N, T), `logits` (N, T, V), and maybe `prompt` (P,) and
`answer` (A,), the greedy tokens after it. For each, RESULT.jsonl gets a line: an object with what is `apart` and equal,
or with an `error`. It imports nothing of this project, which needs newer versions.

FOLDER comes from `pip install --no-deps --target FOLDER transformers==4.57.3 tokenizers==0.22.1 huggingface_hub==0.36.0
peft==0.18.0`.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_by(older: Path, items: Sequence[dict[str, str]], work: Path) -> list[dict[str, Any]]:
    """What the libraries in the folder `older` make of these items."""
    listed, results = work / "list.json", work / "results.jsonl"
    listed.write_text(json.dumps(items))
    subprocess.run(
        [sys.executable, __file__, listed, results], env=os.environ | {"PYTHONPATH": str(older)}, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return [json.loads(line) for line in results.read_text().splitlines()]


def main() -> None:
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    items = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "w", encoding="utf-8") as results:
        for item in items:
            try:
                said = read(item)
            except Exception as error:  # whatever an older version raises at what it cannot read
                said = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(said), file=results, flush=True)


def read(item: dict[str, str]) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    expected = load_file(item["expected"])
    # As the export advises: the default attention of version 4 caps no scores.
    config = AutoConfig.from_pretrained(item["folder"])
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    kernel: dict[str, Any] = {"attn_implementation": "eager"} if capped else {}
    if config.model_type == "jamba":  # whose default needs a GPU
        kernel["use_mamba_kernels"] = False
    model = AutoModelForCausalLM.from_pretrained(item["folder"], torch_dtype=torch.float32, **kernel).eval()
    if "adapter" in item:
        import peft

        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Unexpected keyword|Found missing")
            model = peft.PeftModel.from_pretrained(model, item["adapter"]).eval()
    with torch.no_grad():
        logits = model(input_ids=expected["ids"]).logits
    found, wanted = (rows - rows.mean(-1, keepdim=True) for rows in (logits, expected["logits"]))
    said = {"apart": ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()}
    if "prompt" in expected:
        prompt, answer = expected["prompt"][None], expected["answer"].tolist()
        output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(answer))
        said["answer"] = output[0, prompt.shape[1] :].tolist() == answer
    if "text" in item:
        said["tokens"] = AutoTokenizer.from_pretrained(item["folder"])(item["text"]).input_ids
    return said


if __name__ == "__main__":
    main()
