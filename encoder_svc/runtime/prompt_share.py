"""How much of the arenas one prompt may take: what does not fit there together could never be read together."""

from __future__ import annotations

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.parts import Part
from encoder_svc.runtime.slots import footprint
from epd.encoder.v1.encoder_service_pb2 import DELIVERY_CACHE_ONLY


class PromptShare:
    """Charges prompts for the embeddings of their parts. One that is asked for again is charged once.

    Args:
        prompt_bytes: what one prompt may take.
        capacity: the largest footprint that any arena can hold.
    """

    def __init__(self, prompt_bytes: int, capacity: int) -> None:
        self._limit = min(prompt_bytes, capacity)
        self._capacity = capacity

    def charge(self, part: Part, nbytes: int) -> None:
        """Charges a part's prompt for an embedding of ``nbytes``.

        Raises:
            ServiceError: that is more than a prompt may take.
        """
        taken = footprint(nbytes)
        if part.request.command.delivery == DELIVERY_CACHE_ONLY and taken <= self._capacity:
            return  # Nobody holds it: others may evict it at once.
        prompt = part.request.prompt
        charged = prompt.part_bytes.get(part.item.part_idx, 0)
        more = max(0, taken - charged)
        total = prompt.slot_bytes + more
        if total > self._limit:
            raise ServiceError(
                Reason.PROMPT_TOO_LARGE,
                f"the embeddings of this prompt need {total} bytes and one prompt may take {self._limit}; ask for "
                "fewer pixels or split the prompt, or let the operator raise arena_bytes or prompt_arena_share",
            )
        prompt.slot_bytes = total
        prompt.part_bytes[part.item.part_idx] = charged + more
        part.slot_bytes = more

    def refund(self, part: Part) -> None:
        """A part has ended without an embedding."""
        if part.slot_bytes:
            prompt = part.request.prompt
            prompt.slot_bytes -= part.slot_bytes
            prompt.part_bytes[part.item.part_idx] -= part.slot_bytes
            part.slot_bytes = 0
