"""``google.rpc`` details become an error that a program can act on."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, Help, RetryInfo

from encoder_client.errors import EncoderError, FieldViolation, PartError, from_rpc_error, from_status


def status(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    result = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        result.details.append(packed)
    return result


def rpc_error(told: status_pb2.Status, code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code,
        initial_metadata=grpc.aio.Metadata(),
        trailing_metadata=grpc.aio.Metadata(("grpc-status-details-bin", told.SerializeToString())),
        details=told.message,
        debug_error_string="",
    )


def test_every_detail_is_decoded() -> None:
    retry = RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    bad = BadRequest(field_violations=[BadRequest.FieldViolation(field="items[2].part_idx", description="too large")])
    told = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ErrorInfo(reason="ADMISSION_FULL"), retry, bad, Help())
    error = from_rpc_error(rpc_error(told, grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.reason == "ADMISSION_FULL"
    assert error.retry_after == 1.5
    assert error.field_violations == (FieldViolation("items[2].part_idx", "too large"),)
    assert str(error) == "RESOURCE_EXHAUSTED (ADMISSION_FULL): full"


def test_an_error_without_details_keeps_code_and_message() -> None:
    bare = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no route", debug_error_string=""
    )
    error = from_rpc_error(bare)
    assert (error.code, error.message, error.reason) == (grpc.StatusCode.UNAVAILABLE, "no route", "")
    assert error.retry_after is None


def test_details_of_another_code_are_not_believed() -> None:
    told = status(grpc.StatusCode.NOT_FOUND, "gone", ErrorInfo(reason="LEASE_UNKNOWN"))
    assert from_rpc_error(rpc_error(told, grpc.StatusCode.UNAVAILABLE)).reason == ""


def test_an_unknown_code_is_unknown() -> None:
    assert from_status(status_pb2.Status(code=99)).code is grpc.StatusCode.UNKNOWN


def test_a_parts_error_names_the_part() -> None:
    error = PartError("p", 3, EncoderError(grpc.StatusCode.INVALID_ARGUMENT, "empty", reason="MEDIA_EMPTY"))
    assert str(error) == "part 3 of prompt 'p': INVALID_ARGUMENT (MEDIA_EMPTY): empty"
    assert (error.reason, error.part_idx) == ("MEDIA_EMPTY", 3)
