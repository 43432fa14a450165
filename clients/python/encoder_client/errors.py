"""What can go wrong, by who says it.

===================  ==================================================================================================
:class:`EncoderError`  the encoder refused a call, or the call failed on its way: a gRPC code and the decoded details
:class:`PartError`     the encoder failed one part of a call
:class:`ChunkError`    a chunk contradicts itself, its LAYOUT, or what was asked for: it is not used
:class:`ReadError`     the bytes could not be had, were damaged, or their lease had ended: they are not used
:class:`PoolError`     the receiver's pool has no space for them
:class:`HandleError`   an embedding in another process's pool cannot be opened
:class:`PromptError`   the parts of a prompt do not fit together, or are not all there
===================  ==================================================================================================

No message holds media bytes, leases or slot keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class EncoderClientError(Exception):
    """The base of everything that this library raises on purpose."""


@dataclass(frozen=True)
class FieldViolation:
    """A field of the request that is at fault."""

    field: str
    """Its path, such as ``items[2].part_idx``."""
    description: str
    """What is wrong with it."""


class EncoderError(EncoderClientError):
    """The encoder refused a call, or the call failed.

    Args:
        code: the gRPC status code.
        message: what the encoder says.
        reason: ``ErrorInfo.reason``, such as ``ADMISSION_FULL``; empty if the status carries none, which is the case
            when the encoder was not reached.
        retry_after: seconds after which another try can succeed; None if the encoder does not say so.
        field_violations: the fields at fault.

    Example:
        >>> try:
        ...     info = await client.server_info()
        ... except EncoderError as error:
        ...     print(error.code, error.reason, error.retry_after)
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        retry_after: float | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        super().__init__(f"{code.name}{f' ({reason})' if reason else ''}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.retry_after = retry_after
        self.field_violations = field_violations


class PartError(EncoderError):
    """A part failed or was cancelled; its siblings are not touched by that.

    Args:
        prompt_id: the part's prompt.
        part_idx: the part's place in it.
        error: why.
    """

    def __init__(self, prompt_id: str, part_idx: int, error: EncoderError) -> None:
        super().__init__(
            error.code,
            error.message,
            reason=error.reason,
            retry_after=error.retry_after,
            field_violations=error.field_violations,
        )
        self.prompt_id = prompt_id
        self.part_idx = part_idx
        self.args = (f"part {part_idx} of prompt {prompt_id!r}: {error}",)


class ChunkError(EncoderClientError):
    """A chunk must not be used.

    Args:
        field: the field of ``EmbeddingChunk`` that is wrong.
        message: what is wrong with it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ReadError(EncoderClientError):
    """The bytes of an embedding could not be had, or must not be used."""


class PoolError(EncoderClientError):
    """The receiver's pool cannot hold what was asked for, or not in time."""


class HandleError(EncoderClientError):
    """An embedding cannot be handed to another process, or not be opened there."""


class PromptError(EncoderClientError):
    """The parts of a prompt do not fit together, or are not all there."""


def from_status(status: status_pb2.Status) -> EncoderError:
    """Decodes a ``google.rpc.Status``; details of unknown types are left out."""
    reason, retry_after = "", None
    violations: list[FieldViolation] = []
    for detail in status.details:
        info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(bad):
            violations.extend(FieldViolation(fault.field, fault.description) for fault in bad.field_violations)
    return EncoderError(
        _CODES.get(status.code, grpc.StatusCode.UNKNOWN),
        status.message,
        reason=reason,
        retry_after=retry_after,
        field_violations=tuple(violations),
    )


def from_rpc_error(error: grpc.aio.AioRpcError) -> EncoderError:
    """Decodes a failed call: its trailing metadata hold a ``google.rpc.Status`` if the encoder made the error."""
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in metadata:
        if key == _DETAILS and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            if status.code == error.code().value[0]:
                return from_status(status)
    return EncoderError(error.code(), error.details() or "the call failed without a message")
