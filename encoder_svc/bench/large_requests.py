"""Sends large requests from a process of its own: this one measures how soon *other* calls are answered.

Run as ``python -m encoder_svc.bench.large_requests``, it sends until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from time import monotonic
from types import TracebackType
from typing import Self

import uvloop

from encoder_client import ClientSettings, EncoderClient
from encoder_svc.bench.load import encode_one, together
from encoder_svc.bench.partner import end_partner
from encoder_svc.bench.photographs import Photographs, padded
from encoder_svc.errors import SetupError

IMAGE_SIZE = 56
"""The files hold a small picture: what is measured is what their bytes do, not what their forwards do."""
_BEGUN = "begun"


class LargeRequests:
    """Keeps large requests in flight, from entering this until :meth:`stop` or leaving it.

    Args:
        target: of the server.
        transports: by which rows are read.
        streams: requests at a time.
        nbytes: of the media of each.

    Raises:
        SetupError: the sender ended by itself.
    """

    def __init__(self, target: str, transports: tuple[str, ...], streams: int, nbytes: int) -> None:
        self._arguments = [target, ",".join(transports), str(streams), str(nbytes)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "encoder_svc.bench.large_requests", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            if self._read() != _BEGUN:
                raise SetupError("the sender of large requests did not begin")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        end_partner(self._process)

    def stop(self) -> float:
        """Lets it end what it has begun.

        Returns:
            Requests per second that were answered.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        return float(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SetupError("the sender of large requests ended by itself; what it said stands above")
        return line


async def _send(target: str, transports: tuple[str, ...], streams: int, nbytes: int) -> None:
    photographs = Photographs(IMAGE_SIZE)
    answered = 0
    goes_on = True

    async with EncoderClient(target, ClientSettings(transports=transports)) as client:

        async def caller() -> None:
            nonlocal answered
            while goes_on:
                await encode_one(client, padded(photographs.next(), nbytes))
                answered += 1

        async def watch() -> None:
            nonlocal goes_on
            await asyncio.to_thread(sys.stdin.read)
            goes_on = False

        await encode_one(client, padded(photographs.next(), nbytes))
        sys.stdout.write(f"{_BEGUN}\n")
        sys.stdout.flush()
        begun = monotonic()
        await together([watch(), *(caller() for _ in range(streams))])
    sys.stdout.write(json.dumps(answered / (monotonic() - begun)) + "\n")


def main() -> None:
    """Sends until there is no more to read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("transports")
    parser.add_argument("streams", type=int)
    parser.add_argument("nbytes", type=int)
    arguments = parser.parse_args()
    work = _send(arguments.target, tuple(arguments.transports.split(",")), arguments.streams, arguments.nbytes)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
