"""Lets other processes of the host open embeddings of a pool, by handles (:mod:`encoder_client.pool.embedding_handle`).

The rights are those of files: the socket (0600) lies in a folder of its own (0700), so only processes of the same user
get that far; then the token of a handle decides. A process that was given the descriptor can read the whole pool.
"""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import logging
import secrets
import shutil
import socket
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from encoder_client.embedding import Embedding
from encoder_client.errors import HandleError
from encoder_client.pool.embedding_handle import FULL, GONE, GRANTED, HELLO, EmbeddingHandle
from encoder_client.pool.embedding_pool import EmbeddingPool
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

HELLO_SECONDS = 5.0
"""In which whoever connects must have said what it wants."""
MOST_UNDECIDED = 64
"""Connections that have not said yet what they want; others are closed."""
_PAUSE_SECONDS = 0.1
"""After a connection could not be taken since the process has too many files open."""

logger = logging.getLogger("encoder_client")

_Memory = ctypes.Array[ctypes.c_char]


@dataclass(frozen=True)
class _Shared:
    token: bytes = field(repr=False)
    memory: weakref.ref[_Memory]


class PoolSharing:
    """Serves the embeddings of one pool to other processes, in the event loop of the pool.

    A handle does not keep its embedding: whoever shares it does, until the other process has opened it. From then on
    that process holds the memory; it comes back to the pool when that has let go of it or has died. Leaving the context
    ends nobody's hold; only no new ones are taken.

    Args:
        pool: on Linux.
        max_holds: embeddings that other processes may have open at once.

    Example:
        >>> async with PoolSharing(pool) as sharing:
        ...     queue.put(sharing.share(embedding).to_bytes())
        >>> # in the other process
        >>> embedding = EmbeddingHandle.from_bytes(queue.get()).open()
    """

    def __init__(self, pool: EmbeddingPool, *, max_holds: int = 1024) -> None:
        if pool.arena.descriptor < 0:
            raise HandleError("this system has no anonymous files (memfd): its pools cannot be shared")
        self._pool = pool
        self._max_holds = max_holds
        self._id = secrets.token_bytes(16)
        self._shared: dict[int, _Shared] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._holds = 0
        self._folder: Path | None = None
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    @property
    def holds(self) -> int:
        """Embeddings that other processes have open."""
        return self._holds

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="encoder-pool-"))  # made with 0700
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(str(self._folder / "socket"))
            (self._folder / "socket").chmod(0o600)
            self._socket.listen()
        except OSError:
            self._close()
            raise
        self._accepting = asyncio.create_task(self._accept(self._socket))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._close()

    def share(self, embedding: Embedding) -> EmbeddingHandle:
        """Makes a handle. The same embedding has the same handle. Can be called from any thread.

        Raises:
            HandleError: it does not lie in this pool, or nothing is shared now.
            ValueError: it was released.
        """
        if self._folder is None:
            raise HandleError("handles are made inside `async with` only")
        memory = embedding.slot.memory
        offset = embedding.slot.address - self._pool.address
        if not 0 <= offset <= self._pool.capacity - len(memory):
            raise HandleError("the embedding does not lie in this pool; read it by a client that has the pool")
        known = self._shared.get(offset)
        if known is None or known.memory() is not memory:
            known = _Shared(secrets.token_bytes(16), weakref.ref(memory, lambda _: self._shared.pop(offset, None)))
            self._shared[offset] = known
        chunk = EmbeddingChunk()
        chunk.CopyFrom(embedding.chunk)
        for name in ("leases", "locators", "slot_key"):
            chunk.ClearField(name)
        return EmbeddingHandle(self._id, known.token, offset, len(memory), str(self._folder / "socket"), chunk)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                logger.warning("another process cannot connect to the pool: %s", error.strerror)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._connections) < self._holds + MOST_UNDECIDED:
                task = asyncio.create_task(self._serve(connection))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
            else:
                connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, suppress(OSError, TimeoutError):
            connection.setblocking(False)
            async with asyncio.timeout(HELLO_SECONDS):
                hello = b""
                while len(hello) < HELLO.size:
                    if not (piece := await loop.sock_recv(connection, HELLO.size - len(hello))):
                        return
                    hello += piece
            memory = self._find(hello)
            if memory is None or self._holds >= self._max_holds:
                connection.send(GONE if memory is None else FULL)
                return
            self._holds += 1
            try:
                socket.send_fds(connection, [GRANTED], [self._pool.arena.descriptor])
                while await loop.sock_recv(connection, 1):  # until the other process closes it, or dies
                    pass
            finally:
                self._holds -= 1

    def _find(self, hello: bytes) -> _Memory | None:
        pool_id, token, offset = HELLO.unpack(hello)
        shared = self._shared.get(offset)
        if shared is None or pool_id != self._id or not hmac.compare_digest(shared.token, token):
            return None
        return shared.memory()

    def _close(self) -> None:
        assert self._socket is not None
        assert self._folder is not None
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
