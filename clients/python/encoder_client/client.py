"""The asynchronous client of one encoder service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from encoder_client import chunk_checks
from encoder_client.cancellation import answer
from encoder_client.client_settings import ClientSettings
from encoder_client.connections import Connections
from encoder_client.durations import duration
from encoder_client.embedding import Embedding
from encoder_client.encode_call import EncodeCall
from encoder_client.errors import ChunkError, ReadError, from_rpc_error
from encoder_client.in_place import InPlaceReads
from encoder_client.leases import Leases
from encoder_client.media import add_placed
from encoder_client.part_reads import PartReads, gone
from encoder_client.pool.embedding_pool import EmbeddingPool, Slot
from encoder_client.reading import ChunkReader
from encoder_client.stub import EncoderStub
from encoder_client.subscriptions.subscription import Subscription
from encoder_client.transport_choice import TransportChoice, TransportStatistics
from encoder_client.transport_loading import load_readers
from encoder_client.transports import SlotClosedError, TransportError
from encoder_client.transports.inline import InlineReader
from encoder_client.transports.shared_memory import SharedMemoryReader
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, EncoderRef
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, Delivery
from epd.encoder.v1.media_pb2 import MediaItem

logger = logging.getLogger("encoder_client")

SERVICE = "epd.encoder.v1.EncoderService"


class EncoderClient:
    """Encodes media and reads the embeddings.

    Use it as an async context manager, in one event loop.

    Args:
        target: the gRPC target of one encoder, such as ``127.0.0.1:50051``. Chunks of other encoders, which another
            process received, are read at the target that they name.
        settings: how encoders are reached, and by what embeddings are read. None: the defaults.
        pool: where embeddings are read to. None: a pool of 256 MiB.

    Raises:
        EncoderClientError: the token may not go to ``target``, or none of the transports can be loaded here.

    Example:
        >>> async with EncoderClient("127.0.0.1:50051") as client:
        ...     async with client.encode([image(Path("cat.jpg"))]) as call:
        ...         [embedding] = await call.embeddings()
        ...     print(embedding.numpy().shape, embedding.transport)
    """

    def __init__(
        self, target: str, settings: ClientSettings | None = None, *, pool: EmbeddingPool | None = None
    ) -> None:
        self.target = target
        self.settings = settings or ClientSettings()
        self.pool = pool if pool is not None else EmbeddingPool()
        self._connections = Connections(target, self.settings)
        self._leases = Leases(self._connections, self.settings.receiver, self.settings.read_timeout)
        inline = InlineReader(self._connections.stub_of)
        readers = load_readers(self.settings, self.pool, inline)
        self._choice = TransportChoice(readers)
        shared = readers.get(SharedMemoryReader.name)
        self._in_place = (
            InPlaceReads(shared, self._leases.renew_one, self._leases.release, self.settings.in_place_bytes)
            if isinstance(shared, SharedMemoryReader)
            else None
        )

    @property
    def stub(self) -> EncoderStub:
        """The raw calls of the encoder at :attr:`target`."""
        return self._connections.stub(self.target)

    @property
    def connections(self) -> Connections:
        """The channels to encoders."""
        return self._connections

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that this client can read by, the preferred first."""
        return tuple(self._choice.readers)

    @property
    def transport_statistics(self) -> dict[str, TransportStatistics]:
        """What each transport has delivered and failed to, by name, and at how many engines it is avoided now."""
        return self._choice.statistics(time.monotonic())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_place is not None:
            await self._in_place.close()
        await self._connections.close()
        self._choice.close()

    def at(self, target: str, *, expected_fingerprint: bytes = b"", host: str = "") -> EncoderClient:
        """This client for the calls of another encoder.

        Pool, transports and connections are shared, and end when the client does that was entered.

        Args:
            target: the gRPC target of the other encoder.
            expected_fingerprint: 32 bytes. Empty: as here.
            host: the name that the certificate of the other encoder must have. Empty: that in ``target``.
        """
        other = copy(self)
        other.target = target
        if expected_fingerprint:
            other.settings = replace(self.settings, expected_fingerprint=expected_fingerprint)
        if host:
            self._connections.name(target, host)
        return other

    def forget(self, target: str) -> None:
        """Closes what is open to an encoder, behind what is under way. The next call to it connects again."""
        self._connections.forget(target, self.settings.read_timeout)

    def encode(
        self,
        items: Sequence[MediaItem],
        *,
        prompt_id: str = "",
        request_id: str = "",
        num_parts: int = 0,
        timeout: float | None = None,
        receivers: Sequence[str] = (),
        delivery: Delivery = Delivery.DELIVERY_UNSPECIFIED,
        priority: int = 0,
        cache_policy: CachePolicy = CachePolicy.CACHE_POLICY_UNSPECIFIED,
        cache_salt: bytes = b"",
        lease_ttl: float | None = None,
        skip_layout: bool = False,
    ) -> EncodeCall:
        """Encodes some or all items of one prompt; the call begins when the result is entered with ``async with``.

        Args:
            items: made by :func:`image`, :func:`video`, :func:`audio`. Those without a ``part_idx`` take their index.
            prompt_id: groups the parts of a prompt over calls. Empty: the request's id.
            request_id: names the call. Empty: the server makes one.
            num_parts: the items of the whole prompt. 0: as many as ``items``.
            timeout: the deadline, in seconds. None: none.
            receivers: names of other parties that get the embeddings; implies that delivery.
            delivery: who gets the embeddings; unspecified: the caller, or ``receivers`` if there are any.
            priority: larger goes first among requests that wait; from -100 to 100.
            cache_policy: how the encoder's cache is used.
            cache_salt: separates cache entries of callers who must not share them.
            lease_ttl: seconds that leases live. None: the server's default.
            skip_layout: leave the LAYOUT events out.
        """
        if receivers and not delivery:
            delivery = Delivery.DELIVERY_RECEIVERS
        request = service.EncodeRequest(
            request_id=request_id,
            prompt_id=prompt_id,
            num_parts=num_parts,
            delivery=delivery,
            receivers=receivers,
            priority=priority,
            cache_policy=cache_policy,
            cache_salt=cache_salt,
            expected_fingerprint=self.settings.expected_fingerprint,
            lease_ttl=duration(lease_ttl),
            skip_layout=skip_layout,
        )
        add_placed(request, items)
        return EncodeCall(self, request, timeout)

    def subscribe(self, *, incarnation: int | None = None, patience: float | None = None) -> Subscription:
        """Receives what is addressed to the receiver of the settings, whoever asked for it; begins with ``async with``.

        Args:
            incarnation: grows with every life of the receiver: a new one takes over, and the leases that an older one
                was told of are revoked. None: the time, in nanoseconds.
            patience: seconds without a connection after which it fails. None: it tries for ever.

        Raises:
            ValueError: the client has no receiver's name.
        """
        if not self.settings.receiver:
            raise ValueError("only a named receiver can subscribe: give ClientSettings a receiver")
        return Subscription(self, time.time_ns() if incarnation is None else incarnation, patience)

    async def read(
        self, chunk: EmbeddingChunk, *, transports: Sequence[str] = (), deadline: float | None = None
    ) -> Embedding:
        """Reads the embedding that a READY chunk describes, checks it, and gives the lease back.

        The chunk may come from a call of this client or, serialised, from any other process. Its lease is held while
        this waits for space in the pool. If the pool stalls meanwhile, it goes back, and the embedding is asked for
        again by its content key; :meth:`EncodeCall.embeddings`, which has the media, can do more.

        Args:
            chunk: READY, with a lease for the receiver of the settings.
            transports: names, the preferred first. Empty: those of the client.
            deadline: until when the caller could have it encoded elsewhere instead, in the time of the event loop: the
                encoder gets half of what is left to confirm the read. None: the time that it always gets.

        Raises:
            ChunkError: the chunk must not be used.
            PoolError: there is no space.
            ReadError: the bytes could not be had, were damaged, or the lease had ended.
        """
        read = partial(self.read_into, transports=transports, deadline=deadline)
        reads = PartReads(self, [chunk.part_idx], read, gone)
        try:
            chunk_checks.check_ready(chunk)
            reads.offer([chunk])
            space = reads.reserve(chunk.prompt_id, [chunk.nbytes])
            if not space.done():
                await asyncio.wait([space])
            reads.offer([])
            [embedding] = await reads.results()
        finally:
            await reads.close([chunk])
        return embedding

    async def read_into(
        self, chunk: EmbeddingChunk, slot: Slot, *, transports: Sequence[str] = (), deadline: float | None = None
    ) -> Embedding:
        """As :meth:`read`, into space that is reserved already."""
        reader = ChunkReader(
            self._choice,
            transports or self.transports,
            self.settings.receiver,
            self.settings.expected_fingerprint,
            self._connections.releases_of(chunk.encoder),
        )
        return await reader.read(chunk, slot, self.settings.read_timeout, deadline)

    async def read_in_place(self, chunk: EmbeddingChunk) -> Embedding:
        """As :meth:`read`, but without a copy where shared memory reaches the encoder.

        The embedding then stays in the encoder's arena, under a lease that is renewed in the background until its last
        view is gone: let go of it soon, since the encoder has no other use for that memory. After each use ask
        :attr:`Embedding.intact`. Beyond ``in_place_bytes``, and where shared memory does not reach, it is copied.

        Raises:
            ChunkError, PoolError, ReadError: see :meth:`read`.
        """
        lease = chunk_checks.lease_of(chunk, self.settings.receiver)
        try:
            chunk_checks.check_ready(chunk)
            chunk_checks.check_fingerprint(chunk, self.settings.expected_fingerprint)
        except ChunkError:
            await self.abandon([chunk])
            raise
        names = (SharedMemoryReader.name,)
        if self._in_place is not None and self._in_place.has_room(chunk.nbytes):
            for _, locator in self._choice.order(names, chunk, time.monotonic()):
                try:
                    embedding = await self._in_place.read(chunk, locator, lease, self.settings.read_timeout / 2)
                except SlotClosedError:
                    await self.abandon([chunk])
                    raise ReadError(
                        f"the encoder does not hold part {chunk.part_idx} any more; ask for it again"
                    ) from None
                except TransportError as error:
                    logger.warning("part %d is not read in place: %s", chunk.part_idx, str(error))
                except BaseException:
                    await asyncio.shield(self.abandon([chunk]))
                    raise
                else:
                    self._choice.delivered(SharedMemoryReader.name, chunk)
                    return embedding
        return await self.read(chunk)

    async def abandon(self, chunks: Sequence[EmbeddingChunk]) -> None:
        """Gives back the leases of READY chunks that nobody will read. What cannot be given back runs out by itself."""
        await self._leases.abandon(chunks)

    async def refuse(self, chunks: Sequence[EmbeddingChunk]) -> None:
        """As :meth:`abandon`, of chunks that this encoder told and that must not be used.

        Their leases go back to the encoder at :attr:`target`, whatever they say of where they are.
        """
        here = EncoderRef(grpc_target=self.target)
        await self.abandon([EmbeddingChunk(encoder=here, leases=chunk.leases) for chunk in chunks])

    async def renew(self, chunks: Sequence[EmbeddingChunk], ttl: float | None = None) -> list[float]:
        """Extends this receiver's leases of READY chunks.

        Args:
            chunks: of one server.
            ttl: seconds from now. None: the server's default.

        Returns:
            For each chunk the seconds that its lease lives from now.

        Raises:
            ReadError: a lease had ended.
            EncoderError: the call failed.
        """
        return await self._leases.renew(chunks, ttl)

    async def cancel(self, *, request_id: str = "", prompt_id: str = "") -> service.CancelResponse:
        """Cancels the parts of a request or of a prompt that are not READY; give one of the two.

        Raises:
            EncoderError: the call failed.
        """
        if bool(request_id) == bool(prompt_id):
            raise ValueError("give either request_id or prompt_id")
        target = {"request_id": request_id} if request_id else {"prompt_id": prompt_id}
        try:
            return await answer(self.stub.cancel(service.CancelRequest(**target), timeout=self.settings.read_timeout))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def server_info(self, timeout: float = 10.0) -> service.GetServerInfoResponse:
        """What the encoder is, can do, and is doing.

        Raises:
            EncoderError: the call failed.
        """
        try:
            info = await answer(self.stub.server_info(service.GetServerInfoRequest(), timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        self.note_encoder(info.encoder)
        return info

    async def health(self, timeout: float = 10.0) -> bool:
        """The encoder takes requests.

        Raises:
            EncoderError: the call failed; an encoder that cannot be reached is not told apart from other failures.
        """
        try:
            check = self._connections.health(self.target).Check
            health: HealthCheckResponse = await answer(check(HealthCheckRequest(service=SERVICE), timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return bool(health.status == HealthCheckResponse.SERVING)

    def note_encoder(self, encoder: EncoderRef) -> None:
        """Learns which server answers at :attr:`target`, so that its chunks are read on the same channel."""
        self._connections.note_encoder(encoder, self.target)
