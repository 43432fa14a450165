"""The parts of a prompt over several encoders: each ends once, whatever happens, with the time passed in."""

from __future__ import annotations

from math import inf
from random import Random

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_client.errors import EncoderError
from encoder_client.fleet.failure_kinds import FailureKind, kind_of
from encoder_client.fleet.prompt_ledger import MOST_FAULTS, PartState, PromptLedger

LOST = EncoderError(grpc.StatusCode.UNAVAILABLE, "the connection is gone")
FAULT = EncoderError(grpc.StatusCode.UNAVAILABLE, "it died", reason="ENGINE_LOST", retry_after=1.0)
BUSY = EncoderError(grpc.StatusCode.RESOURCE_EXHAUSTED, "it is full", reason="ADMISSION_FULL", retry_after=0.5)
BAD = EncoderError(grpc.StatusCode.INVALID_ARGUMENT, "no image", reason="MEDIA_UNRECOGNIZED")
ELSEWHERE = EncoderError(grpc.StatusCode.NOT_FOUND, "not here", reason="CONTENT_UNKNOWN")


@pytest.mark.parametrize(
    ("code", "reason", "retry_after", "kind"),
    [
        ("UNAVAILABLE", "", None, FailureKind.LOST),
        ("UNKNOWN", "", None, FailureKind.LOST),
        ("CANCELLED", "", None, FailureKind.LOST),
        ("UNAVAILABLE", "NOT_READY", 1.0, FailureKind.BUSY),
        ("UNAVAILABLE", "SHUTTING_DOWN", 1.0, FailureKind.BUSY),
        ("RESOURCE_EXHAUSTED", "ADMISSION_FULL", 0.5, FailureKind.BUSY),
        ("RESOURCE_EXHAUSTED", "SPACE_TIMEOUT", 1.0, FailureKind.BUSY),
        ("ALREADY_EXISTS", "PART_ALREADY_SUBMITTED", None, FailureKind.BUSY),
        ("UNAVAILABLE", "ENGINE_LOST", 1.0, FailureKind.FAULT),
        ("UNAVAILABLE", "MEDIA_WORKER_LOST", 1.0, FailureKind.FAULT),
        ("UNAVAILABLE", "FETCH_FAILED", 1.0, FailureKind.FAULT),
        ("INTERNAL", "FORWARD_FAILED", None, FailureKind.FAULT),
        ("INTERNAL", "", None, FailureKind.FAULT),
        ("NOT_FOUND", "CONTENT_UNKNOWN", None, FailureKind.ELSEWHERE),
        ("NOT_FOUND", "UPLOAD_UNKNOWN", None, FailureKind.ELSEWHERE),
        ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH", None, FailureKind.ELSEWHERE),
        ("INVALID_ARGUMENT", "MEDIA_CORRUPT", None, FailureKind.FINAL),
        ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", None, FailureKind.FINAL),
        ("RESOURCE_EXHAUSTED", "", None, FailureKind.FINAL),
        ("PERMISSION_DENIED", "URI_FORBIDDEN", None, FailureKind.FINAL),
        ("DEADLINE_EXCEEDED", "", None, FailureKind.FINAL),
        ("UNIMPLEMENTED", "", None, FailureKind.FINAL),
    ],
)
def test_what_a_failure_means(code: str, reason: str, retry_after: float | None, kind: FailureKind) -> None:
    error = EncoderError(grpc.StatusCode[code], "it failed", reason=reason, retry_after=retry_after)
    assert kind_of(error) is kind


def sent(ledger: PromptLedger, instance_id: str = "a") -> None:
    ledger.send([0], instance_id)


def test_a_lost_part_is_tried_elsewhere_and_bad_input_is_not() -> None:
    ledger = PromptLedger({0: inf, 1: inf}, 100.0, 2)
    ledger.send([0, 1], "a")
    assert not ledger.failed(0, LOST, 1.0)
    assert ledger.failed(1, BAD, 1.0)
    assert ledger.waiting() == [0]
    assert ledger.avoided(0) == {"a"}
    assert ledger.state(1) is PartState.FAILED


