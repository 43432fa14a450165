"""What a failure says about who could mend it: nobody, another encoder, or time."""

from __future__ import annotations

from enum import Enum

import grpc

from encoder_client.errors import EncoderError


class FailureKind(Enum):
    """What a failure of a call or of a part means to whoever may try again."""

    BUSY = "busy"
    """The encoder did not take it, now. Any encoder may be asked, this one after a while."""
    LOST = "lost"
    """The encoder, or the way to it, is gone. Any other may be asked at once."""
    FAULT = "fault"
    """The encoder failed while it worked on the part. Another may do better, or the part is at fault itself: so try
    elsewhere, and not often."""
    ELSEWHERE = "elsewhere"
    """This encoder does not have what the part needs, and is well: another may have it."""
    FINAL = "final"
    """No other encoder would answer otherwise."""


_ELSEWHERE = {"CONTENT_UNKNOWN", "UPLOAD_UNKNOWN", "FINGERPRINT_MISMATCH", "MODALITY_UNSUPPORTED"}
_NOT_TAKEN = {"NOT_READY", "SHUTTING_DOWN", "ADMISSION_FULL", "SPACE_TIMEOUT", "PART_ALREADY_SUBMITTED"}
"""The last: an earlier try at this encoder has not ended there yet, though its connection is gone here."""
_BROKEN_STREAM = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED}


def kind_of(error: EncoderError) -> FailureKind:
    """Judges an error of a call or of a part.

    Args:
        error: what the encoder, or gRPC on the way to it, said. A call that was cancelled here is not asked about.
    """
    if error.reason in _ELSEWHERE:
        return FailureKind.ELSEWHERE
    if error.reason in _NOT_TAKEN:
        return FailureKind.BUSY
    if not error.reason and error.code in _BROKEN_STREAM:
        return FailureKind.LOST
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after is not None:
        return FailureKind.BUSY
    if error.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}:
        return FailureKind.FAULT
    return FailureKind.FINAL
