"""The proxy before an engine, as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.vllm.engine import Engine


@contextmanager
def proxy(engine: Engine, encoders: str, *options: str) -> Iterator[int]:
    """Its port.

    Args:
        engine: that it stands before.
        encoders: with commas between them.
        options: of the command.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "encoder_client", "proxy", "--listen=127.0.0.1:0", f"--encoders={encoders}",
         f"--vllm=http://127.0.0.1:{engine.port}", *options],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().rpartition(":")[2])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
