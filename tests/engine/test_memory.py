"""What of a GPU's memory is free, and which errors say that it is not."""

import pytest
import torch

from llm_fed.engine import memory


def segment(device: int, pool: tuple[int, int], total: int, used: int) -> dict[str, object]:
    return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": used}


def test_what_only_graphs_may_use_is_not_free(monkeypatch):
    """Of 100 bytes 30 are reserved by torch, 18 of them allocated; of the other 12, 7 are in a pool of graphs here."""
    here = [segment(0, (0, 0), 15, 10), segment(0, (0, 3), 15, 8), segment(1, (0, 4), 50, 0)]
    for name, value in {
        "mem_get_info": (60, 100), "memory_reserved": 30, "memory_allocated": 18, "current_device": 0,
        "get_per_process_memory_fraction": 1.0, "memory_snapshot": here, "get_allocator_backend": "native",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *given, value=value: value)
    for device in ("cuda", "cuda:0"):
        assert memory.free_memory(torch.device(device)) == 60 + (30 - 18) - 7
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.delattr(torch.cuda, "memory_snapshot")  # which it refuses
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
