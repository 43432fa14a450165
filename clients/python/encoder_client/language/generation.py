"""What a language-only model answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Generation:
    """A finished answer."""

    token_ids: list[int]
    """The tokens that were generated, without the prompt, the end token among them if it was reached."""
    text: str
    """Them decoded, without special tokens."""
    first_logits: torch.Tensor | None
    """The logits of the first generated token, shape (vocabulary,), float32; None if they were not asked for."""
