"""Named receivers: what each must be told of the parts that are addressed to it. Pure; the time is passed in.

It is kept as state, not as messages. Of every part that is addressed to a receiver there is one :class:`Parcel`, which
holds what the receiver must know of it now: its LAYOUT, its READY with a lease, or how it ended. A subscription is told
of the parcels that have changed. So a consumer that reads slowly, or not at all, costs one parcel for each part,
whatever happens to them; and one that comes back after a lost connection is told of all parcels again.

A parcel goes when its lease is released. One that says how a part or a lease ended (a notice) goes some time later, for
nobody confirms it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.chunks import write_duration
from encoder_svc.runtime.commands import EncodeCommand, SubscribeCommand
from encoder_svc.runtime.events import ChunkEvent, LeaseRevoked, PartCancelled, PartFailed, SubscriptionEvent, Synced
from encoder_svc.runtime.leases import Lease
from encoder_svc.runtime.parts import Part
from encoder_svc.runtime.timers import Timer, Timers
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk


@dataclass(eq=False, slots=True)
class Parcel:
    """One part for one receiver."""

    receiver: Receiver = field(repr=False)
    event: ChunkEvent | PartFailed | PartCancelled | LeaseRevoked | None = field(default=None, repr=False)
    """What the receiver must know of the part. None: nothing yet."""
    lease: Lease | None = None
    """While it lives."""
    told: bool = False
    """``event`` was given to a subscription of the receiver's present life."""
    embedding_told: bool = False
    """READY was given to it: the end of its lease concerns no later life."""
    timer: Timer | None = field(default=None, repr=False)
    """When a notice goes."""


@dataclass(eq=False, slots=True)
class Receiver:
    """A named party of the language side."""

    identity: str
    name: str
    incarnation: int | None = None
    """Of its present life. None: it has never subscribed."""
    subscription: Subscription | None = field(default=None, repr=False)
    parcels: dict[Parcel, None] = field(default_factory=dict, repr=False)
    notices: OrderedDict[Parcel, None] = field(default_factory=OrderedDict, repr=False)
    """Those of the parcels that only say how something ended, the oldest first."""

    @property
    def live(self) -> int:
        """Parcels whose part has not ended or whose lease is alive."""
        return len(self.parcels) - len(self.notices)


class Subscription:
    """One ``Subscribe`` call: what its receiver has not been told on it.

    Args:
        receiver: whose it is.
        wake: called when there is something to take, or the subscription has ended.
    """

    def __init__(self, receiver: Receiver, wake: Callable[[], None]) -> None:
        self.receiver = receiver
        self._wake = wake
        told = [parcel for parcel in receiver.parcels if parcel.event is not None]
        self._pending: OrderedDict[Parcel | None, None] = OrderedDict.fromkeys((*told, None))
        """What has changed, in order. None stands for ``Synced``."""
        self._taken = 0
        self._end: ServiceError | None = None

    def __contains__(self, parcel: Parcel) -> bool:
        return parcel in self._pending

    def take(self, now: float) -> SubscriptionEvent | None:
        """The next thing to tell. None: nothing at present.

        Raises:
            ServiceError: the subscription has ended, and all that it had to tell has been taken.
        """
        if self._pending:
            parcel, _ = self._pending.popitem(last=False)
            if parcel is None:
                return Synced(self._taken)
            self._taken += 1
            parcel.told = True
            return _event_of(parcel, now)
        if self._end is not None:
            raise self._end
        return None

    def changed(self, parcel: Parcel) -> None:
        """A parcel has something new. One that waits already keeps its place."""
        self._pending.setdefault(parcel, None)
        self._wake()

    def gone(self, parcel: Parcel) -> None:
        """There is nothing to tell of a parcel any more."""
        self._pending.pop(parcel, None)

    def end(self, error: ServiceError, *, at_once: bool) -> None:
        """Ends with an error.

        Args:
            error: what the receiver is told.
            at_once: without what still waits.
        """
        if at_once:
            self._pending.clear()
        self._end = error
        self._wake()


