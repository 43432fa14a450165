"""The calls of the encoder, typed: generated stubs carry no types."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc

from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub


_FETCH = "/epd.encoder.v1.EncoderService/Fetch"
