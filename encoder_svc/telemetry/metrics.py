"""The Prometheus metrics of the front."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from encoder_svc.errors import Reason, SetupError
from encoder_svc.runtime.parts import PartState
from epd.encoder.v1.encoder_service_pb2 import GetServerInfoResponse


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
        self.leases = self._gauge("leases", "Leases that are alive.")
        self.leased_bytes = self._gauge("leased_bytes", "Bytes of an arena in slots with a live lease.", "engine")
        self.loop_lag = self._gauge("loop_lag_seconds", "Greatest delay of the event loop in the last seconds.")

    def request_admitted(self) -> None:
        """See :class:`~encoder_svc.runtime.scheduler.Observer`."""
        self.admitted.inc()

    def request_refused(self, reason: Reason) -> None:
        """See :class:`~encoder_svc.runtime.scheduler.Observer`."""
        self.refused.labels(reason.value).inc()

    def part_ended(self, state: PartState, reason: Reason | None) -> None:
        """See :class:`~encoder_svc.runtime.scheduler.Observer`."""
        self.parts.labels(state.value, "" if reason is None else reason.value).inc()

    def observe(self, info: GetServerInfoResponse) -> None:
        """Sets the gauges. Called on the event loop now and then: the thread that serves metrics must not ask."""
        self.live_requests.set(info.load.requests)
        self.live_parts.clear()
        for state, count in info.load.parts.items():
            self.live_parts.labels(state).set(count)
        self.leases.set(info.load.leases)
        for engine in info.engines:
            self.leased_bytes.labels(str(engine.index)).set(engine.leased_bytes)
        self.loop_lag.set(info.load.loop_lag.ToNanoseconds() / 1e9)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"encoder_svc_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"encoder_svc_{name}", text, labels, registry=self.registry)


def serve_metrics(metrics: Metrics, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Serves the metrics over HTTP from a thread of its own.

    Returns:
        The port, a free one if 0 was asked for, and a function that stops serving.

    Raises:
        SetupError: the address cannot be listened on.
    """
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise SetupError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; give --metrics-listen another address"
        ) from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
