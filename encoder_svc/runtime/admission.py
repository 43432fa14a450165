"""One rule that decides whether a request may come in, charged by cost: parts that have not ended, and media bytes."""

from __future__ import annotations

from encoder_svc.errors import Reason, ServiceError

_LONGEST_RETRY_SECONDS = 30.0
_SHORTEST_RETRY_SECONDS = 0.05


class Admission:
    """What is inside, and how much may be.

    Args:
        max_parts: parts that have not ended.
        max_bytes: media bytes of parts that have not been prepared.
    """

    def __init__(self, max_parts: int, max_bytes: int) -> None:
        self._max_parts = max_parts
        self._max_bytes = max_bytes
        self.parts = 0
        self.media_bytes = 0
        self._seconds_per_part = 0.05
        self._last_end: float | None = None

    def enter(self, parts: int, media_bytes: int) -> None:
        """Charges a request.

        Raises:
            ServiceError: there is no room for it now, with the time after which there may be; or there never is.
        """
        if parts > self._max_parts or media_bytes > self._max_bytes:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                f"{parts} items with {media_bytes} media bytes are more than the server ever "
                f"holds ({self._max_parts} items, {self._max_bytes} bytes); send several requests under one prompt_id",
                field="items",
            )
        too_many = self.parts + parts - self._max_parts
        too_large = self.media_bytes + media_bytes > self._max_bytes
        if too_many > 0 or too_large:
            # Parts end at a rate that is measured: as many as are too many must end first.
            wait = self._seconds_per_part * max(too_many, 1)
            raise ServiceError(
                Reason.ADMISSION_FULL,
                "the server holds as much work as it may; try again later or at another encoder",
                retry_after=min(max(wait, _SHORTEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS),
            )
        self.parts += parts
        self.media_bytes += media_bytes

    def leave(self, parts: int, media_bytes: int) -> None:
        """Takes a charge back: the request did not come in."""
        self.parts -= parts
        self.media_bytes -= media_bytes

    def part_ended(self, now: float) -> None:
        """A part has had its end."""
        self.parts -= 1
        if self._last_end is not None:
            # A pause without work is no slowness: only gaps while others wait count.
            gap = min(now - self._last_end, 1.0)
            self._seconds_per_part += 0.1 * (gap - self._seconds_per_part)
        self._last_end = now if self.parts else None

    def media_dropped(self, nbytes: int) -> None:
        """Media bytes are not needed any more."""
        self.media_bytes -= nbytes
