"""How large a random checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PresetName = Literal["tiny", "small", "base"]

PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)

HEAD_SIZE = 64
"""Of every attention head."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a checkpoint: of each of its towers, and of its language model."""

    tower_hidden: int
    tower_layers: int
    tower_intermediate: int
    hidden: int
    layers: int
    intermediate: int

    @property
    def tower_heads(self) -> int:
        """Attention heads of a tower."""
        return self.tower_hidden // HEAD_SIZE

    @property
    def heads(self) -> int:
        """Attention heads of the language model."""
        return self.hidden // HEAD_SIZE

    @property
    def key_value_heads(self) -> int:
        """Key and value heads of the language model."""
        return self.heads // 2


SIZES: dict[PresetName, Sizes] = {
    "tiny": Sizes(tower_hidden=256, tower_layers=3, tower_intermediate=512, hidden=256, layers=2, intermediate=512),
    "small": Sizes(tower_hidden=512, tower_layers=8, tower_intermediate=1408, hidden=512, layers=4, intermediate=1408),
    "base": Sizes(tower_hidden=768, tower_layers=12, tower_intermediate=2112, hidden=1024, layers=8, intermediate=2816),
}
"""tiny: for tests; wide enough that a wrong order of operations shows. small: for benchmarks on a CPU. base: towers of
the size of ViT-B, for a GPU."""
