"""By what an embedding is read: the client's preference, what reaches the encoder, and what failed there lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from encoder_client.transports import Reader
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, EncoderRef, Locator

SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds that a transport is avoided at an engine where it failed; doubled at each failure that follows another."""
MOST_REMEMBERED = 1024
"""Failures; of more, the oldest is forgotten."""


@dataclass(frozen=True)
class TransportStatistics:
    """What one transport has done for a client."""

    reads: int
    """Embeddings that it delivered whole, with their checksum where it needs one."""
    nbytes: int
    """Their bytes."""
    failures: int
    """Reads that it did not deliver, or delivered damaged."""
    avoided: int
    """Engines at which it is not the first choice for now, because it failed there."""


@dataclass
class _Failure:
    pause: float
    until: float


@dataclass
class _Count:
    reads: int = 0
    nbytes: int = 0
    failures: int = 0


class TransportChoice:
    """The transports of one client.

    A transport that failed at an engine goes behind the others there for a while: it is tried if they fail too, and
    again as usual when the while is over. Pure, with the time passed in.

    Args:
        readers: the transports by name, the preferred first.
    """

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        self.readers = dict(readers)
        self._counts = {name: _Count() for name in readers}
        self._failures: OrderedDict[tuple[str, str], _Failure] = OrderedDict()

    def order(self, names: Sequence[str], chunk: EmbeddingChunk, now: float) -> list[tuple[Reader, Locator]]:
        """The transports that may deliver a chunk, in the order in which they are to be tried.

        Args:
            names: which may be used, the preferred first. Those that this client does not have are passed over.
            chunk: READY.
            now: seconds, by the clock of all calls.
        """
        locators = {str(locator.WhichOneof("location")): locator for locator in chunk.locators}
        usable = [
            (reader, locators[name])
            for name in names
            if name in locators and (reader := self.readers.get(name)) is not None and reader.reaches(locators[name])
        ]
        return sorted(usable, key=lambda one: self._is_avoided(one[0].name, chunk.encoder, now))

    def delivered(self, name: str, chunk: EmbeddingChunk) -> None:
        """A transport delivered a chunk's bytes."""
        self._failures.pop(_key(name, chunk.encoder), None)
        count = self._counts[name]
        count.reads += 1
        count.nbytes += chunk.nbytes

    def failed(self, name: str, chunk: EmbeddingChunk, now: float) -> float:
        """A transport did not deliver a chunk's bytes.

        Returns:
            For how many seconds it is avoided at that engine.
        """
        self._counts[name].failures += 1
        key = _key(name, chunk.encoder)
        last = self._failures.pop(key, None)
        if last is not None and now < last.until:
            # One of several reads that failed together: one fault.
            self._failures[key] = last
            return last.until - now
        pause = SHORTEST_PAUSE if last is None else min(2 * last.pause, LONGEST_PAUSE)
        self._failures[key] = _Failure(pause, now + pause)
        if len(self._failures) > MOST_REMEMBERED:
            self._failures.popitem(last=False)
        return pause

    def statistics(self, now: float) -> dict[str, TransportStatistics]:
        """What each transport has done, by name."""
        return {
            name: TransportStatistics(
                count.reads,
                count.nbytes,
                count.failures,
                sum(of == name and now < failure.until for (of, _), failure in self._failures.items()),
            )
            for name, count in self._counts.items()
        }

    def close(self) -> None:
        """Closes the transports."""
        for reader in self.readers.values():
            reader.close()

    def _is_avoided(self, name: str, encoder: EncoderRef, now: float) -> bool:
        failure = self._failures.get(_key(name, encoder))
        return failure is not None and now < failure.until


def _key(name: str, encoder: EncoderRef) -> tuple[str, str]:
    return name, encoder.instance_id + encoder.engine_boot_id
