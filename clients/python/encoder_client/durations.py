"""Seconds as protobuf says them."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def duration(seconds: float | None) -> Duration | None:
    """A number of seconds. None stays unset."""
    if seconds is None:
        return None
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result
