"""The worker's side: copies embeddings from the scheduler's pool to the model's device."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING

from encoder_client.integrations.vllm import rows
from encoder_client.integrations.vllm.scheduler_side import Load
from encoder_client.pool.embedding_handle import EmbeddingHandle

if TYPE_CHECKING:
    import torch

OPEN_SECONDS = 30.0
"""That the scheduler's process may take to hand the memory over. It holds the embedding meanwhile."""


def load(
    loads: Sequence[Load], cache: MutableMapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """Puts embeddings into vLLM's cache of encoder outputs, each of shape (rows, H · (1 + levels)).

    Args:
        loads: what the scheduler says.
        cache: by identifier. What is there stays.
        device: the model's.
        dtype: the model's.

    Raises:
        HandleError: the scheduler's process does not answer, so it is gone, or on another host.
    """
    for item in loads:
        if item.identifier not in cache:
            embedding = EmbeddingHandle.from_bytes(item.handle).open(OPEN_SECONDS)
            cache[item.identifier] = rows.matrix(embedding).to(device, dtype, copy=True)
