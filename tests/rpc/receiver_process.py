"""A receiver that encodes a file, begins to read the embedding, says so, and never ends. It is there to be killed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import grpc

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from epd.encoder.v1.media_pb2 import MediaItem, Modality


def main(target: str, file: Path) -> None:
    item = MediaItem(modality=Modality.MODALITY_IMAGE, data=file.read_bytes())
    with grpc.insecure_channel(target) as channel:
        stub: Any = EncoderServiceStub(channel)
        request = pb.EncodeRequest(items=[item], skip_layout=True, lease_ttl={"seconds": 10})
        chunks = [event.chunk for response in stub.Encode(request) for event in response.events if event.chunk.leases]
        pieces = stub.Fetch(pb.FetchRequest(lease_id=chunks[0].leases[0].lease_id))
        next(pieces)
        print("reading", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
