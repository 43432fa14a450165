"""Whether an encoder gets calls, by what its calls and its polls have shown. Pure: time is passed in.

::

    UNKNOWN ──poll──► SERVING ──failures──► EJECTED ──time, then a poll──► PROBING ──a call ends well──► SERVING
                                               ▲                              │
                                               └────────── it fails ──────────┘

An encoder that says of itself that it does not serve (it starts, or drains) is UNKNOWN until it says otherwise: nothing
is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from encoder_client.fleet.failure_kinds import FailureKind

FAULTS_TO_EJECT = 3
"""Failures in a row, of polls or of parts, after which an encoder is ejected. A lost connection does it at once."""
FIRST_EJECTION, LONGEST_EJECTION = 1.0, 30.0
"""Seconds. Each ejection that follows a failed probe takes twice as long as the one before."""
SHORTEST_PAUSE = 0.05
"""Seconds that an encoder is not asked after it refused, if it names none."""


class HealthState(Enum):
    """What is thought of an encoder."""

    UNKNOWN = "unknown"
    """No poll was answered yet, or it said that it does not serve. It gets no calls."""
    SERVING = "serving"
    """It gets calls."""
    EJECTED = "ejected"
    """It failed. It gets no calls until its time is over and a poll is answered."""
    PROBING = "probing"
    """It gets one call, to see."""


ALLOWED = {
    HealthState.UNKNOWN: {HealthState.SERVING, HealthState.EJECTED},
    HealthState.SERVING: {HealthState.UNKNOWN, HealthState.EJECTED},
    HealthState.EJECTED: {HealthState.UNKNOWN, HealthState.PROBING},
    HealthState.PROBING: {HealthState.UNKNOWN, HealthState.SERVING, HealthState.EJECTED},
}


@dataclass
class EncoderHealth:
    """The health of one encoder, as one client sees it."""

    state: HealthState = HealthState.UNKNOWN
    ejections: int = 0
    """In a row, without a call that ended well between them."""
    _faults: int = 0
    _ejected_until: float = 0.0
    _busy_until: float = 0.0
    _probes: int = 0

    def available(self, now: float) -> bool:
        """It may get a call now."""
        if now < self._busy_until:
            return False
        return self.state is HealthState.SERVING or (self.state is HealthState.PROBING and not self._probes)

    def available_at(self) -> float | None:
        """When it may get a call again, if nothing else is known until then. None: only a poll or a call can tell."""
        return self._busy_until if self.state in {HealthState.SERVING, HealthState.PROBING} else None

    def began(self) -> None:
        """A call goes to it."""
        if self.state is HealthState.PROBING:
            self._probes += 1

    def left(self) -> None:
        """A call ended without telling anything: its caller left."""
        self._probes = 0

    def succeeded(self) -> None:
        """A call, or a part of one, ended as it should, be it with a refusal of bad input."""
        self._faults = self._probes = 0
        if self.state is HealthState.PROBING:
            self._move(HealthState.SERVING)
        if self.state is HealthState.SERVING:
            self.ejections = 0

    def failed(self, kind: FailureKind, retry_after: float | None, now: float) -> None:
        """A call, or a part of one, failed.

        Args:
            kind: what the failure means.
            retry_after: seconds that the encoder asks to be left alone; None if it does not say.
            now: the time in seconds.
        """
        match kind:
            case FailureKind.BUSY:
                self._probes = 0
                self._busy_until = max(self._busy_until, now + max(retry_after or 0.0, SHORTEST_PAUSE))
            case FailureKind.LOST:
                self._eject(now)
            case FailureKind.FAULT:
                self._fault(now)
            case FailureKind.ELSEWHERE | FailureKind.FINAL:
                self.succeeded()

    def poll_succeeded(self, serving: bool, now: float) -> None:
        """A poll was answered.

        Args:
            serving: it says that it takes requests.
            now: the time in seconds.
        """
        if not serving:
            self._faults = self._probes = 0
            if self.state is not HealthState.UNKNOWN:
                self._move(HealthState.UNKNOWN)
        elif self.state is HealthState.UNKNOWN:
            self._move(HealthState.SERVING)
        elif self.state is HealthState.EJECTED and now >= self._ejected_until:
            self._move(HealthState.PROBING)

    def poll_failed(self, now: float) -> None:
        """A poll was not answered in time."""
        self._fault(now)

    def _fault(self, now: float) -> None:
        self._faults += 1
        if self.state is HealthState.PROBING or self._faults >= FAULTS_TO_EJECT:
            self._eject(now)

    def _eject(self, now: float) -> None:
        self._faults = self._probes = 0
        if self.state is HealthState.EJECTED:
            return  # other calls that were under way tell the same failure
        self._ejected_until = now + min(FIRST_EJECTION * 2**self.ejections, LONGEST_EJECTION)
        self.ejections += 1
        self._move(HealthState.EJECTED)

    def _move(self, state: HealthState) -> None:
        assert state in ALLOWED[self.state], f"{self.state} cannot become {state}"
        self.state = state
