"""Reads the rich status of a call that failed."""

from __future__ import annotations

from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from epd.encoder.v1 import encoder_service_pb2 as pb

AnyMessage = TypeVar("AnyMessage", bound=Message)

DETAILS_KEY = "grpc-status-details-bin"


def status_of(error: grpc.aio.AioRpcError) -> Status:
    """The ``google.rpc.Status`` of an error that the service made."""
    metadata: Any = error.trailing_metadata()
    for key, value in metadata:
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            return Status.FromString(value)
    raise AssertionError(f"no status details in {error!r}")


def reason_of(failure: grpc.aio.AioRpcError | pb.PartFailed) -> str:
    """The reason of a failed call or part."""
    status = status_of(failure) if isinstance(failure, grpc.aio.AioRpcError) else failure.status
    (info,) = _unpack(status, ErrorInfo)
    return str(info.reason)


def fields_of(failure: grpc.aio.AioRpcError) -> list[str]:
    """The paths of the fields at fault."""
    return [fault.field for bad in _unpack(status_of(failure), BadRequest) for fault in bad.field_violations]


def retry_of(failure: grpc.aio.AioRpcError | pb.PartFailed) -> float | None:
    """Seconds to wait before a retry, if one can help."""
    status = status_of(failure) if isinstance(failure, grpc.aio.AioRpcError) else failure.status
    retries = _unpack(status, RetryInfo)
    return retries[0].retry_delay.ToNanoseconds() / 1e9 if retries else None


def _unpack(status: Status, kind: type[AnyMessage]) -> list[AnyMessage]:
    found = []
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found
