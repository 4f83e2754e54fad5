"""What lies in the memory of the device that computes: the pictures of a task, where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from llm_fed.engine.memory import free_memory
from llm_fed.runs.tracking import Reporter
from llm_fed.tasks.common import ClientData, Picture, TaskData, pixels_of


def place(task: TaskData, device: torch.device, reporter: Reporter) -> TaskData:
    """The task of pictures with their pixels (uint8) on `device`, which no step then waits for.

    Where they would fill more than a quarter of its free memory they stay, and the reporter says so.
    """
    if device.type == "cpu":
        return task
    parties = [*task.clients.values(), *([task.server] if task.server else [])]
    size = sum(p.pixels.nbytes for data in parties for split in (data.train, data.validation, data.test) for p in split)
    if size > free_memory(device) // 4:
        reporter.note(
            f"the pictures ({size / 2**30:.1f} GiB) would fill over a quarter of the free memory of {device}, so they "
            "stay in the host's memory, and each batch is copied to the device"
        )
        return task
    return replace(
        task,
        clients={name: _placed(data, device) for name, data in task.clients.items()},
        server=task.server and _placed(task.server, device),
    )


def _placed(data: ClientData, device: torch.device) -> ClientData:
    return replace(
        data,
        train=placed(data.train, device),
        validation=placed(data.validation, device),
        test=placed(data.test, device),
    )


def placed(pictures: Sequence[Picture], device: torch.device) -> tuple[Picture, ...]:
    """The pictures with their pixels on `device`, as views of one tensor."""
    if not pictures:
        return ()
    pixels = pixels_of(pictures).to(device)
    return tuple(replace(picture, pixels=own) for picture, own in zip(pictures, pixels.unbind(0), strict=True))
