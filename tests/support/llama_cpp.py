"""llama.cpp in this process, by the library `llama-cpp-py-sync`: greedy answers to tokens, with or without an adapter.

All numbers are kept in float32, so that an answer differs from transformers' only where two tokens are as likely. The
library brings its own libllama.so, which needs glibc 2.38; LLAMA_CPP_LIB names one that was built elsewhere.
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

# Of random texts; none has an accent of its own, which llama.cpp does not compose.
PARTS = [
    *"abcXYZ019 .,'\n\t\r-_()[]{}éß北京🙂Гдھहि\u00a0\u3000\u200b", "'s", "'LL", "  ", "\n\n", "the", "ing", "12",
    "def ",
]  # fmt: skip


def missing() -> str:
    """Why llama.cpp is not here; empty where it is."""
    try:
        _library()
    except (ImportError, RuntimeError, OSError) as error:
        return f"llama-cpp-py-sync does not load: {str(error)[-200:]}"
    return ""


def _library() -> Any:
    import llama_cpp_py_sync
    from llama_cpp_py_sync import _cffi_bindings as bindings

    if own := os.environ.get("LLAMA_CPP_LIB"):
        bindings._find_library = lambda: own  # it would take its own first
    bindings.get_lib()
    return llama_cpp_py_sync


class LlamaCpp:
    """A GGUF model, and what llama.cpp does with it."""

    def __init__(self, model: Path, longest: int = 512):
        self.llama = _library().Llama(
            str(model), n_ctx=longest, n_threads=1, type_k="f32", type_v="f32", flash_attn_type=0
        )
        self._lib, self._ffi = self.llama._lib, self.llama._ffi
        self._adapters: dict[Path, Any] = {}

    def choose(self, adapter: Path | None) -> None:
        """Answer with an adapter from now on, or with none."""
        lib, ffi = self._lib, self._ffi
        if adapter is not None and adapter not in self._adapters:
            self._adapters[adapter] = lib.llama_adapter_lora_init(self.llama._model, str(adapter).encode())
            assert self._adapters[adapter] != ffi.NULL, f"llama.cpp cannot load {adapter}"
        chosen = [] if adapter is None else [self._adapters[adapter]]
        given = ffi.new("struct llama_adapter_lora *[]", chosen or [ffi.NULL])
        assert lib.llama_set_adapters_lora(self.llama._ctx, given, len(chosen), ffi.new("float[]", [1.0])) == 0

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Those of a text, with what begins every text; with `special`, control tokens that it spells are read."""
        return self.llama.tokenize(text, add_special=True, parse_special=special)

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        """(V,): of the token after a prompt."""
        self.llama._clear_context_state()
        self.llama._eval_tokens(list(prompt), 0)
        return self._last()

    def answer(self, prompt: Sequence[int], most: int) -> list[int]:
        """The greedy answer's tokens, without the one that ends it."""
        logits, found = self.logits(prompt), []
        while len(found) < most:
            token = int(logits.argmax())
            if self._lib.llama_vocab_is_eog(self.llama._vocab, token):
                break
            found.append(token)
            self.llama._eval_tokens([token], len(prompt) + len(found) - 1)
            logits = self._last()
        return found

    def close(self) -> None:
        self.llama.close()

    def _last(self) -> np.ndarray:
        given = self._lib.llama_get_logits_ith(self.llama._ctx, -1)
        return np.frombuffer(self._ffi.buffer(given, 4 * self.llama.n_vocab), dtype=np.float32).copy()


def ask(run: Path, prompts: Path, answers: Path) -> None:
    """Write each client's greedy answers in float32, as `chat` gives them, and the tokens of each prompt."""
    from llm_fed import load_client
    from llm_fed.runs.reading import exported, read_config

    found, base = {}, None
    for client, folder in exported(run).items():
        mine = load_client(folder, base or read_config(run).base.name, dtype="float32")
        base, lines = mine.base, prompts.read_text().splitlines()
        ids = mine.base.tokens(lines, None)
        found[client] = {
            "prompts": [mine.base.tokenizer.decode(each, skip_special_tokens=False) for each in ids],
            "ids": ids, "answers": mine.generate(lines), "most": mine.base.prompt.max_new_tokens,
        }  # fmt: skip
        print(f"{client}: {len(lines)} answers", flush=True)
    answers.write_text(json.dumps(found))


