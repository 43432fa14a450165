"""One rule that decides whether a request may come in, charged by cost: parts, media bytes, and patches.

A part is charged from its admission to its end; its media bytes until they are not needed any more; its patches by an
estimate until it is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.parts import Part
from epd.encoder.v1.media_pb2 import Modality

_LONGEST_RETRY_SECONDS = 30.0
_SHORTEST_RETRY_SECONDS = 0.05
_FIRST_ESTIMATE_PATCHES = 1024
_ESTIMATE_WEIGHT = 0.1
"""Of the newest item in the mean of measured ones."""
_RATE_SECONDS = 5.0
"""The rate at which parts end is a mean over about so long."""


class Admission:
    """What is inside, and how much may be.

    Args:
        max_parts: parts that have not ended.
        max_bytes: media bytes that are held.
        max_patches: patches of parts that have not ended.
    """

    def __init__(self, max_parts: int, max_bytes: int, max_patches: int) -> None:
        self._max_parts = max_parts
        self._max_bytes = max_bytes
        self._max_patches = max_patches
        self.parts = 0
        self.media_bytes = 0
        self.patches = 0
        self._estimates: dict[int, float] = {}
        self._ends = 0.0
        self._ends_at = 0.0
        self._busy_ends = 0.0
        self._busy_seconds = 0.0
        self._busy_at = 0.0

    def estimate(self, modality: Modality) -> int:
        """Patches of an item that has not been measured: the mean of those that have."""
        return round(self._estimates.get(modality, _FIRST_ESTIMATE_PATCHES))

    def enter(self, media_bytes: int, patches: Sequence[int], now: float) -> None:
        """Charges a request.

        Args:
            media_bytes: of all its items.
            patches: of each of its items, as estimated.
            now: the time.

        Raises:
            ServiceError: there is no room for it now, with the time after which there may be; or there never is.
        """
        parts = len(patches)
        if parts > self._max_parts or media_bytes > self._max_bytes:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                f"{parts} items with {media_bytes} media bytes are more than the server ever holds "
                f"({self._max_parts} items, {self._max_bytes} bytes); send several requests under one prompt_id",
                field="items",
            )
        # An estimate may be wrong, so it never refuses a request that would be alone.
        excess = max(
            self._ends_needed(self.parts + parts, self._max_parts, self.parts),
            self._ends_needed(self.media_bytes + media_bytes, self._max_bytes, self.media_bytes),
            self._ends_needed(self.patches + sum(patches), self._max_patches, self.patches) if self.parts else 0.0,
        )
        if excess > 0:
            wait = excess / self._busy_rate(now) if self._busy_ends else 1.0
            raise ServiceError(
                Reason.ADMISSION_FULL,
                "the server holds as much work as it may; try again later or at another encoder",
                retry_after=min(max(wait, _SHORTEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS),
            )
        self._pass_busy_time(now)
        self.parts += parts
        self.media_bytes += media_bytes
        self.patches += sum(patches)

    def leave(self, media_bytes: int, patches: Sequence[int]) -> None:
        """Takes a charge back: the request did not come in."""
        self.parts -= len(patches)
        self.media_bytes -= media_bytes
        self.patches -= sum(patches)

    def media_fetched(self, part: Part, nbytes: int) -> None:
        """A part's media have come from elsewhere, after its admission.

        Raises:
            ServiceError: there is no room for them now.
        """
        if self.media_bytes + nbytes > self._max_bytes:
            raise ServiceError(
                Reason.ADMISSION_FULL,
                "the server holds as many media bytes as it may; try again later or at another encoder",
                retry_after=1.0,
            )
        part.media_bytes += nbytes
        self.media_bytes += nbytes

    def media_dropped(self, part: Part) -> None:
        """A part's media are not needed any more. Idempotent."""
        self.media_bytes -= part.media_bytes
        part.media_bytes = 0

    def measured(self, part: Part, patches: int) -> None:
        """The estimate is replaced by what the item really costs."""
        modality = part.item.modality
        estimate = self._estimates.get(modality, float(patches))
        self._estimates[modality] = estimate + _ESTIMATE_WEIGHT * (patches - estimate)
        self.patches += patches - part.patches
        part.patches = patches

    def ended(self, part: Part, now: float) -> None:
        """A part has had its end."""
        self.media_dropped(part)
        self._pass_busy_time(now)
        self._busy_ends += 1
        self.parts -= 1
        self.patches -= part.patches
        self._ends = self._decayed(now) + 1
        self._ends_at = now

    def rate(self, now: float) -> float:
        """Parts that end in a second, as a mean over the last ones. Never 0."""
        return max(self._decayed(now) / _RATE_SECONDS, 1e-3)

    def _busy_rate(self, now: float) -> float:
        """Parts that end in a second while there are any: a pause without work is no slowness. Never 0."""
        self._pass_busy_time(now)
        return max(self._busy_ends / max(self._busy_seconds, 1e-3), 1e-3)

    def _pass_busy_time(self, now: float) -> None:
        if self.parts:
            kept = math.exp((self._busy_at - now) / _RATE_SECONDS)
            # Both decay alike, so that the first seconds give a true rate too.
            self._busy_ends *= kept
            self._busy_seconds = self._busy_seconds * kept + _RATE_SECONDS * (1 - kept)
        self._busy_at = now

    def _ends_needed(self, wanted: int, limit: int, held: int) -> float:
        """How many parts of the mean size must end before ``wanted`` fits."""
        if wanted <= limit:
            return 0.0
        return (wanted - limit) * max(self.parts, 1) / max(held, 1)

    def _decayed(self, now: float) -> float:
        return self._ends * math.exp((self._ends_at - now) / _RATE_SECONDS)
