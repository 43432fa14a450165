"""What a receiver sees over several connections, whatever of it was told before."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from encoder_client import Layout, LeaseRevoked, PartCancelled, PartFailed, Ready, SubscriptionEvent, Synced
from encoder_client.events import layout_of
from encoder_client.subscriptions.received_parts import ReceivedParts
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from tests.client import chunks

RECEIVER = "lm"


def ready(part_idx: int = 0, lease: bytes = bytes(16)) -> EmbeddingChunk:
    """A READY chunk with a lease of the receiver."""
    chunk = chunks.ready(chunks.rows(), part_idx, num_parts=100)
    chunk.leases[0].receiver_id, chunk.leases[0].lease_id = RECEIVER, lease
    return chunk


def told(event: EmbeddingChunk | str, part_idx: int = 0) -> pb.SubscribeResponse:
    """A message of a subscription."""
    chunk = ready(part_idx)
    names: dict[str, Any] = {"prompt_id": chunk.prompt_id, "request_id": chunk.request_id, "part_idx": part_idx}
    match event:
        case EmbeddingChunk():
            return pb.SubscribeResponse(chunk=event)
        case "failed":
            return pb.SubscribeResponse(part_failed=pb.PartFailed(**names, status={"code": 14, "message": "own words"}))
        case "cancelled":
            return pb.SubscribeResponse(part_cancelled=pb.PartCancelled(**names))
        case "revoked":
            return pb.SubscribeResponse(lease_revoked=pb.LeaseRevoked(**names, lease_id=bytes(16)))
        case _:
            return pb.SubscribeResponse(synced=pb.Synced(events=part_idx))


def words(parts: ReceivedParts, *messages: pb.SubscribeResponse) -> list[str]:
    """What is new in messages."""
    return [word_of(event) for message in messages for event in parts.take(message)]


def word_of(event: SubscriptionEvent) -> str:
    match event:
        case Layout(chunk):
            return f"layout {chunk.part_idx}"
        case Ready(chunk):
            return f"ready {chunk.part_idx}"
        case PartFailed():
            return f"{event.error.code.name} {event.part_idx}"
        case PartCancelled():
            return f"cancelled {event.part_idx}"
        case LeaseRevoked():
            return f"revoked {event.part_idx}"
        case Synced():
            return "synced"


def new() -> ReceivedParts:
    parts = ReceivedParts(RECEIVER, b"")
    parts.connected()
    return parts


def test_every_ready_has_a_layout_before_it() -> None:
    parts = new()
    assert words(parts, told(ready()), told("synced")) == ["layout 0", "ready 0", "synced"]
    second = ready(1, b"1" * 16)
    assert words(parts, told(layout_of(second)), told(second)) == ["layout 1", "ready 1"]


def test_what_comes_again_after_a_lost_connection_is_not_seen_again() -> None:
    parts = new()
    layout = layout_of(ready(1))
    assert len(words(parts, told("synced"), told(ready()), told(layout), told("failed", 2), told("cancelled", 3))) == 6
    parts.connected()
    again = (told(ready()), told(layout), told("failed", 2), told("cancelled", 3), told("synced"))
    assert words(parts, *again) == ["synced"]


def test_what_happened_while_nobody_listened_is_seen() -> None:
    parts = new()
    layouts = [layout_of(ready(part)) for part in range(3)]
    words(parts, told("synced"), *map(told, layouts))
    parts.connected()
    missed = (told(ready(0)), told("failed", 1), told("revoked", 2), told("synced"))
    assert words(parts, *missed) == ["ready 0", "UNAVAILABLE 1", "revoked 2", "synced"]


def test_a_part_that_the_encoder_does_not_name_any_more_fails() -> None:
    parts = new()
    words(parts, told("synced"), told(layout_of(ready(0))), told(layout_of(ready(1))))
    parts.connected()
    assert words(parts, told(layout_of(ready(1))), told("synced")) == ["UNAVAILABLE 0", "synced"]


def test_a_request_id_that_is_used_again_later_is_a_new_part() -> None:
    parts = new()
    assert words(parts, told("synced"), told("failed"), told("failed")) == ["synced", "UNAVAILABLE 0", "UNAVAILABLE 0"]


def test_a_chunk_that_must_not_be_used_fails_its_part_and_is_given_back() -> None:
    parts = ReceivedParts(RECEIVER, b"\x01" * 32)
    parts.connected()
    bad = ready()
    assert words(parts, told(bad)) == ["DATA_LOSS 0"]
    assert parts.refused == [bad]
    foreign = ready(1)
    foreign.leases[0].receiver_id = "other"
    assert words(parts, told(foreign)) == ["DATA_LOSS 1"]
    assert words(parts, told("synced")) == ["synced"]


SEEN = {
    "layout": ["layout"],
    "ready": ["layout", "ready"],
    "failed": ["UNAVAILABLE"],
    "cancelled": ["cancelled"],
}


@given(states=st.lists(st.sampled_from(sorted(SEEN)), min_size=1, max_size=8), lost=st.lists(st.integers(0, 40)))
def test_over_lost_connections_each_part_is_seen_from_layout_to_end_once(states: list[str], lost: list[int]) -> None:
    """The encoder is a list of newest states; the connection breaks after so many messages, again and again."""
    parts = ReceivedParts(RECEIVER, b"")
    seen: list[str] = []
    messages = [message(state, index) for index, state in enumerate(states)]
    for cut in [*lost, len(messages) + 1]:
        parts.connected()
        seen += words(parts, *[*messages, told("synced")][:cut])
    for index, state in enumerate(states):
        assert [word.split()[0] for word in seen if word.endswith(f" {index}")] == SEEN[state]


def message(state: str, index: int) -> pb.SubscribeResponse:
    """How an encoder tells a part's newest state."""
    chunk = ready(index, bytes([index]) * 16)
    return told({"layout": layout_of(chunk), "ready": chunk}.get(state, state), index)
