"""Random changes of training pictures: each is shifted, and mirrored or not, by a draw of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from llm_fed.tasks.common import Picture, pixels_of


def augmented(pictures: Sequence[Picture], how: str, draws: torch.Generator) -> list[Picture]:
    """The pictures with other pixels; see `moved`. `how` is crop or crop-flip."""
    pixels = moved(pixels_of(pictures), draws, flip=how == "crop-flip")
    return [replace(picture, pixels=row) for picture, row in zip(pictures, pixels, strict=True)]


def moved(pixels: Tensor, draws: torch.Generator, *, flip: bool) -> Tensor:
    """The pictures (N, C, H, W), each shifted by up to an eighth of its sides, black where it is shifted in: a random
    crop of the picture with a black margin. With `flip` each is also mirrored, left to right, or not, at even chances.
    """
    count, channels, height, width = pixels.shape
    above, beside = height // 8, width // 8
    rows = torch.arange(height) + torch.randint(2 * above + 1, (count, 1), generator=draws)
    columns = torch.arange(width) + torch.randint(2 * beside + 1, (count, 1), generator=draws)
    if flip:
        mirrored = torch.rand(count, 1, generator=draws) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    # A row and a column per picture cross to its device; the indices, made there, would be larger than the pictures.
    rows, columns = rows.to(pixels.device), columns.to(pixels.device)
    padded = nn.functional.pad(pixels, (beside, beside, above, above))
    # By index in the flat picture: indexing by row and column takes four times as long.
    indices = (rows[:, :, None] * padded.shape[-1] + columns[:, None, :]).flatten(1)
    return padded.flatten(2).gather(2, indices[:, None].expand(-1, channels, -1)).unflatten(2, (height, width))
