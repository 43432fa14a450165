"""What a worker keeps of prompts, asked for or not, and what it gives back."""

from __future__ import annotations

from typing import cast

import grpc

from encoder_client import EncoderClient, EncoderError, Layout, LeaseRevoked, PartCancelled, PartFailed, Ready, Synced
from encoder_client.worker import Inbox
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from tests.client import chunks

CLIENT = cast("EncoderClient", object())
FAULT = EncoderError(grpc.StatusCode.UNAVAILABLE, "own words")


def ready(prompt_id: str = "p", part_idx: int = 0, request_id: str = "r") -> EmbeddingChunk:
    chunk = chunks.ready(chunks.rows(), part_idx, num_parts=8)
    chunk.prompt_id, chunk.request_id = prompt_id, request_id
    return chunk


def given_back(inbox: Inbox, chunk: EmbeddingChunk) -> list[str]:
    """The requests of what nobody will read once a READY part has arrived."""
    return [arrival.chunk.request_id for arrival in inbox.take(CLIENT, Ready(chunk))]


def test_what_came_before_the_question_is_there_when_it_is_asked() -> None:
    inbox = Inbox(4)
    chunk = ready()
    inbox.take(CLIENT, Layout(chunk))
    assert given_back(inbox, chunk) == []
    parts = inbox.open("p")
    assert (list(parts.layouts), list(parts.ready)) == ([0], [0])
    assert len(inbox) == 1


def test_a_part_that_comes_again_takes_the_place_of_the_one_that_nobody_has_read() -> None:
    inbox = Inbox(4)
    parts = inbox.open("p")
    assert given_back(inbox, ready(request_id="first")) == []
    assert given_back(inbox, ready(request_id="second")) == ["first"]
    assert parts.ready[0].chunk.request_id == "second"


def test_a_fault_of_one_try_does_not_hurt_the_next() -> None:
    inbox = Inbox(4)
    parts = inbox.open("p")
    inbox.take(CLIENT, PartFailed("p", "first", 0, FAULT))
    assert parts.faults == {0: FAULT}
    given_back(inbox, ready(request_id="second"))
    assert parts.faults == {}
    inbox.take(CLIENT, PartCancelled("p", "first", 0))
    assert (list(parts.ready), parts.faults) == ([0], {})


def test_a_lease_that_is_revoked_takes_its_part_along() -> None:
    inbox = Inbox(4)
    parts = inbox.open("p")
    given_back(inbox, ready())
    inbox.take(CLIENT, LeaseRevoked("p", "r", 0, FAULT))
    assert (parts.ready, parts.faults) == ({}, {0: FAULT})


def test_what_arrives_after_the_answer_is_given_back() -> None:
    inbox = Inbox(4)
    parts = inbox.open("p")
    given_back(inbox, ready(part_idx=1, request_id="unread"))
    assert [arrival.chunk.request_id for arrival in inbox.close(parts)] == ["unread"]
    assert given_back(inbox, ready(request_id="late")) == ["late"]
    assert inbox.take(CLIENT, Synced(3)) == []


def test_prompts_that_nobody_asks_for_are_bounded_and_the_oldest_gives_way() -> None:
    inbox = Inbox(2)
    asked = inbox.open("asked")
    assert not inbox.full
    for number in range(2):
        assert given_back(inbox, ready(f"early-{number}", request_id=str(number))) == []
    assert given_back(inbox, ready("early-2", request_id="2")) == ["0"]
    assert given_back(inbox, ready("asked", request_id="mine")) == []
    assert list(asked.ready) == [0]
    inbox.open("early-2")
    assert inbox.full
