"""llama.cpp in this process, by the library `llama-cpp-py-sync`: greedy answers to tokens, with or without an adapter.

All numbers are kept in float32, so that an answer differs from transformers' only where two tokens are as likely. The
library brings its own libllama.so, which needs glibc 2.38; LLAMA_CPP_LIB names one that was built elsewhere.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


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