def compare(answers: Path, base: Path, adapters: Path) -> None:
    """How many of these answers llama.cpp gives, client by client, and how many prompts have the same tokens there."""
    there, same, alike, total = LlamaCpp(base, 1024), 0, 0, 0
    for client, its in json.loads(answers.read_text()).items():
        there.choose(adapters / client / "adapter.gguf")
        equal = 0
        for text, ids, ours in zip(its["prompts"], its["ids"], its["answers"], strict=True):
            alike += there.llama.tokenize(text, add_special=False, parse_special=True) == ids
            theirs = there.llama.detokenize(there.answer(ids, its["most"]), remove_special=True).strip()
            equal += theirs == ours
            if theirs != ours:
                print(f"{text!r}\n  chat       {ours!r}\n  llama.cpp  {theirs!r}", flush=True)
        same, total = same + equal, total + len(its["ids"])
        print(f"{client}: {equal} of {len(its['ids'])} answers are equal", flush=True)
    print(f"all: {same} of {total} answers are equal, and the tokens of {alike} prompts")


def served(answers: Path, server: str, adapters: Path) -> None:
    """How many of these answers a `llama-server` gives, client by client. It has the adapters of FOLDER, by name."""
    same, total = 0, 0
    for client, its in json.loads(answers.read_text()).items():
        place = sorted(path.name for path in adapters.iterdir() if path.is_dir()).index(client)
        own = {"temperature": 0, "max_tokens": its["most"], "cache_prompt": False,
               "lora": [{"id": place, "scale": 1.0}]}  # fmt: skip
        equal = 0
        for text, ours in zip(its["prompts"], its["answers"], strict=True):
            said = httpx.post(f"{server}/v1/completions", json={"prompt": text, **own}, timeout=300).raise_for_status()
            equal += said.json()["choices"][0]["text"].strip() == ours
        same, total = same + equal, total + len(its["ids"])
        print(f"{client}: {equal} of {len(its['ids'])} answers are equal", flush=True)
    print(f"all: {same} of {total} answers are equal")


def divide(tokenizer: Path, base: Path, count: Path) -> None:
    """How many of so many random texts, with control tokens in half of them, have other tokens in llama.cpp."""
    ours, there, draws, wrong = Tokenizer.from_file(str(tokenizer)), LlamaCpp(base), random.Random(0), 0
    control = [token.content for token in ours.get_added_tokens_decoder().values()][:6]
    for number in range(int(str(count))):
        special = number % 2 == 1
        parts = [*PARTS, *control] if special else PARTS
        text = "".join(draws.choice(parts) for _ in range(draws.randint(1, 40)))
        read = there.llama.tokenize(text, add_special=not special, parse_special=special)
        if read != ours.encode(text, add_special_tokens=not special).ids:
            wrong += 1
            print(repr(text))
    print(f"{wrong} of {count} texts have other tokens")


def main() -> None:
    steps: dict[str, Any] = {"ask": ask, "compare": compare, "served": served, "divide": divide}
    words = sys.argv[1:]
    if len(words) != 4 or words[0] not in steps:
        sys.exit(
            "ask RUN PROMPTS ANSWERS.json, compare ANSWERS.json BASE.gguf FOLDER (of `export RUN FOLDER --gguf`), "
            "served ANSWERS.json URL FOLDER, or divide TOKENIZER.json BASE.gguf COUNT"
        )
    steps[words[0]](*(word if "://" in word else Path(word) for word in words[1:]))


if __name__ == "__main__":
    main()
