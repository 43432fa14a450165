"""What travels between a ``ZeroMqLocator``'s socket and its readers; docs/contract.md publishes it.

A reader is a DEALER. It sends requests, each one frame of 64 bytes, for pieces of at most 1 MiB::

    offset  size  field
         0     8  magic, ASCII "EPDREAD1"
         8     8  number: names the request, as the reader likes
        16    16  slot key
        32     8  offset of the slot's header, in bytes from the start of the arena
        40     8  generation of the slot
        48     8  offset of the piece, in bytes from the start of the payload
        56     8  length of the piece, in bytes, from 1 to 1 MiB

Each is answered, in any order, by a frame of 40 bytes and, where the state is 0, by a second one: the bytes. ::

    offset  size  field
         0     8  magic, ASCII "EPDDATA1"
         8     8  number, as in the request
        16     8  offset of the piece
        24     8  length of the piece
        32     4  state: 0 here it is; 1 the slot is not open; 2 the piece is not inside the slot
        36     4  zero

All numbers are little-endian. A request that is not of this form is not answered. At most 16 answers wait for a reader;
more are dropped, so a reader asks for the next piece when one has come.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

PIECE_BYTES = 1 << 20
MOST_ANSWERS = 16
"""That wait for one reader."""

_REQUEST = struct.Struct("<8sQ16sQQQQ")
_REQUEST_MAGIC = b"EPDREAD1"
_ANSWER = struct.Struct("<8sQQQIxxxx")
_ANSWER_MAGIC = b"EPDDATA1"
REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size
assert (REQUEST_BYTES, ANSWER_BYTES) == (64, 40)


class State(IntEnum):
    """What an answer says."""

    OK = 0
    """The bytes follow."""
    CLOSED = 1
    """The slot is not what it was: its lease has ended."""
    OUTSIDE = 2
    """The piece is not inside the slot, or too large."""


class Request(NamedTuple):
    """One piece that is asked for."""

    number: int
    key: bytes
    slot_offset: int
    generation: int
    offset: int
    length: int


class Answer(NamedTuple):
    """The first frame of an answer."""

    number: int
    offset: int
    length: int
    state: int


def write_request(request: Request) -> bytes:
    """The frame of a request."""
    return _REQUEST.pack(_REQUEST_MAGIC, *request)


def parse_request(frame: bytes) -> Request | None:
    """The request that a frame holds; None: it is none."""
    if len(frame) != REQUEST_BYTES or not frame.startswith(_REQUEST_MAGIC):
        return None
    return Request(*_REQUEST.unpack(frame)[1:])


def write_answer(request: Request, state: State) -> bytes:
    """The first frame of the answer to a request."""
    return _ANSWER.pack(_ANSWER_MAGIC, request.number, request.offset, request.length, state)


def parse_answer(frame: bytes) -> Answer | None:
    """The answer that a frame holds; None: it is none."""
    if len(frame) != ANSWER_BYTES or not frame.startswith(_ANSWER_MAGIC):
        return None
    return Answer(*_ANSWER.unpack(frame)[1:])
