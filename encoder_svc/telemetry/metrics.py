"""The Prometheus metrics of the front."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from encoder_svc.errors import Reason
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.service import LoadFigures
from epd.encoder.v1.encoder_service_pb2 import GetServerInfoResponse

_STAGES = ("fetch", "queue", "prepare", "batch_wait", "forward", "stage")
_LOOKUPS = ("hit", "joined", "miss")

_SECONDS = tuple(base * 10.0**exponent for exponent in range(-4, 2) for base in (1, 2, 5))
_POWERS = tuple(float(1 << exponent) for exponent in range(17))


class Metrics:
    """The metric objects of one server. Whoever knows a fact is handed this and records it where it happens.

    Args:
        registry: what the metrics are registered with and served from.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.requests = self._counter("requests", "Calls that ended, by method and gRPC code.", "method", "code")
        self.admitted = self._counter("admitted", "Encode requests that were admitted.")
        self.refused = self._counter("refused", "Encode requests that were refused as a whole, by reason.", "reason")
        self.parts = self._counter("parts", "Parts that ended, by state, and by reason of failure.", "state", "reason")
        self.live_requests = self._gauge("live_requests", "Encode requests that have not completed.")
        self.live_parts = self._gauge("live_parts", "Parts that have not ended, by state.", "state")
        self.utilization = self._gauge(
            "utilization", "Share of time that engines are busy, plus what waits over what they hold at once."
        )
        self.patches = self._gauge(
            "patches", "Patches of parts that have not ended; mel frames count by their share of a batch."
        )
        self.leases = self._gauge("leases", "Leases that are alive.")
        self.subscriptions = self._gauge("subscriptions", "Named receivers that listen.")
        self.receiver_parts = self._gauge("receiver_parts", "Parts addressed to named receivers and not read.")
        self.loop_lag = self._gauge("loop_lag_seconds", "Greatest delay of the event loop in the last seconds.")
        self.part_seconds = self._histogram("part_seconds", "From a part's admission to its end.", _SECONDS, "state")
        self.stage_seconds = self._histogram("stage_seconds", "Time that items spent in a stage.", _SECONDS, "stage")
        self.batch_items = self._histogram("batch_items", "Items of a batch.", _POWERS[:9])
        self.batch_patches = self._histogram("batch_patches", "Patches of a batch.", _POWERS[4:])
        self.cache = self._counter("cache_lookups", "Contents that were looked for: hit, joined, or miss.", "result")
        self.arena_bytes = self._gauge("arena_bytes", "Bytes of an arena by what its slots are.", "engine", "state")
        self.batches = self._gauge("batches_in_flight", "Batches that an engine holds.", "engine")
        self.media_bytes = self._gauge("media_bytes", "Bytes of media that are held for parts.")
        # Looking a label up takes longer than counting.
        self._ready_parts = self.parts.labels(PartState.READY.value, "")
        self._ready_seconds = self.part_seconds.labels(PartState.READY.value)
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in _STAGES}
        self._lookups = {result: self.cache.labels(result) for result in _LOOKUPS}
        self.restarts = self._gauge("restarts", "How often processes were started again.", "process")

    def request_admitted(self) -> None:
        """See :class:`~encoder_svc.runtime.observer.Observer`."""
        self.admitted.inc()

    def request_refused(self, reason: Reason) -> None:
        """See :class:`~encoder_svc.runtime.observer.Observer`."""
        self.refused.labels(reason.value).inc()

    def part_ended(self, end: PartState, reason: Reason | None, seconds: float) -> None:
        """See :class:`~encoder_svc.runtime.observer.Observer`."""
        if end is PartState.READY:
            self._ready_parts.inc()
            self._ready_seconds.observe(seconds)
            return
        self.parts.labels(end.value, "" if reason is None else reason.value).inc()
        self.part_seconds.labels(end.value).observe(seconds)

    def stage_took(self, stage: str, seconds: float) -> None:
        """See :class:`~encoder_svc.runtime.observer.Observer`."""
        self._stages[stage].observe(seconds)

    def batch_ran(self, items: int, patches: int, forward_seconds: float, stage_seconds: float) -> None:
        """See :class:`~encoder_svc.runtime.observer.Observer`."""
        self.batch_items.observe(items)
        self.batch_patches.observe(patches)
        self._stages["forward"].observe(forward_seconds)
        self._stages["stage"].observe(stage_seconds)

    def cache_looked_up(self, result: str) -> None:
        """See :class:`~encoder_svc.runtime.observer.Observer`."""
        self._lookups[result].inc()

    def observe(self, info: GetServerInfoResponse, figures: LoadFigures) -> None:
        """Sets the gauges. Called on the event loop now and then: the thread that serves metrics must not ask."""
        self.utilization.set(figures.utilization)
        self.patches.set(figures.patches)
        self.live_requests.set(info.load.requests)
        self.live_parts.clear()
        for state, count in info.load.parts.items():
            self.live_parts.labels(state).set(count)
        self.leases.set(info.load.leases)
        self.subscriptions.set(info.load.subscriptions)
        self.receiver_parts.set(info.load.receiver_parts)
        self.media_bytes.set(info.load.media_bytes)
        self.restarts.labels("media worker").set(info.load.media_worker_restarts)
        self.restarts.labels("engine").set(sum(engine.restarts for engine in info.engines))
        for engine in info.engines:
            index = str(engine.index)
            self.batches.labels(index).set(engine.batches_in_flight)
            self.arena_bytes.labels(index, "reserved").set(engine.reserved_bytes)
            self.arena_bytes.labels(index, "leased").set(engine.leased_bytes)
            self.arena_bytes.labels(index, "cached").set(engine.cached_bytes)
        self.loop_lag.set(info.load.loop_lag.ToNanoseconds() / 1e9)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"encoder_svc_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"encoder_svc_{name}", text, labels, registry=self.registry, buckets=buckets)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"encoder_svc_{name}", text, labels, registry=self.registry)
