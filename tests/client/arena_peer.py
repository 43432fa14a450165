"""An arena whose slots hold their numbers, served by a process as an engine does it, and changed as a test says."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from encoder_client import EmbeddingPool
from encoder_client.checksums import RunningChecksum
from encoder_client.transports import Reader
from epd.encoder.v1.embedding_pb2 import Checksum, EmbeddingChunk, LeaseGrant, Locator
from tests.waiting import eventually

SLOT_BYTES = (2 << 20) + 12_346
"""Of a payload: more than two pieces of ZeroMQ's."""
PLACE_BYTES = 3 << 20
SLOTS = 4
BOOT_ID = "ab" * 16

PROGRAM = f"""
import sys
from pathlib import Path
from encoder_svc.engine.slot_places import SlotPlaces
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports.shared_memory import serve_by_shared_memory
from encoder_svc.transports.zeromq import serve_by_zeromq
from epd import slot_header

socket, boot_id, listen, host, curve_key, mooncake = sys.argv[1:]
arena = SharedMemory.create("arena", {SLOTS * PLACE_BYTES})
places = SlotPlaces()
for index in range({SLOTS}):
    places.add(index * {PLACE_BYTES}, {SLOT_BYTES})


def fill(index, generation):
    start = index * {PLACE_BYTES}
    arena.view[start + 64 : start + 64 + {SLOT_BYTES}] = bytes([16 * index + generation]) * {SLOT_BYTES}
    slot_header.open_slot(arena.view, start, generation, {SLOT_BYTES}, 0, bytes([index]) * 16)


broken = set()


def find(start):
    if start in broken:
        raise RuntimeError("as the test wants it")
    return places.nbytes_at(start)


for index in range({SLOTS}):
    fill(index, 1)
servers = [
    serve_by_shared_memory(arena, boot_id, Path(socket)),
    serve_by_zeromq(arena, find, listen, 0, host, Path(curve_key) if curve_key else None),
]
if mooncake:
    from encoder_svc.transports.mooncake import serve_by_mooncake

    servers.append(serve_by_mooncake(arena, host, "tcp", ""))
print(*(server.locator.SerializeToString().hex() for server in servers), flush=True)
for line in sys.stdin:
    command, *numbers = line.split()
    match command:
        case "close":
            slot_header.close_slot(arena.view, int(numbers[0]) * {PLACE_BYTES})
        case "fill":
            slot_header.close_slot(arena.view, int(numbers[0]) * {PLACE_BYTES})
            fill(*map(int, numbers))
        case "damage":
            arena.view[int(numbers[0]) * {PLACE_BYTES} + 64 + {SLOT_BYTES} // 2] ^= 1
        case "break":
            broken.add(int(numbers[0]) * {PLACE_BYTES})
        case "end":
            servers[1]._socket.context.term()
    print("done", flush=True)
"""


class ArenaPeer:
    """The process.

    Args:
        socket: where it hands out its arena.
        boot_id: what it calls itself.
        curve_key: file with a CURVE key pair, or empty.
        mooncake: serves by Mooncake, too.
        log: file that gets its standard error. None: this process's own.
        command: what runs its interpreter, such as in another network namespace.
    """

    def __init__(
        self,
        socket: Path,
        boot_id: str = BOOT_ID,
        curve_key: str = "",
        listen: str = "127.0.0.1",
        command: tuple[str, ...] = (),
        mooncake: bool = False,
        log: Path | None = None,
    ) -> None:
        self.boot_id = boot_id
        arguments = [str(socket), boot_id, listen, listen, curve_key, "mooncake" if mooncake else ""]
        with log.open("w") if log is not None else nullcontext() as errors:
            self.process = subprocess.Popen(
                [*command, sys.executable, "-c", PROGRAM, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        locators = [Locator.FromString(bytes.fromhex(text)) for text in self.process.stdout.readline().split()]
        self._locators = {locator.WhichOneof("location"): locator for locator in locators}

    def tell(self, command: str) -> None:
        """``close INDEX``, ``fill INDEX GENERATION``, or ``damage INDEX``; it has happened when this returns.

        ``break INDEX``: requests for it by ZeroMQ have a fault.
        """
        assert self.process.stdout is not None
        self._write(command)
        assert self.process.stdout.readline() == "done\n"

    def end_zeromq(self) -> None:
        """Has ZeroMQ's threads find that there is no ZeroMQ any more."""
        self._write("end")

    def locator(self, transport: str, index: int) -> Locator:
        """Where a slot is read."""
        locator = Locator()
        locator.CopyFrom(self._locators[transport])
        if transport == "mooncake":
            locator.mooncake.address += index * PLACE_BYTES
        else:
            getattr(locator, transport).slot_offset += index * PLACE_BYTES
        return locator

    def chunk(self, index: int, generation: int = 1) -> EmbeddingChunk:
        """What a reader needs to know of a slot."""
        chunk = EmbeddingChunk(nbytes=SLOT_BYTES, generation=generation, slot_key=bytes([index]) * 16)
        chunk.encoder.engine_boot_id = self.boot_id
        return chunk

    def stop(self) -> None:
        """Holds the process where it is, until it gets a SIGCONT."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def _write(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def arena_peer(
    folder: Path, boot_id: str = BOOT_ID, *, curve_key: str = "", mooncake: bool = False, log: Path | None = None
) -> Iterator[ArenaPeer]:
    """A peer whose socket is in a new folder."""
    peer = ArenaPeer(folder / "private" / "arena", boot_id, curve_key, mooncake=mooncake, log=log)
    try:
        yield peer
    finally:
        peer.close()


def payload_digest(index: int, generation: int = 1) -> bytes:
    """The SHA-256 of a slot's payload."""
    return hashlib.sha256(bytes([16 * index + generation]) * SLOT_BYTES).digest()


async def read(
    reader: Reader, pool: EmbeddingPool, chunk: EmbeddingChunk, locator: Locator, timeout: float = 60.0
) -> bytes:
    """Reads one slot, lets go of its memory, and gives the SHA-256 of what came."""
    slot = (await pool.reserve("prompt", [chunk.nbytes])).take(0)
    await reader.read(chunk, locator, LeaseGrant(), slot, RunningChecksum(Checksum()), timeout)
    return await asyncio.to_thread(lambda: hashlib.sha256(slot.view).digest())


async def let_go(pool: EmbeddingPool) -> None:
    """Nothing keeps a slot, once the loop has let go of what ended its read, and a thread of what it did for it."""

    def is_empty() -> bool:
        gc.collect()
        return pool.statistics.used == 0

    await eventually(is_empty)
