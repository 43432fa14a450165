from __future__ import annotations

from collections.abc import Callable

import pytest

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.events import Accepted, ChunkEvent, Completed, PartCancelled, PartFailed
from encoder_svc.runtime.parts import Part, PartState
from encoder_svc.runtime.requests import Request, RequestTable
from epd.encoder.v1.embedding_pb2 import ChunkState, EmbeddingChunk, EncoderRef
from tests.runtime.recording_hands import Caller, ComputationMaker, encode_command

FAULT = ServiceError(Reason.MEDIA_CORRUPT, "own words")


class Table:
    """A request table that keeps what it told."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, PartState, PartState]] = []
        self.table = RequestTable(lambda part, before, _: self.ended.append((part.item.part_idx, before, part.state)))

    def admit(self, *args: str, parts: tuple[int, ...] = (0,), num_parts: int = 16, **kwargs: str) -> Request:
        """Admits a request with a strict caller."""
        command = encode_command(*args, parts=parts, num_parts=num_parts, **kwargs)  # type: ignore[arg-type] # strings
        self.caller = Caller(command)
        return self.table.admit(command, self.caller, EncoderRef(instance_id="me"), [4] * len(parts), 10.0)


def ready(table: RequestTable, part: Part) -> None:
    """Ends a part well."""
    part.computation = ComputationMaker()(stage=PartState.ENCODING)
    layout = EmbeddingChunk(part_idx=part.item.part_idx, state=ChunkState.CHUNK_STATE_LAYOUT)
    part.request.tell(ChunkEvent(layout))
    table.end_ready(part, EmbeddingChunk(part_idx=part.item.part_idx, state=ChunkState.CHUNK_STATE_READY), 12.5)


def test_accepted_is_first_and_completed_is_last_and_counts() -> None:
    table = Table()
    request = table.admit(parts=(0, 1, 2, 3))
    caller = table.caller
    assert caller.events == [Accepted("r", "p", 16, EncoderRef(instance_id="me"))]
    first, second, third, fourth = request.parts
    ready(table.table, third)
    table.table.end_failed(first, FAULT, 12.0)
    table.table.end_cancelled(second, 12.0)
    assert len(table.table) == 1
    ready(table.table, fourth)
    assert caller.completed == Completed(ready=2, failed=1, cancelled=1, from_cache=0, total_seconds=2.5)
    assert isinstance(caller.ends[0], PartFailed)
    assert isinstance(caller.ends[1], PartCancelled)
    assert len(table.table) == 0
    assert table.table.prompt("", "p") is None
    assert table.table.live_parts() == {}
    assert table.ended == [
        (2, PartState.ENCODING, PartState.READY),
        (0, PartState.FETCHING, PartState.FAILED),
        (1, PartState.FETCHING, PartState.CANCELLED),
        (3, PartState.ENCODING, PartState.READY),
    ]


@pytest.mark.parametrize("first", ["failed", "cancelled", "ready"])
@pytest.mark.parametrize("second", ["failed", "cancelled"])
def test_a_part_ends_once(first: str, second: str) -> None:
    table = Table()
    part = table.admit(parts=(0, 1)).parts[0]
    ends: dict[str, Callable[[], object]] = {
        "failed": lambda: table.table.end_failed(part, FAULT, 1.0),
        "cancelled": lambda: table.table.end_cancelled(part, 1.0),
        "ready": lambda: ready(table.table, part),
    }
    ends[first]()
    with pytest.raises(AssertionError):
        ends[second]()
    assert len(table.caller.ends) == 1
    assert part.request.open_parts == 1


def test_f02_a_second_live_request_with_the_same_id_is_refused_and_the_first_goes_on() -> None:
    table = Table()
    request = table.admit("r", parts=(0,))
    caller = table.caller
    with pytest.raises(ServiceError) as fault:
        table.admit("r", prompt_id="another", parts=(1,))
    assert fault.value.reason is Reason.REQUEST_ID_LIVE
    assert fault.value.field == "request_id"
    assert table.caller.events == [], "the refused caller is told nothing"
    assert table.table.prompt("", "another") is None
    table.table.end_cancelled(request.parts[0], 1.0)
    assert caller.completed is not None
    table.admit("r")


def test_a_part_that_another_request_of_the_prompt_holds_is_refused() -> None:
    table = Table()
    request = table.admit("r1", parts=(0, 1))
    with pytest.raises(ServiceError) as fault:
        table.admit("r2", parts=(2, 1))
    assert fault.value.reason is Reason.PART_ALREADY_SUBMITTED
    assert fault.value.field == "items[1].part_idx"
    assert len(table.table) == 1
    table.table.end_failed(request.parts[1], FAULT, 1.0)
    table.admit("r2", parts=(2, 1))
    assert len(table.table) == 2


def test_requests_of_a_prompt_agree_on_its_number_of_parts() -> None:
    table = Table()
    table.admit("r1", num_parts=3)
    with pytest.raises(ServiceError) as fault:
        table.admit("r2", parts=(1,), num_parts=4)
    assert fault.value.reason is Reason.PART_ALREADY_SUBMITTED
    assert fault.value.field == "num_parts"


def test_ids_belong_to_the_identity_that_gave_them() -> None:
    table = Table()
    mine = table.admit("r", identity="me")
    theirs = table.admit("r", identity="them", num_parts=3)
    assert mine.prompt is not theirs.prompt
    assert table.table.request("me", "r") is mine
    assert table.table.request("", "r") is None
    assert table.table.prompt("them", "p") is theirs.prompt


def test_a_prompt_lives_as_long_as_one_of_its_requests_and_keeps_its_place() -> None:
    table = Table()
    first = table.admit("r1", parts=(0,))
    other = table.admit("r9", prompt_id="q", parts=(0,))
    second = table.admit("r2", parts=(1,))
    assert first.prompt is second.prompt
    assert first.prompt.order < other.prompt.order
    table.table.end_cancelled(first.parts[0], 1.0)
    assert table.table.prompt("", "p") is second.prompt
    table.table.end_cancelled(second.parts[0], 1.0)
    assert table.admit("r3").prompt.order > other.prompt.order


def test_a_caller_that_is_gone_is_told_nothing_and_its_parts_end() -> None:
    table = Table()
    request = table.admit(parts=(0, 1))
    table.caller.gone = True
    request.sink = None
    for part in request.parts:
        table.table.end_cancelled(part, 1.0)
    assert len(table.table) == 0
