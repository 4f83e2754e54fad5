"""What of a GPU's memory is free, and which errors say that it is not."""

import pytest
import torch

from llm_fed.engine import memory


def test_what_torch_has_reserved_is_free(monkeypatch):
    """Of 100 bytes 60 are free; 30 are reserved by torch, 18 of them allocated."""
    for name, value in {
        "mem_get_info": (60, 100), "memory_reserved": 30, "memory_allocated": 18,
        "get_per_process_memory_fraction": 1.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value: value)
    assert memory.free_memory(torch.device("cuda")) == 60 + (30 - 18)


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA out of memory."), False),
        (None, False),
    ],
)
def test_errors_that_say_that_memory_does_not_suffice(error, is_so):
    assert memory.out_of_memory(error) == is_so
