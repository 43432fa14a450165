"""Messages that are no serialised message of their call's type.

Left to gRPC, such a call ends as INTERNAL or UNKNOWN, with a traceback in the server's log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import DecodeError

DAMAGED: Final[Any] = object()
"""What a handler has in the place of such a message."""
DAMAGED_TEXT = "the message is no serialised message of this call's type"


def tolerant(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserialiser that answers :data:`DAMAGED` where another raises."""

    def deserialise(wire: bytes) -> Any:
        try:
            return parse(wire)
        except DecodeError:
            return DAMAGED

    return deserialise