def test_a_part_that_faults_is_not_tried_often() -> None:
    ledger = PromptLedger({0: inf}, 100.0, 9)
    for number in range(MOST_FAULTS):
        sent(ledger, f"{number}")
        assert ledger.failed(0, FAULT, 1.0) is (number == MOST_FAULTS - 1)


def test_a_content_that_is_nowhere_is_asked_for_everywhere_and_no_more() -> None:
    ledger = PromptLedger({0: inf}, 100.0, 5)
    asked = 0
    while ledger.waiting():
        sent(ledger, f"{asked}")
        asked += 1
        ledger.failed(0, ELSEWHERE, 1.0)
    assert asked == 6


def test_busy_encoders_are_asked_until_the_deadline() -> None:
    ledger = PromptLedger({0: 10.0, 1: inf}, 100.0, 2)
    for _ in range(50):
        ledger.send([0, 1], "a")
        assert not ledger.failed(0, BUSY, 9.0)
        assert not ledger.failed(1, BUSY, 9.0)
    assert ledger.avoided(0) == set()
    assert ledger.next_end() == 10.0
    assert ledger.expire(9.9, str) == {}
    assert ledger.expire(10.0, str) == {0: BUSY}
    assert ledger.next_end() == 100.0
    assert ledger.expire(100.0, str) == {1: BUSY}


def test_a_part_that_nobody_took_says_why() -> None:
    ledger = PromptLedger({0: 10.0, 1: inf}, 20.0, 1)
    error = ledger.expire(10.0, lambda: "a: it is down")[0]
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "a: it is down" in str(error)
    error = ledger.expire(20.0, lambda: "a: it is down")[1]
    assert error.code is grpc.StatusCode.UNAVAILABLE


def test_a_ready_part_can_be_asked_for_again() -> None:
    ledger = PromptLedger({0: inf}, 100.0, 1)
    sent(ledger)
    ledger.ready(0)
    ledger.again(0)
    assert ledger.waiting() == [0]
    sent(ledger)
    ledger.ready(0)
    assert not ledger.failed(0, LOST, 1.0)
    assert ledger.avoided(0) == {"a"}


@given(
    parts=st.integers(1, 6),
    encoders=st.integers(1, 4),
    errors=st.lists(st.sampled_from([LOST, BUSY, ELSEWHERE, None]), max_size=60),
    seed=st.integers(0, 2**16),
)
def test_every_part_ends_once_if_an_encoder_lives(
    parts: int, encoders: int, errors: list[EncoderError | None], seed: int
) -> None:
    """Any order of tries and failures: encoder 0 lives, others fail while there are errors left."""
    random, now = Random(seed), 0.0
    ledger = PromptLedger(dict.fromkeys(range(parts), inf), 1e6, encoders)
    ends = dict.fromkeys(range(parts), 0)
    under_way: list[tuple[int, int]] = []
    while not all(ends.values()):
        now += 0.01
        if under_way and (not ledger.waiting() or random.random() < 0.5):
            part_idx, encoder = under_way.pop(random.randrange(len(under_way)))
            error = errors.pop() if encoder and errors else None
            if error is None:
                ledger.ready(part_idx)
                ends[part_idx] += 1
            else:
                assert not ledger.failed(part_idx, error, now)
        else:
            part_idx = random.choice(ledger.waiting())
            fresh = [n for n in range(encoders) if str(n) not in ledger.avoided(part_idx)] or [0]
            encoder = random.choice(fresh)
            ledger.send([part_idx], str(encoder))
            under_way.append((part_idx, encoder))
    assert set(ends.values()) == {1}
    assert all(ledger.state(part_idx) is PartState.READY for part_idx in ends)
