"""Whether two processes with clients of their own can share one frozen base that is sharded over them (FSDP2).

    python scripts/studies/sharded_base.py

A toy on the CPU, over gloo: a frozen model whose layers are sharded by `fully_shard`, and a client with an adapter of
its own in each process. One client has 3 steps to do and the other 5. Every pass gathers the layers' weights from both
processes, so that both must take part in it. Each way is compared with the clients alone, bit by bit:

    plain        each process does its own steps
    idle         the processes agree on the larger number of steps, and the one that has fewer takes part in the rest
                 with a single idle example and an adapter that is thrown away
    checkpointed idle, with activations recomputed in the backward pass, which gathers the weights once more
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, RANK, BATCH = 256, 4, 2, 8
STEPS = (3, 5)  # of the two clients
PATIENCE = 5.0  # seconds after which a process that waits for the other gives up
WAYS = ("plain", "idle", "checkpointed")

Adapter = Sequence[tuple[Tensor, Tensor]]  # A and B of each layer


class Layer(nn.Module):
    """A frozen linear map with a client's low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + x @ a @ b)


class Base(nn.Module):
    """The same weights in every process."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.recompute = nn.ModuleList(Layer() for _ in range(LAYERS)), recompute
        self.requires_grad_(False)

    def forward(self, x: Tensor, adapter: Adapter) -> Tensor:
        for layer, pair in zip(self.layers, adapter, strict=True):
            x = checkpoint(layer, x, *pair, use_reentrant=False) if self.recompute else layer(x, *pair)
        return x


class Client:
    """Its adapter and its data."""

    def __init__(self, number: int):
        self._draws = torch.Generator().manual_seed(number)
        self.adapter = [(self._drawn(WIDTH, RANK), torch.zeros(RANK, WIDTH)) for _ in range(LAYERS)]

    def _drawn(self, *shape: int) -> Tensor:
        return 0.1 * torch.randn(*shape, generator=self._draws)

    def step(self, base: nn.Module, batch: int = BATCH) -> float:
        """One step of gradient descent; its loss."""
        tensors = [tensor.detach().requires_grad_() for pair in self.adapter for tensor in pair]
        pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
        loss = base(self._drawn(batch, WIDTH), pairs).square().mean()
        gradients = torch.autograd.grad(loss, tensors)
        moved = [(tensor - 0.1 * g).detach() for tensor, g in zip(tensors, gradients, strict=True)]
        self.adapter = list(zip(moved[::2], moved[1::2], strict=True))
        return loss.item()


def sharded(way: str) -> tuple[nn.Module, int]:
    """The base, and how many of its numbers lie in this process."""
    base, mesh = Base(recompute=way == "checkpointed"), init_device_mesh("cpu", (len(STEPS),))
    for layer in base.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(base, mesh=mesh)
    parameters: list[Any] = list(base.parameters())
    return base, sum(parameter.to_local().numel() for parameter in parameters)


def process(rank: int, way: str, port: int, said: Any) -> None:
    """One of the two; puts (rank, losses, numbers here, what went wrong) on the queue."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    distributed.init_process_group("gloo", rank=rank, world_size=len(STEPS), timeout=patience)
    base, here = sharded(way)
    client, losses, wrong, steps = Client(rank), [], "", STEPS[rank]
    try:
        if way != "plain":
            most = torch.tensor([steps])
            distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
            steps = int(most)
        for number in range(steps):
            if number < STEPS[rank]:
                losses.append(client.step(base))
            else:
                Client(-1).step(base, batch=1)
    except RuntimeError as error:
        wrong = str(error).splitlines()[0][:100]
    said.put((rank, losses, here, wrong))
    if way == "plain":
        time.sleep(2 * PATIENCE)  # a process that is done lives on, as the run does
    said.close()
    said.join_thread()
    os._exit(0)


def main() -> None:
    alone: list[list[float]] = []
    for rank, steps in enumerate(STEPS):
        client, base = Client(rank), Base()
        alone.append([client.step(base) for _ in range(steps)])
    context = multiprocessing.get_context("spawn")
    for way in WAYS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        said = context.Queue()
        children = [context.Process(target=process, args=(rank, way, port, said)) for rank in range(len(STEPS))]
        for child in children:
            child.start()
        for rank, losses, here, wrong in sorted(said.get(timeout=120) for _ in STEPS):
            same = "losses as alone" if losses == alone[rank][: len(losses)] else "OTHER LOSSES than alone"
            end = f", then: {wrong}" if wrong else ""
            done = f"{len(losses)} of {STEPS[rank]} steps"
            print(f"{way}: process {rank}: {done}, {same}, holds {here} of {LAYERS * WIDTH**2} numbers{end}")
        for child in children:
            child.join()


if __name__ == "__main__":
    main()
