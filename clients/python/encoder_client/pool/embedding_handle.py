"""A few bytes by which another process of the host opens an embedding, without a copy.

The handle goes to the other process in any way: a queue, a socket, a file. There :meth:`EmbeddingHandle.open` connects
to the unix socket that it names, gets the descriptor of the pool's memory, and maps it. That connection holds the
memory: it is not used for anything else until the last view there is gone, or the process.

Layout of a handle, little-endian::

    offset  size
    0       8     magic: ASCII ``EPDHAND1``
    8       16    the pool: one life of one
    24      16    token, a secret: who has it, and may open the socket, can read
    40      8     where the embedding begins, in bytes from the start of the pool's memory
    48      8     its bytes
    56      2     p, the length of the path
    58      4     c, the length of the chunk
    62      p     path of the unix socket, UTF-8
    62 + p  c     the serialised ``EmbeddingChunk``, without leases, locators and slot key

On the socket the opener sends bytes 8 to 48, and is answered by one byte: 1 with the descriptor (``SCM_RIGHTS``); 2 if
the embedding is gone; 3 if there are too many holds. The hold lasts until the opener closes the connection.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import weakref
from dataclasses import dataclass, field
from time import monotonic

from encoder_client import chunk_checks
from encoder_client.embedding import Embedding
from encoder_client.errors import HandleError
from encoder_client.pool.embedding_pool import Slot
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

MAGIC = b"EPDHAND1"
HEADER = struct.Struct("<8s16s16sQQHI")
HELLO = struct.Struct("<16s16sQ")
"""What the opener sends: pool, token, offset."""
GRANTED, GONE, FULL = b"\x01", b"\x02", b"\x03"


@dataclass(frozen=True)
class EmbeddingHandle:
    """Names an embedding in the pool of another process. Made by :meth:`PoolSharing.share`."""

    pool_id: bytes
    """16 bytes."""
    token: bytes = field(repr=False)
    """16 bytes, a secret."""
    offset: int
    nbytes: int
    socket_path: str
    chunk: EmbeddingChunk
    """Without leases, locators and slot key."""

    def to_bytes(self) -> bytes:
        """The handle in its documented form."""
        path, chunk = self.socket_path.encode(), self.chunk.SerializeToString()
        header = HEADER.pack(MAGIC, self.pool_id, self.token, self.offset, self.nbytes, len(path), len(chunk))
        return header + path + chunk

    @classmethod
    def from_bytes(cls, data: bytes) -> EmbeddingHandle:
        """Reads a handle.

        Raises:
            HandleError: these bytes are none.
        """
        if len(data) < HEADER.size or not data.startswith(MAGIC):
            raise HandleError("these bytes are no handle of an embedding")
        _, pool_id, token, offset, nbytes, path_length, chunk_length = HEADER.unpack_from(data)
        path, chunk = data[HEADER.size : HEADER.size + path_length], data[HEADER.size + path_length :]
        if len(chunk) != chunk_length:
            raise HandleError("the handle was cut, or something was added to it")
        try:
            return cls(pool_id, token, offset, nbytes, path.decode(), EmbeddingChunk.FromString(chunk))
        except ValueError:
            raise HandleError("the handle is damaged: its path or its chunk cannot be read") from None

    def open(self, timeout: float = 5.0) -> Embedding:
        """Maps the embedding. Its views are writable; what is written there only this process sees.

        This blocks; not to be called in the event loop that shares the pool.

        Args:
            timeout: seconds that the process that has the pool may take to answer.

        Raises:
            HandleError: the embedding is gone, its process does not answer, or there are too many holds.
            ChunkError: the chunk reaches outside of its bytes.
        """
        begun = monotonic()
        chunk_checks.check_shape(self.chunk)
        if self.chunk.nbytes != self.nbytes:
            raise HandleError(f"the handle names {self.nbytes} bytes, and its chunk {self.chunk.nbytes}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            descriptor = self._descriptor(connection)
            try:
                memory = self._map(descriptor)
            finally:
                os.close(descriptor)
            # The memory is held as long as the connection is: until the last view dies.
            weakref.finalize(memory, os.close, connection.detach()).atexit = False
        slot = Slot(memory, ctypes.addressof(memory))
        return Embedding(self.chunk, slot, "handle", monotonic() - begun)

    def _descriptor(self, connection: socket.socket) -> int:
        try:
            connection.connect(self.socket_path)
            connection.sendall(HELLO.pack(self.pool_id, self.token, self.offset))
            answer, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise HandleError(
                f"whoever shares the embedding does not answer at {self.socket_path} ({error.strerror or 'timeout'}); "
                "a handle is good on its own host, for its own user, and while its process lives"
            ) from None
        if answer == GRANTED and descriptors:
            return descriptors[0]
        if answer == FULL:
            raise HandleError("too many embeddings of that pool are open; let go of some, or allow more holds")
        raise HandleError("the embedding is gone: whoever shares it must keep it until it has been opened")

    def _map(self, descriptor: int) -> ctypes.Array[ctypes.c_char]:
        if self.offset + self.nbytes > os.fstat(descriptor).st_size:
            raise HandleError("the handle names bytes outside of the pool")
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            descriptor,
            self.offset - begin + self.nbytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=begin,
        )
        return (ctypes.c_char * self.nbytes).from_buffer(mapped, self.offset - begin)
