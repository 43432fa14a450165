"""The resident memory of the processes that a load runs through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from encoder_svc.bench.service import Service, load_psutil
from encoder_svc.bench.statistics import slope

LEAST_POINTS = 8
"""A slope through fewer says nothing."""
Point = tuple[float, float]
"""Requests that had ended, and bytes of resident memory then."""


class MemoryRecord:
    """Measurements of one server's processes and of this one, its client."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._client = load_psutil().Process()
        self._points: dict[tuple[str, int], list[Point]] = defaultdict(list)

    def measure(self, requests: int) -> None:
        """Takes one measurement of each process.

        Args:
            requests: that had ended.
        """
        psutil = load_psutil()
        processes = {**self._service.processes(), "client": [self._client]}
        for role, members in processes.items():
            for number, process in enumerate(sorted(members, key=lambda one: one.pid)):
                name = role if number == 0 else f"{role} {number + 1}"
                try:
                    resident = process.memory_info().rss
                except psutil.Error:  # it ended just now
                    continue
                self._points[name, process.pid].append((float(requests), float(resident)))

    def lives(self) -> Mapping[str, Sequence[Sequence[Point]]]:
        """The measurements of each process by its role, one sequence for each life of it."""
        lives: dict[str, list[Sequence[Point]]] = defaultdict(list)
        for (name, _), points in self._points.items():
            lives[name].append(points)
        return lives

    def slopes(self, since: float) -> dict[str, float | None]:
        """Bytes per request of each process, from the request ``since`` on."""
        return {name: slope_since(lives, since) for name, lives in self.lives().items()}


def slope_since(lives: Sequence[Sequence[Point]], since: float) -> float | None:
    """The slope of the one life of a process that covers all requests from ``since`` on.

    Returns:
        None if it had more than one life then, since a new process first takes what it needs, or too few measurements.
    """
    lives = [life for life in lives if life[-1][0] >= since]
    if len(lives) != 1 or lives[0][0][0] >= since:
        return None
    late = [point for point in lives[0] if point[0] >= since]
    return slope(late) if len(late) >= LEAST_POINTS else None
