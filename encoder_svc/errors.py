"""The one error of the service.

Data flow of an error: whoever finds a fault (validation in ``rpc/``, the tables in ``runtime/``, a media worker, an
engine) names it by a :class:`Reason` and says in its own words what is wrong and what to do. Between processes the pair
travels as two strings. ``rpc/errors.py`` holds the one table from reasons to gRPC codes and ``google.rpc`` details.

A message is for the caller: it never holds exception text, media bytes, addresses, leases or slot keys.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """What went wrong. The value is the ``reason`` of ``google.rpc.ErrorInfo``; docs/errors.md lists them."""

    REQUEST_INVALID = "REQUEST_INVALID"
    """A field of the request is missing, out of range, or contradicts another."""
    CALLER_UNKNOWN = "CALLER_UNKNOWN"
    """The call has no credential, or none that the server knows."""
    CALLER_FORBIDDEN = "CALLER_FORBIDDEN"
    """The caller's credential lacks the permission."""
    MODALITY_UNSUPPORTED = "MODALITY_UNSUPPORTED"
    """The served model has no tower for this modality."""
    REQUEST_ID_LIVE = "REQUEST_ID_LIVE"
    """Another request with the same id has not ended."""
    PART_ALREADY_SUBMITTED = "PART_ALREADY_SUBMITTED"
    """Another live request of the same prompt holds the same part, or gives another number of parts."""
    FINGERPRINT_MISMATCH = "FINGERPRINT_MISMATCH"
    """The receiver expects embeddings of other weights, dtype, preprocessing or width."""

    MEDIA_EMPTY = "MEDIA_EMPTY"
    """The item has no bytes."""
    MEDIA_UNRECOGNIZED = "MEDIA_UNRECOGNIZED"
    """The bytes are no media file that the server knows."""
    MEDIA_TRUNCATED = "MEDIA_TRUNCATED"
    """The file ends before its media do."""
    MEDIA_CORRUPT = "MEDIA_CORRUPT"
    """The file is damaged and cannot be decoded."""
    MEDIA_UNSUPPORTED = "MEDIA_UNSUPPORTED"
    """The file is valid, but its kind, shape or number format cannot be encoded by this model."""
    MEDIA_TOO_LARGE = "MEDIA_TOO_LARGE"
    """The media exceed a limit in bytes, pixels, frames or seconds."""
    MEDIA_DIGEST_MISMATCH = "MEDIA_DIGEST_MISMATCH"
    """The bytes are not those that ``content_sha256`` names."""
    MEDIA_TIMEOUT = "MEDIA_TIMEOUT"
    """Decoding took longer than it may; the worker was stopped."""
    MEDIA_WORKER_LOST = "MEDIA_WORKER_LOST"
    """The process that decoded the item died."""

    URI_FORBIDDEN = "URI_FORBIDDEN"
    """The server's settings do not allow the address: its scheme, host, port, network or folder."""
    FETCH_REFUSED = "FETCH_REFUSED"
    """The address gives no file, now or later: it is missing, or its server is not to be trusted."""
    FETCH_FAILED = "FETCH_FAILED"
    """The file could not be fetched this time: no connection, or a fault of its server."""
    FETCH_TIMEOUT = "FETCH_TIMEOUT"
    """Fetching took longer than it may."""
    FETCH_TOO_LARGE = "FETCH_TOO_LARGE"
    """The file behind the address has more bytes than the server fetches."""

    ADMISSION_FULL = "ADMISSION_FULL"
    """The server holds as much work as it may."""
    SPACE_TIMEOUT = "SPACE_TIMEOUT"
    """No space for the embedding or its input came free in time."""
    PROMPT_TOO_LARGE = "PROMPT_TOO_LARGE"
    """The embeddings of the prompt can never fit into the share of the arena that one prompt may take."""
    NOT_READY = "NOT_READY"
    """The model is still loading."""
    ENGINE_LOST = "ENGINE_LOST"
    """The engine died during the forward."""
    FORWARD_FAILED = "FORWARD_FAILED"
    """The tower raised on this item alone."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The device has too little memory for this item alone."""
    OUTPUT_NOT_FINITE = "OUTPUT_NOT_FINITE"
    """The tower's output holds NaN or infinity."""
    SHUTTING_DOWN = "SHUTTING_DOWN"
    """The server is stopping."""
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    """The caller's deadline passed before the part was READY."""

    CONTENT_UNKNOWN = "CONTENT_UNKNOWN"
    """No embedding of this content is here."""
    UPLOAD_UNKNOWN = "UPLOAD_UNKNOWN"
    """No such upload, or its time is over."""

    LEASE_UNKNOWN = "LEASE_UNKNOWN"
    """No such lease, or it was forgotten."""
    LEASE_EXPIRED = "LEASE_EXPIRED"
    """The lease's time ran out."""
    LEASE_RELEASED = "LEASE_RELEASED"
    """The lease was given back before."""
    LEASE_REVOKED = "LEASE_REVOKED"
    """The encoder took the lease back."""
    RANGE_INVALID = "RANGE_INVALID"
    """The bytes that were asked for are not in the slot."""

    RECEIVER_FULL = "RECEIVER_FULL"
    """A named receiver has as many parts as it may that it has not released, or there are too many receivers."""
    SUBSCRIPTION_SUPERSEDED = "SUBSCRIPTION_SUPERSEDED"
    """The receiver has another subscription, of the same or a newer life."""
    SUBSCRIPTION_SLOW = "SUBSCRIPTION_SLOW"
    """The receiver did not take its events, and there were more than are kept."""

    INTERNAL = "INTERNAL"
    """A fault of the server."""


class ServiceError(Exception):
    """A named fault with a message for the caller.

    Args:
        reason: what went wrong.
        message: what is wrong and what to do, for the caller.
        field: the path of the request's field at fault, such as ``items[2].part_idx``.
        retry_after: seconds after which another try can succeed.

    Example:
        >>> raise ServiceError(Reason.MEDIA_EMPTY, "the item has no bytes; send a whole file", field="items[0].data")
        Traceback (most recent call last):
        encoder_svc.errors.ServiceError: the item has no bytes; send a whole file
    """

    def __init__(
        self, reason: Reason, message: str, *, field: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after = retry_after


class SetupError(Exception):
    """The service cannot start as it is set up. The message tells the operator what to change; it is shown alone."""
