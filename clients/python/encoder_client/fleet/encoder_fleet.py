"""Several encoders as one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from types import TracebackType
from typing import Self

from encoder_client.client import EncoderClient
from encoder_client.client_settings import ClientSettings
from encoder_client.fleet.balancing import KnownContents
from encoder_client.fleet.dispatcher import Dispatcher
from encoder_client.fleet.encoder_health import HealthState
from encoder_client.fleet.fleet_call import FleetCall
from encoder_client.fleet.fleet_prompt import EncodeOptions, Prompt, Sink
from encoder_client.fleet.roster import Roster
from encoder_client.media import placed_items
from encoder_client.pool.embedding_pool import EmbeddingPool
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, Delivery
from epd.encoder.v1.media_pb2 import MediaItem


class EncoderFleet:
    """Encodes the items of a prompt on several encoders, and reads the embeddings into one pool.

    Items are spread by estimated cost and reported load, and go where their content is (see
    :mod:`encoder_client.fleet.balancing`). A part that an encoder cannot make now is sent to another, under the same
    prompt and ``part_idx``, until its deadline: see :class:`~encoder_client.fleet.failure_kinds.FailureKind`. Encoders
    that fail are left out until they answer again (:mod:`encoder_client.fleet.encoder_health`).

    Use it as an async context manager, in one event loop.

    Args:
        targets: gRPC targets, each one encoder. ``dns:NAME:PORT`` stands for every address that the name has, looked up
            again and again. Two addresses of one server count once: a server is its ``instance_id``.
        settings: as for :class:`EncoderClient`. Without an ``expected_fingerprint`` all encoders must make the same
            embeddings, otherwise no prompt is taken; with one, those that make others get nothing. By TLS, an address
            that came from a name must show the certificate of that name.
        pool: where all embeddings are read to. None: a pool of 256 MiB.
        poll_seconds: how often each encoder is asked for its load and health. It is left out after three polls in a row
            without an answer, and at once when a connection breaks.
        resolve_seconds: how often names are looked up.
        retry_seconds: how long a part without a deadline is tried, from the beginning of its call.
        random: for tests.

    Example:
        >>> async with EncoderFleet(["dns:encoders.internal:50051"]) as fleet:
        ...     async with fleet.encode([image(a), image(b), audio(c)], timeout=20) as call:
        ...         embeddings = await call.embeddings()
    """

    def __init__(
        self,
        targets: Sequence[str],
        settings: ClientSettings | None = None,
        *,
        pool: EmbeddingPool | None = None,
        poll_seconds: float = 1.0,
        resolve_seconds: float = 10.0,
        retry_seconds: float = 30.0,
        random: Random | None = None,
    ) -> None:
        if not targets:
            raise ValueError("a fleet needs at least one target")
        self._client = EncoderClient(targets[0], settings, pool=pool)
        self._random = random or Random()  # noqa: S311 # it balances, it guards nothing
        self._retry_seconds = retry_seconds
        self._contents = KnownContents()
        self._dispatchers: set[Dispatcher] = set()
        self._roster = Roster(
            self._client, targets, poll_seconds, resolve_seconds, self._random, self._wake_dispatchers
        )

    @property
    def pool(self) -> EmbeddingPool:
        """Where embeddings are read to."""
        return self._client.pool

    @property
    def client(self) -> EncoderClient:
        """Reads and gives back chunks of any encoder, also those that other processes received."""
        return self._client

    @property
    def states(self) -> dict[str, HealthState]:
        """What is thought of each encoder, by its target."""
        return {target: member.health.state for target, member in self._roster.members.items()}

    @property
    def model_type(self) -> str:
        """The family that the encoders serve, as the checkpoint's config names it; empty until one has told."""
        return next((member.info.model.model_type for member in self._roster.members.values() if member.info), "")

    async def __aenter__(self) -> Self:
        self._roster.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._roster.close()
        await self._client.__aexit__(kind, error, trace)

    def encode(
        self,
        items: Sequence[MediaItem],
        *,
        prompt_id: str = "",
        request_id: str = "",
        num_parts: int = 0,
        timeout: float | None = None,
        part_timeouts: Mapping[int, float] | None = None,
        receivers: Sequence[str] = (),
        delivery: Delivery = Delivery.DELIVERY_UNSPECIFIED,
        priority: int = 0,
        cache_policy: CachePolicy = CachePolicy.CACHE_POLICY_UNSPECIFIED,
        cache_salt: bytes = b"",
        lease_ttl: float | None = None,
        skip_layout: bool = False,
        holders: Mapping[int, str] | None = None,
    ) -> FleetCall:
        """Encodes some or all items of one prompt; it begins when the result is entered with ``async with``.

        Args:
            items: made by :func:`image`, :func:`video`, :func:`audio`. Those without a ``part_idx`` take their index.
            prompt_id: groups the parts of the prompt. Empty: one is made.
            request_id: the calls to the encoders are named so, with a number behind it. Empty: as the prompt.
            num_parts: the items of the whole prompt. 0: as many as ``items``.
            timeout: the deadline of all parts, in seconds. None: none; then parts are tried for ``retry_seconds``.
            part_timeouts: earlier deadlines of single parts, by ``part_idx``. A part that is late fails alone.
            receivers: as in :meth:`EncoderClient.encode`, like all that follow.
            delivery: who gets the embeddings.
            priority: larger goes first.
            cache_policy: how the encoders' caches are used.
            cache_salt: separates cache entries.
            lease_ttl: seconds that leases live.
            skip_layout: leave the LAYOUT events out.
            holders: which encoders have the contents of parts already, by ``part_idx``: the ``encoder.instance_id`` of
                READY chunks that another client got. They are asked first; one that is not of this fleet counts for
                nothing.

        Raises:
            ValueError: there are no items, or two have the same ``part_idx``, or one that is not below ``num_parts``.
        """
        placed = placed_items(items, num_parts)
        late = set(part_timeouts or ()) - set(placed)
        if late:
            raise ValueError(f"part_timeouts names parts {sorted(late)}, which are not among the items")
        if receivers and not delivery:
            delivery = Delivery.DELIVERY_RECEIVERS
        prompt_id = prompt_id or secrets.token_hex(16)
        prompt = Prompt(
            prompt_id=prompt_id,
            request_id=request_id or prompt_id,
            num_parts=num_parts or len(items),
            items=placed,
            deadlines=_deadlines(placed, timeout, part_timeouts or {}),
            options=EncodeOptions(
                receivers=receivers,
                delivery=delivery,
                priority=priority,
                cache_policy=cache_policy,
                cache_salt=cache_salt,
                lease_ttl=lease_ttl,
                skip_layout=skip_layout,
            ),
            holders=holders or {},
        )
        return FleetCall(self._client, prompt, self._begin, self._dispatchers.discard)

    def _begin(self, prompt: Prompt, sink: Sink) -> Dispatcher:
        dispatcher = Dispatcher(
            prompt,
            self._roster,
            self._contents,
            self._retry_seconds,
            self._client.settings.expected_fingerprint,
            self._random,
            sink,
        )
        self._dispatchers.add(dispatcher)
        return dispatcher

    def _wake_dispatchers(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.wake()


def _deadlines(items: Mapping[int, MediaItem], timeout: float | None, shorter: Mapping[int, float]) -> dict[int, float]:
    now = asyncio.get_running_loop().time()
    longest = inf if timeout is None else timeout
    return {part_idx: now + min(longest, shorter.get(part_idx, inf)) for part_idx in items}
