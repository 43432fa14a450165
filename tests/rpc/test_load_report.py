"""The load report: what gRPC's own balancers read, and that they heed it."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from encoder_svc.rpc.load_report import load_report
from encoder_svc.runtime.service import LoadFigures
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from tests.rpc.calls import SECONDS, calls_to, encode, encode_request, events_of, image, is_idle, ready_chunks, release
from tests.server_process import ServerProcess
from tests.waiting import eventually

WEIGHTED = json.dumps(
    {
        "loadBalancingConfig": [
            {"weighted_round_robin": {"blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s"}},
        ]
    }
)
"""Weights count from the first report on; by default they do so after 10 s."""


def orca_message() -> Any:
    """``xds.data.orca.v3.OrcaLoadReport``, as far as a server of ours fills it."""
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="xds.data.orca.v3", syntax="proto3")
    message = file.message_type.add(name="OrcaLoadReport")
    for name, number in (("cpu_utilization", 1), ("rps_fractional", 6), ("application_utilization", 9)):
        message.field.add(name=name, number=number, type="TYPE_DOUBLE", label="LABEL_OPTIONAL")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport"))


@pytest.mark.parametrize("figures", [LoadFigures(0.0, 0.001), LoadFigures(1.75, 812.5)])
def test_the_report_is_an_orca_message(figures: LoadFigures) -> None:
    report = orca_message().FromString(load_report(figures))
    assert report.application_utilization == figures.utilization
    assert report.rps_fractional == figures.parts_per_second
    assert report.cpu_utilization == 0
    assert math.isclose(len(report.SerializeToString()), len(load_report(figures)), abs_tol=9)


async def test_a_weighted_balancer_prefers_the_server_with_less_to_do(
    server: ServerProcess, small_server: ServerProcess
) -> None:
    names = {(await each.info()).encoder.instance_id: each for each in (server, small_server)}
    async with calls_to(server) as busy, calls_to(small_server) as calm:
        for stub in (busy, calm):
            await release(stub, *ready_chunks(await encode(stub, cache_policy=pb.CACHE_POLICY_USE)))
        # Both have work that waits for an engine, one of them ten times as much; what is cached is answered throughout.
        with server.held(server.engine()), small_server.held(small_server.engine()):
            calls = [
                stub.Encode(encode_request(*map(image, range(parts))), timeout=SECONDS)
                for stub, parts in ((busy, 20), (calm, 2))
            ]
            for call in calls:
                await call.read()
            targets = ",".join(each.target for each in names.values())
            options = [("grpc.service_config", WEIGHTED)]
            async with grpc.aio.insecure_channel(f"ipv4:{targets}", options=options) as channel:
                balanced: Any = EncoderServiceStub(channel)

                async def the_calm_one_gets_most() -> bool:
                    picked: Counter[str] = Counter()
                    for _ in range(20):
                        events = await encode(balanced, cache_policy=pb.CACHE_POLICY_USE, lease_ttl={"seconds": 1})
                        picked[events[0].accepted.encoder.instance_id] += 1
                    return sum(count for name, count in picked.items() if names[name] is small_server) >= 15

                await eventually(the_calm_one_gets_most)
        for stub, call in zip((busy, calm), calls, strict=True):
            await release(stub, *ready_chunks(await events_of(call)))
    await eventually(lambda: is_idle(server))
    await eventually(lambda: is_idle(small_server))
