"""Pictures of many sizes, made by integer arithmetic alone so that they are the same everywhere and for ever."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Picture:
    """A picture and the options that it is prepared with."""

    height: int
    width: int
    min_pixels: int = 0
    max_pixels: int = 0

    @property
    def name(self) -> str:
        given = (("min", self.min_pixels), ("max", self.max_pixels))
        bounds = "".join(f" {name} {value}" for name, value in given if value)
        return f"{self.height}x{self.width}{bounds}"

    def pixels(self) -> torch.Tensor:
        """uint8, shape (height, width, 3): a texture with hard edges, which shows what a filter does."""
        y = torch.arange(self.height).view(-1, 1, 1)
        x = torch.arange(self.width).view(1, -1, 1)
        channel = torch.arange(3).view(1, 1, -1)
        waves = x * (7 + channel) + y * (13 - channel) + 29 * channel
        return (((x * y) >> 3) ^ waves).bitwise_and(255).to(torch.uint8)


PICTURES = (
    Picture(1, 1),
    Picture(1, 2),
    Picture(3, 3),
    Picture(1, 200),
    Picture(28, 28),
    Picture(56, 56),
    Picture(97, 131),
    Picture(480, 640),
    Picture(1000, 333),
    Picture(20, 3000),
    Picture(1080, 1920),
    Picture(100, 100, min_pixels=200_704),
    Picture(500, 400, max_pixels=3136),
    Picture(500, 400, max_pixels=50_000),
    Picture(300, 300, min_pixels=100_000, max_pixels=120_000),
    Picture(1200, 1600, max_pixels=3_000_000),
)
