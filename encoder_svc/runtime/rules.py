"""What the scheduler decides by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """The limits, as the settings give them."""

    prepare_seconds: float
    space_seconds: float
    forward_seconds: float
    canary_seconds: float
    lease_seconds: float
    max_lease_seconds: float
    prompt_bytes: int
    """Payload bytes that the parts of one prompt may take in an arena."""
    max_queued_parts: int
    max_queued_bytes: int
    max_queued_patches: int
    batches_ahead: int
    input_bytes: int
    max_known_receivers: int
    max_receiver_parts: int
    max_upload_bytes: int
    max_uploads_bytes: int
    upload_seconds: float
