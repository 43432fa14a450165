"""What carries the requests of a :class:`~encoder_client.transports.zeromq_peer.ZeroMqPeer`, and brings the answers."""

from __future__ import annotations

from typing import Protocol

HEARTBEAT_SECONDS, SILENCE_SECONDS = 5.0, 30.0
"""A host that is gone without a word is noticed. Any byte counts, and on a slow link a piece may take seconds."""

LOST = "the encoder is gone or unreachable"


class Answers(Protocol):
    """Whoever takes what a link brings: for each answer :meth:`begin`, then :meth:`took` until all its bytes came."""

    def begin(self, answer: bytes, nbytes: int, whole: bool) -> None:
        """An answer begins.

        Args:
            answer: its first frame.
            nbytes: length of its second frame; 0: it has none.
            whole: it has no third one.
        """
        ...

    @property
    def target(self) -> memoryview | None:
        """Where the next bytes of the second frame go, shape (rest of it,). None: nowhere."""
        ...

    def took(self, nbytes: int) -> None:
        """So many bytes, from its start on, were written to :attr:`target`."""
        ...

    def lost(self, fault: str) -> None:
        """The connection has ended, or was never made. Nothing comes any more."""
        ...


class ZeroMqLink(Protocol):
    """A connection to one engine's ZeroMQ socket, which belongs to one event loop."""

    def send(self, request: bytes) -> None:
        """Sends a request: at once, or once the connection is made.

        Raises:
            TransportError: it cannot be sent.
        """
        ...

    def look_again(self) -> None:
        """The target has changed: nothing is written any more to where it was."""
        ...

    def close(self) -> None:
        """Ends it; nobody is told. Idempotent."""
        ...
