"""The error table: every reason has a row, the page tells the same, and statuses carry what the contract promises."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.rpc.errors import DOMAIN, ERROR_TABLE, to_status

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| ([\d.]*) ?\| (.+) \| (.+) \|$", re.MULTILINE)


def test_every_reason_has_a_row() -> None:
    assert set(ERROR_TABLE) == set(Reason)


def test_the_page_and_the_table_are_equal() -> None:
    rows = ROW.findall(PAGE.read_text())
    told = [(reason, code, float(retry) if retry else None) for reason, code, retry, _, _ in rows]
    assert told == [(reason.value, ERROR_TABLE[reason].code.name, ERROR_TABLE[reason].retry_after) for reason in Reason]


@pytest.mark.parametrize("reason", Reason)
def test_a_status_carries_code_message_reason_and_retry(reason: Reason) -> None:
    status = to_status(ServiceError(reason, "what is wrong"))
    details = _details(status)
    assert status.code == ERROR_TABLE[reason].code.value[0]
    assert status.message == "what is wrong"
    assert details["ErrorInfo"] == ErrorInfo(reason=reason.value, domain=DOMAIN)
    assert "BadRequest" not in details
    assert ("RetryInfo" in details) == (ERROR_TABLE[reason].retry_after is not None)
    assert ERROR_TABLE[reason].code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


def test_a_status_names_the_field_and_takes_the_errors_own_retry() -> None:
    error = ServiceError(Reason.ADMISSION_FULL, "full", field="items", retry_after=2.5)
    details = _details(to_status(error))
    retry = details["RetryInfo"]
    bad_request = details["BadRequest"]
    assert isinstance(retry, RetryInfo)
    assert isinstance(bad_request, BadRequest)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert [(fault.field, fault.description) for fault in bad_request.field_violations] == [("items", "full")]


def _details(status: Status) -> dict[str, ErrorInfo | BadRequest | RetryInfo]:
    found: dict[str, ErrorInfo | BadRequest | RetryInfo] = {}
    for packed in status.details:
        for kind in (ErrorInfo, BadRequest, RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                message = kind()
                packed.Unpack(message)
                found[kind.__name__] = message
    assert len(found) == len(status.details)
    return found
