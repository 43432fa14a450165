"""The load that a server reports with each call, so that gRPC's own balancers can weigh it.

It is ``xds.data.orca.v3.OrcaLoadReport`` (Open Request Cost Aggregation), of which two fields are set, both doubles: 6,
``rps_fractional``, and 9, ``application_utilization``. ``weighted_round_robin`` gives a server the weight of its rate
over its utilisation.
"""

from __future__ import annotations

import struct

from encoder_svc.runtime.service import LoadFigures

LOAD_REPORT_KEY = "endpoint-load-metrics-bin"
"""The trailing metadata in which gRPC looks for the report."""

_FIXED64 = 1
_RPS_FRACTIONAL = 6
_APPLICATION_UTILIZATION = 9


def load_report(figures: LoadFigures) -> bytes:
    """The serialised report."""
    return _double(_RPS_FRACTIONAL, figures.parts_per_second) + _double(_APPLICATION_UTILIZATION, figures.utilization)


def _double(field: int, value: float) -> bytes:
    return struct.pack("<Bd", field << 3 | _FIXED64, value)
