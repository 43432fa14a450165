"""The one error table: from a :class:`Reason` to a gRPC code and ``google.rpc`` details. docs/errors.md is its prose.

An error reaches a caller by one of two ways, with the same content: as the status of a call that is refused as a whole
(:class:`ErrorInterceptor`), or as ``PartFailed.status`` on the stream of a call that goes on (:func:`to_status`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.telemetry.metrics import Metrics
from epd.damaged_messages import DAMAGED, DAMAGED_TEXT, tolerant

DOMAIN = "encoder-svc"
"""The ``domain`` of every ``google.rpc.ErrorInfo``."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ErrorRow:
    """How callers are told of a reason."""

    code: grpc.StatusCode
    retry_after: float | None = None
    """Seconds after which the same request can succeed, unless the error itself says another number. None: a retry
    alone does not help, and there is no ``RetryInfo``."""


ERROR_TABLE = MappingProxyType(
    {
        Reason.REQUEST_INVALID: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.CALLER_UNKNOWN: ErrorRow(grpc.StatusCode.UNAUTHENTICATED),
        Reason.CALLER_FORBIDDEN: ErrorRow(grpc.StatusCode.PERMISSION_DENIED),
        Reason.MODALITY_UNSUPPORTED: ErrorRow(grpc.StatusCode.FAILED_PRECONDITION),
        Reason.REQUEST_ID_LIVE: ErrorRow(grpc.StatusCode.ALREADY_EXISTS),
        Reason.PART_ALREADY_SUBMITTED: ErrorRow(grpc.StatusCode.ALREADY_EXISTS),
        Reason.FINGERPRINT_MISMATCH: ErrorRow(grpc.StatusCode.FAILED_PRECONDITION),
        Reason.MEDIA_EMPTY: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.MEDIA_UNRECOGNIZED: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.MEDIA_TRUNCATED: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.MEDIA_CORRUPT: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.MEDIA_UNSUPPORTED: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.MEDIA_TOO_LARGE: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.MEDIA_DIGEST_MISMATCH: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        # Not DEADLINE_EXCEEDED, which would look like the caller's own deadline; FETCH_TIMEOUT neither.
        Reason.MEDIA_TIMEOUT: ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED),
        Reason.MEDIA_WORKER_LOST: ErrorRow(grpc.StatusCode.UNAVAILABLE, retry_after=1.0),
        Reason.URI_FORBIDDEN: ErrorRow(grpc.StatusCode.PERMISSION_DENIED),
        Reason.FETCH_REFUSED: ErrorRow(grpc.StatusCode.FAILED_PRECONDITION),
        Reason.FETCH_FAILED: ErrorRow(grpc.StatusCode.UNAVAILABLE, retry_after=1.0),
        Reason.FETCH_TIMEOUT: ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED),
        Reason.FETCH_TOO_LARGE: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.ADMISSION_FULL: ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=0.5),
        Reason.SPACE_TIMEOUT: ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=1.0),
        Reason.PROMPT_TOO_LARGE: ErrorRow(grpc.StatusCode.INVALID_ARGUMENT),
        Reason.NOT_READY: ErrorRow(grpc.StatusCode.UNAVAILABLE, retry_after=1.0),
        Reason.ENGINE_LOST: ErrorRow(grpc.StatusCode.UNAVAILABLE, retry_after=1.0),
        Reason.FORWARD_FAILED: ErrorRow(grpc.StatusCode.INTERNAL),
        Reason.OUT_OF_MEMORY: ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED),
        Reason.OUTPUT_NOT_FINITE: ErrorRow(grpc.StatusCode.INTERNAL),
        Reason.SHUTTING_DOWN: ErrorRow(grpc.StatusCode.UNAVAILABLE, retry_after=1.0),
        Reason.DEADLINE_EXCEEDED: ErrorRow(grpc.StatusCode.DEADLINE_EXCEEDED),
        Reason.CONTENT_UNKNOWN: ErrorRow(grpc.StatusCode.NOT_FOUND),
        Reason.UPLOAD_UNKNOWN: ErrorRow(grpc.StatusCode.NOT_FOUND),
        Reason.LEASE_UNKNOWN: ErrorRow(grpc.StatusCode.NOT_FOUND),
        Reason.LEASE_EXPIRED: ErrorRow(grpc.StatusCode.FAILED_PRECONDITION),
        Reason.LEASE_RELEASED: ErrorRow(grpc.StatusCode.FAILED_PRECONDITION),
        Reason.LEASE_REVOKED: ErrorRow(grpc.StatusCode.ABORTED),
        Reason.RANGE_INVALID: ErrorRow(grpc.StatusCode.OUT_OF_RANGE),
        Reason.RECEIVER_FULL: ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=1.0),
        Reason.SUBSCRIPTION_SUPERSEDED: ErrorRow(grpc.StatusCode.ABORTED),
        Reason.SUBSCRIPTION_SLOW: ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=0.1),
        Reason.INTERNAL: ErrorRow(grpc.StatusCode.INTERNAL),
    }
)