class Subscriptions:
    """All named receivers of a server, each scoped by its identity.

    Args:
        timers: where the ends of notices are set.
        max_receivers: receivers with parcels or a subscription.
        max_parcels: parcels of one receiver.
        notice_seconds: how long a notice is kept.
    """

    def __init__(self, timers: Timers, max_receivers: int, max_parcels: int, notice_seconds: float) -> None:
        self._timers = timers
        self._max_receivers = max_receivers
        self._max_parcels = max_parcels
        self._notice_seconds = notice_seconds
        self._receivers: dict[tuple[str, str], Receiver] = {}
        self._idle: OrderedDict[Receiver, None] = OrderedDict()
        """Those without parcels and subscription, of which only the incarnation is remembered; the oldest first."""
        self._by_part: dict[int, tuple[Parcel, ...]] = {}
        self._by_lease: dict[bytes, Parcel] = {}
        self._over: ServiceError | None = None

    @property
    def parcels(self) -> int:
        """How many parcels there are."""
        return sum(len(receiver.parcels) for receiver in self._receivers.values())

    @property
    def connected(self) -> int:
        """How many receivers have a subscription."""
        return sum(receiver.subscription is not None for receiver in self._receivers.values())

    # What receivers ask.

    def subscribe(
        self, command: SubscribeCommand, wake: Callable[[], None], now: float
    ) -> tuple[Subscription, list[Lease]]:
        """Begins a subscription; one that the receiver has already ends.

        Returns:
            The subscription; and the leases of the receiver's previous life, which are to be revoked.

        Raises:
            ServiceError: a newer life of the receiver has subscribed before, or there are too many receivers.
        """
        if self._over is not None:
            raise self._over
        known = self._receivers.get((command.identity, command.receiver))
        current = known.incarnation if known is not None else None
        if current is not None and command.incarnation < current:
            raise ServiceError(Reason.SUBSCRIPTION_SUPERSEDED, _OLDER, field="incarnation")
        self._check_receivers(command.identity, (command.receiver,))
        receiver = self._receiver(command.identity, command.receiver)
        revoked: list[Lease] = []
        if current is not None and command.incarnation > current:
            revoked = self._begin_life(receiver)
        receiver.incarnation = command.incarnation
        if receiver.subscription is not None:
            receiver.subscription.end(ServiceError(Reason.SUBSCRIPTION_SUPERSEDED, _REPLACED), at_once=True)
        receiver.subscription = Subscription(receiver, wake)
        self._idle.pop(receiver, None)
        return receiver.subscription, revoked

    def leave(self, subscription: Subscription) -> None:
        """The call is over. What was addressed to its receiver stays until it comes back, or ends by itself."""
        receiver = subscription.receiver
        if receiver.subscription is subscription:
            receiver.subscription = None
            self._rest(receiver)

    def end(self, error: ServiceError) -> None:
        """All subscriptions end when they have told what they have, and none begins any more."""
        self._over = error
        for receiver in self._receivers.values():
            if receiver.subscription is not None:
                receiver.subscription.end(error, at_once=False)

    # What happens to parts and leases.

    def check_room(self, identity: str, receivers: Sequence[str], parts: int) -> None:
        """Checks that each of ``receivers`` can be addressed ``parts`` more parts. The empty name is no receiver.

        Raises:
            ServiceError: it cannot.
        """
        names = [name for name in receivers if name]
        self._check_receivers(identity, names)
        for name in names:
            receiver = self._receivers.get((identity, name))
            live = parts if receiver is None else receiver.live + parts
            if live > self._max_parcels:
                raise ServiceError(
                    Reason.RECEIVER_FULL,
                    f"a receiver may have {self._max_parcels} parts that it has not released, and this request would "
                    f"give one of its receivers {live}; wait until it has read some",
                    field="receivers",
                )

    def expect(self, part: Part) -> None:
        """A part was admitted whose receivers are named; :meth:`check_room` said that there is room."""
        command = part.request.command
        parcels = tuple(self._parcel(command.identity, name) for name in command.receivers if name)
        if parcels:
            self._by_part[part.key] = parcels

    def laid_out(self, part: Part, chunk: EmbeddingChunk) -> None:
        """A part's LAYOUT is known."""
        for parcel in self._by_part.get(part.key, ()):
            self._tell(parcel, ChunkEvent(chunk))

    def ready(self, part: Part, chunk: EmbeddingChunk, leases: Sequence[Lease]) -> None:
        """A part's embedding is there.

        Args:
            part: its end follows.
            chunk: READY, with all leases.
            leases: one for each receiver, in their order.
        """
        parcels = self._by_part.pop(part.key, ())
        for parcel, lease in zip(parcels, leases, strict=bool(parcels)):
            self._give(parcel, chunk, lease)

    def acquired(self, identity: str, chunk: EmbeddingChunk, leases: Sequence[Lease]) -> None:
        """Named receivers got leases by ``Acquire``; :meth:`check_room` said that there is room."""
        for lease in leases:
            if lease.receiver:
                self._give(self._parcel(identity, lease.receiver), chunk, lease)

    def ended(self, part: Part, event: PartFailed | PartCancelled, now: float) -> None:
        """A part ended without an embedding."""
        for parcel in self._by_part.pop(part.key, ()):
            self._notify(parcel, event, now)

    def lease_ended(self, lease: Lease, error: ServiceError | None, now: float) -> None:
        """A lease ended; ``error`` says why, if it was not released."""
        parcel = self._by_lease.pop(lease.id, None)
        if parcel is None:
            return
        parcel.lease = None
        if error is None:
            self._drop(parcel)
            return
        assert isinstance(parcel.event, ChunkEvent)
        parcel.embedding_told = parcel.told
        chunk = parcel.event.chunk
        event = LeaseRevoked(lease.id, chunk.prompt_id, chunk.request_id, chunk.part_idx, error)
        self._notify(parcel, event, now)

    # Inside.

    def _check_receivers(self, identity: str, names: Sequence[str]) -> None:
        found = (self._receivers.get((identity, name)) for name in names)
        new = sum(receiver is None or receiver in self._idle for receiver in found)
        if len(self._receivers) - len(self._idle) + new > self._max_receivers:
            raise ServiceError(
                Reason.RECEIVER_FULL,
                f"the server knows {self._max_receivers} receivers already, which is as many as it may; use fewer "
                "names, or try again when leases of others have ended",
            )

    def _receiver(self, identity: str, name: str) -> Receiver:
        receiver = self._receivers.get((identity, name))
        if receiver is None:
            if len(self._receivers) >= self._max_receivers and self._idle:
                forgotten, _ = self._idle.popitem(last=False)
                del self._receivers[forgotten.identity, forgotten.name]
            receiver = self._receivers[identity, name] = Receiver(identity, name)
        return receiver

    def _begin_life(self, receiver: Receiver) -> list[Lease]:
        """What the previous life was told of ends with it. Returns its leases."""
        revoked: list[Lease] = []
        for parcel in list(receiver.parcels):
            if not (parcel.told or parcel.embedding_told):
                continue
            if parcel.lease is not None:
                revoked.append(parcel.lease)
                del self._by_lease[parcel.lease.id]
            if parcel.lease is not None or parcel in receiver.notices:
                self._forget(parcel)
            parcel.told = False
        return revoked

    def _parcel(self, identity: str, name: str) -> Parcel:
        receiver = self._receiver(identity, name)
        if len(receiver.parcels) >= self._max_parcels:
            # There is room: so some of them are notices.
            oldest = next(iter(receiver.notices))
            if receiver.subscription is not None and oldest in receiver.subscription:
                receiver.subscription.end(ServiceError(Reason.SUBSCRIPTION_SLOW, _SLOW), at_once=True)
                receiver.subscription = None
            self._forget(oldest)
        parcel = Parcel(receiver)
        receiver.parcels[parcel] = None
        self._idle.pop(receiver, None)
        return parcel

    def _give(self, parcel: Parcel, chunk: EmbeddingChunk, lease: Lease) -> None:
        parcel.lease = lease
        self._by_lease[lease.id] = parcel
        self._tell(parcel, ChunkEvent(chunk))

    def _notify(self, parcel: Parcel, event: PartFailed | PartCancelled | LeaseRevoked, now: float) -> None:
        parcel.receiver.notices[parcel] = None
        parcel.timer = self._timers.at(now + self._notice_seconds, lambda _: self._drop(parcel))
        self._tell(parcel, event)

    def _tell(self, parcel: Parcel, event: ChunkEvent | PartFailed | PartCancelled | LeaseRevoked) -> None:
        parcel.event, parcel.told = event, False
        if parcel.receiver.subscription is not None:
            parcel.receiver.subscription.changed(parcel)

    def _drop(self, parcel: Parcel) -> None:
        self._forget(parcel)
        self._rest(parcel.receiver)

    def _forget(self, parcel: Parcel) -> None:
        receiver = parcel.receiver
        del receiver.parcels[parcel]
        receiver.notices.pop(parcel, None)
        if parcel.timer is not None:
            parcel.timer.cancel()
        if receiver.subscription is not None:
            receiver.subscription.gone(parcel)

    def _rest(self, receiver: Receiver) -> None:
        """Forgets a receiver that has nothing, or all of it but its incarnation."""
        if receiver.parcels or receiver.subscription is not None:
            return
        if receiver.incarnation is None:
            del self._receivers[receiver.identity, receiver.name]
        else:
            self._idle[receiver] = None


def names_receivers(command: EncodeCommand) -> bool:
    """Some party beside the caller gets the embeddings."""
    return any(command.receivers)


def _event_of(parcel: Parcel, now: float) -> SubscriptionEvent:
    """What a receiver is told: of a READY chunk its own lease alone, and how long that lives from now."""
    assert parcel.event is not None
    if parcel.lease is None or not isinstance(parcel.event, ChunkEvent):
        return parcel.event
    chunk = EmbeddingChunk()
    chunk.CopyFrom(parcel.event.chunk)
    del chunk.leases[:]
    grant = chunk.leases.add()
    grant.receiver_id = parcel.lease.receiver
    grant.lease_id = parcel.lease.id
    # A timer that is a little late must not make it 0, which no lease has.
    write_duration(grant.ttl, max(1e-3, parcel.lease.expires_at - now))
    return ChunkEvent(chunk)


_OLDER = (
    "a newer life of this receiver has subscribed; if this process is the one that lives, subscribe with a larger "
    "incarnation"
)
_REPLACED = "the receiver has subscribed again; if that was another process, give each its own receiver_id"
_SLOW = "the receiver did not take its events, and there were more than are kept; subscribe again, and read on"
