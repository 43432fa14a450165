"""The bounds that figures must keep, on two CPU cores with client and server on them, with a ``small`` Qwen2.5-VL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from encoder_svc.bench.result import FloorCheck


@dataclass(frozen=True)
class Floor:
    """A bound."""

    relation: Literal["at least", "at most"]
    bound: float

    def check(self, figure: str, value: float | None) -> FloorCheck:
        """Whether a figure keeps it; what was not measured does not."""
        met = value is not None and (value >= self.bound if self.relation == "at least" else value <= self.bound)
        return FloorCheck(figure=figure, relation=self.relation, bound=self.bound, value=value, met=met)


THROUGHPUT_RATIO = {
    ("bfloat16", 224, 16): Floor("at least", 1.8),
    ("bfloat16", 448, 16): Floor("at least", 1.25),
    ("float32", 224, 16): Floor("at least", 1.25),
    ("float32", 56, 32): Floor("at least", 3.0),
}
"""By number type, side of the image in pixels, and requests at a time."""
FIXED_OVERHEAD_P50_MS = Floor("at most", 3.5)
CACHED_P50_MS = Floor("at most", 2.0)
CACHED_REQUESTS_PER_SECOND = Floor("at least", 900.0)
CACHED_CONCURRENCY = 32
FAIRNESS_RATIO = Floor("at most", 3.0)
BATCHING_GAIN = Floor("at least", 0.97)
RSS_SLOPE_BYTES_PER_REQUEST = Floor("at most", 200.0)
RSS_REQUESTS = 2000
"""Fewer requests tell nothing of memory: what a process takes once is then larger than what it would leak."""
TRANSPORT_RATIO = {
    ("mooncake", 1 << 20): Floor("at least", 0.8),
    ("mooncake", 8 << 20): Floor("at least", 0.88),
    ("mooncake", 64 << 20): Floor("at least", 0.88),
    ("zeromq", 1 << 20): Floor("at least", 0.6),
    ("zeromq", 8 << 20): Floor("at least", 0.6),
    ("zeromq", 64 << 20): Floor("at least", 0.6),
    ("shared_memory", 1 << 20): Floor("at least", 0.85),
    ("shared_memory", 8 << 20): Floor("at least", 0.85),
    ("shared_memory", 64 << 20): Floor("at least", 0.85),
    ("inline", 8 << 20): Floor("at least", 0.8),
}
"""By transport and bytes of an embedding, to the raw loop."""
ZEROMQ_OVER_ONE_FRAME = Floor("at least", 1.0)
ONE_FRAME_BYTES = 8 << 20
"""From here on."""
IN_PLACE_MILLISECONDS = Floor("at most", 0.05)
INLINE_GIGABYTES_PER_SECOND = Floor("at least", 0.8)
INLINE_BYTES = 8 << 20
NONE_LEFT = Floor("at most", 0.0)
RECOVERY_SECONDS = Floor("at most", 10.0)
RPC_BESIDE_FORWARD_P99_MS = Floor("at most", 15.0)
RPC_BESIDE_STREAMS_P99_MS = Floor("at most", 50.0)