def to_status(error: ServiceError) -> Status:
    """The error as ``google.rpc.Status``.

    Its details are ``ErrorInfo``; ``BadRequest`` if a field is at fault; ``RetryInfo`` if a later try can succeed.
    """
    row = ERROR_TABLE[error.reason]
    status = Status(code=row.code.value[0], message=error.message)
    status.details.add().Pack(ErrorInfo(reason=error.reason.value, domain=DOMAIN))
    if error.field is not None:
        violation = BadRequest.FieldViolation(field=error.field, description=error.message, reason=error.reason.value)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    retry_after = row.retry_after if error.retry_after is None else error.retry_after
    if retry_after is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(retry_after * 1e9))
        status.details.add().Pack(retry)
    return status


_CANCEL_SECONDS = 5.0
"""For gRPC to cancel a handler whose call has ended."""

_Handler = Callable[[Any, Any], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic only in the stubs
    """Ends a call with the status of the :class:`ServiceError` that its handler raised, and counts calls by outcome.

    Anything else that a handler raises is a fault of ours: it is logged, and the caller is told INTERNAL without its
    text. A cancelled handler stays cancelled: gRPC leaks the call otherwise.

    Args:
        service: the full name of the service whose handlers are covered; others keep their own ways.
        metrics: counts the calls.
    """

    def __init__(self, service: str, metrics: Metrics) -> None:
        self._prefix = f"/{service}/"
        self._metrics = metrics
        self._covered: dict[str, Any] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Finds the handler of a call, covered."""
        method: str = handler_call_details.method
        if not method.startswith(self._prefix):
            return await continuation(handler_call_details)
        covered = self._covered.get(method)
        if covered is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            covered = self._covered[method] = self._cover(handler, method.removeprefix(self._prefix))
        return covered

    def _cover(self, handler: Any, method: str) -> Any:
        streams = {False: "unary", True: "stream"}
        kind = f"{streams[handler.request_streaming]}_{streams[handler.response_streaming]}"
        behaviour: _Handler = getattr(handler, kind)
        assert inspect.iscoroutinefunction(behaviour), "a generator is not reliably closed: write to the context"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            self._tell(_checking_stream(behaviour) if handler.request_streaming else behaviour, method),
            request_deserializer=handler.request_deserializer and tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _tell(self, behaviour: _Handler, method: str) -> _Handler:
        # Looking a label up takes longer than counting.
        ended: dict[grpc.StatusCode, Any] = {}

        async def handle(request: Any, context: Any) -> Any:
            code = grpc.StatusCode.INTERNAL
            try:
                response = await behaviour(_undamaged(request), context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except ServiceError as error:
                code = ERROR_TABLE[error.reason].code
                status = to_status(error)
            except grpc.aio.InternalError:
                # A message was not written: the caller has left, as gRPC says next, by cancelling this.
                code = grpc.StatusCode.CANCELLED
                await asyncio.sleep(_CANCEL_SECONDS)
                code = grpc.StatusCode.INTERNAL
                status = to_status(ServiceError(Reason.INTERNAL, "a message could not be written"))
            except Exception:
                if context.done():
                    # The caller left while a message was being written: there is nobody to tell.
                    code = grpc.StatusCode.CANCELLED
                    raise asyncio.CancelledError from None
                logger.exception("unexpected error in %s", method)
                status = to_status(ServiceError(Reason.INTERNAL, "a fault of the server; its log says more"))
            else:
                code = grpc.StatusCode.OK
                return response
            finally:
                counter = ended.get(code)
                if counter is None:
                    counter = ended[code] = self._metrics.requests.labels(method, code.name)
                counter.inc()
            return await context.abort_with_status(rpc_status.to_status(status))

        return handle


def _undamaged(message: Any) -> Any:
    if message is DAMAGED:
        raise ServiceError(Reason.REQUEST_INVALID, DAMAGED_TEXT, field="request")
    return message


class _CheckedStream:
    """The messages of a call. No generator: one that is left is not reliably closed."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages

    def __aiter__(self) -> _CheckedStream:
        return self

    async def __anext__(self) -> Any:
        return _undamaged(await anext(self._messages))


def _checking_stream(behaviour: _Handler) -> _Handler:
    async def handle(messages: AsyncIterator[Any], context: Any) -> Any:
        return await behaviour(_CheckedStream(messages), context)

    return handle
