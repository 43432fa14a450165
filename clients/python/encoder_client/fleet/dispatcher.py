"""Gets the parts of one prompt encoded: calls to encoders, and other calls for what they fail.

Everything that happens (a call tells something, a member of the fleet changes, time passes) leads to one :meth:`pump`,
which starts all that can start now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from math import inf
from random import Random

import grpc

from encoder_client.errors import ChunkError, EncoderError
from encoder_client.events import Accepted, Event, Layout, PartCancelled, PartFailed, Ready
from encoder_client.fleet.balancing import KnownContents, Wish, assign
from encoder_client.fleet.fleet_prompt import Prompt, Sink
from encoder_client.fleet.media_cost import estimated_cost
from encoder_client.fleet.prompt_ledger import PromptLedger
from encoder_client.fleet.roster import Member, Roster
from epd.content_key import item_content_key
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import MediaItem

logger = logging.getLogger("encoder_client")

HASH_IN_THREAD_BYTES = 256 << 10
"""From this size on media are hashed in a thread: 256 KiB take about 0.15 ms."""


class Dispatcher:
    """Sends the parts of one prompt to the members of a fleet, until each has ended.

    Args:
        prompt: what is asked for.
        roster: the members.
        contents: which of them has what.
        retry_seconds: from now: no try begins later.
        expected_fingerprint: 32 bytes, or empty: that of the members, which must all have the same.
        random: draws members.
        sink: who is told.
    """

    def __init__(
        self,
        prompt: Prompt,
        roster: Roster,
        contents: KnownContents,
        retry_seconds: float,
        expected_fingerprint: bytes,
        random: Random,
        sink: Sink,
    ) -> None:
        self._prompt = prompt
        self._roster = roster
        self._contents = contents
        self._random = random
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        last_try = self._loop.time() + retry_seconds
        self._ledger = PromptLedger(prompt.deadlines, last_try, len(roster.members))
        self._fingerprint = expected_fingerprint
        self._costs = {part_idx: estimated_cost(item) for part_idx, item in prompt.items.items()}
        self._keys: dict[int, bytes] | None = None
        self._hashing = False
        self._calls: set[asyncio.Task[None]] = set()
        self._begun = 0
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.Handle | None = None
        self._closed = False

    def wake(self) -> None:
        """Something has changed."""
        if not self._closed and self._soon is None:
            self._soon = self._loop.call_soon(self.pump)

    def again(self, part_idx: int, lost: EncoderError | None) -> bool:
        """Asks once more for a part that is READY.

        Args:
            part_idx: the part.
            lost: why it cannot be read; None: its lease was given back.

        Returns:
            It is asked for; otherwise no encoder will be asked again.
        """
        if lost is None:
            self._ledger.again(part_idx)
        elif self._ledger.failed(part_idx, lost, self._loop.time()):
            return False
        self.wake()
        return True

    async def close(self) -> None:
        """Cancels what is not READY."""
        self._closed = True
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def pump(self) -> None:
        """Starts what can start, and ends what has waited too long."""
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        for part_idx, error in self._ledger.expire(now, self._why).items():
            self._sink.failed(part_idx, error)
        waiting = self._ledger.waiting()
        if waiting and (members := self._fitting(self._roster.available(now))) and self._has_keys(members):
            self._send(waiting, members)
        times = [self._ledger.next_end(), self._roster.available_at() if self._ledger.waiting() else None]
        ahead = min((time for time in times if time is not None and time > now), default=inf)
        if ahead < inf:
            self._timer = self._loop.call_at(ahead, self.pump)

    def _fitting(self, members: Sequence[Member]) -> list[Member]:
        """The members whose embeddings fit together with those that the prompt has."""
        if members and not self._fingerprint:
            kinds = {member.fingerprint: member.target for member in members}
            if len(kinds) > 1:
                shown = ", ".join(f"{target} has {kind.hex()[:12]}" for kind, target in kinds.items())
                message = (
                    f"the encoders make embeddings that do not fit together ({shown}, …): their weights, dtype, "
                    "preprocessing or width differ; leave some out, or say by expected_fingerprint which you want"
                )
                self._sink.refused(EncoderError(grpc.StatusCode.FAILED_PRECONDITION, message))
                return []
            self._fingerprint = members[0].fingerprint
        return [member for member in members if member.fingerprint == self._fingerprint]

    def _why(self) -> str:
        others = [m.target for m in self._roster.available(self._loop.time()) if m.fingerprint != self._fingerprint]
        if self._fingerprint and others:
            return f"{', '.join(others)} would make embeddings that do not fit; {self._roster.troubles()}"
        return self._roster.troubles()

    def _has_keys(self, members: Sequence[Member]) -> bool:
        """The content keys are there, or not needed; otherwise they are being found, in a thread if items are large."""
        bypass = self._prompt.options["cache_policy"] == CachePolicy.CACHE_POLICY_BYPASS
        if self._keys is not None or len(members) == 1 or bypass:
            return True
        if self._hashing:
            return False
        assert members[0].info is not None
        namespace, salt = members[0].info.model.cache_namespace, self._prompt.options["cache_salt"]
        items = self._prompt.items

        def keys() -> dict[int, bytes]:
            return {part_idx: _content_key(namespace, salt, item) for part_idx, item in items.items()}

        if sum(item.ByteSize() for item in items.values()) < HASH_IN_THREAD_BYTES:
            self._keys = keys()
            return True
        self._hashing = True
        asyncio.create_task(asyncio.to_thread(keys)).add_done_callback(self._hashed)
        return False

    def _hashed(self, task: asyncio.Task[dict[int, bytes]]) -> None:
        self._hashing = False
        self._keys = {} if task.cancelled() else task.result()
        self.wake()

    def _send(self, waiting: Sequence[int], members: Sequence[Member]) -> None:
        wishes = [self._wish(part_idx) for part_idx in waiting]
        places = assign(wishes, [member.candidate() for member in members], self._random)
        for member in members:
            mine = [part_idx for part_idx in waiting if places[part_idx] == member.target]
            for parts in self._calls_of(mine, member):
                self._begin(member, parts)

    def _wish(self, part_idx: int) -> Wish:
        key = (self._keys or {}).get(part_idx, b"")
        holder = self._prompt.holders.get(part_idx, "") or (self._contents.holder(key) if key else "")
        return Wish(part_idx, self._costs[part_idx], key, holder, self._ledger.avoided(part_idx))

    def _calls_of(self, parts: Sequence[int], member: Member) -> Iterator[list[int]]:
        """Splits parts into calls: one deadline each, and no more items and bytes than the encoder takes at once."""
        assert member.info is not None
        limits = member.info.limits
        call: list[int] = []
        nbytes = 0
        for part_idx in sorted(parts, key=lambda part_idx: (self._ledger.deadline(part_idx), part_idx)):
            size = self._prompt.items[part_idx].ByteSize()
            full = len(call) == limits.max_items or nbytes + size > limits.max_message_bytes * 0.9
            if call and (full or self._ledger.deadline(part_idx) != self._ledger.deadline(call[0])):
                yield call
                call, nbytes = [], 0
            call.append(part_idx)
            nbytes += size
        if call:
            yield call

    def _begin(self, member: Member, parts: Sequence[int]) -> None:
        self._ledger.send(parts, member.instance_id)
        for part_idx in parts:
            member.sent(self, part_idx, self._costs[part_idx])
        member.health.began()
        self._begun += 1
        sent = set(parts)
        call = asyncio.create_task(self._call(member, parts, sent, f"{self._prompt.request_id}.{self._begun}"))
        for calls in (self._calls, member.calls):
            calls.add(call)
        call.add_done_callback(lambda call: self._landed(member, sent, call))

    async def _call(self, member: Member, parts: Sequence[int], sent: set[int], request_id: str) -> None:
        """Makes a call. ``sent`` loses each part that ends."""
        prompt = self._prompt
        deadline = self._ledger.deadline(parts[0])
        client = member.client.at(member.target, expected_fingerprint=self._fingerprint)
        async with client.encode(
            [prompt.items[part_idx] for part_idx in parts],
            prompt_id=prompt.prompt_id,
            request_id=request_id,
            num_parts=prompt.num_parts,
            timeout=None if deadline == inf else max(deadline - self._loop.time(), 0.001),
            **prompt.options,
        ) as call:
            async for event in call:
                await self._take(member, event, sent)

    def _landed(self, member: Member, sent: set[int], call: asyncio.Task[None]) -> None:
        """A call has ended, however: what it has left open goes elsewhere, or fails."""
        self._calls.discard(call)
        member.calls.discard(call)
        for part_idx in sent:
            member.ended(self, part_idx)
        error = _error_of(member, call)
        if self._closed or error is None:
            self._roster.left(member)  # its parts have told what there is to tell
        else:
            for part_idx in sorted(sent):
                self._fail(part_idx, error)
            self._roster.report(member, error)
        self.wake()

    async def _take(self, member: Member, event: Event, sent: set[int]) -> None:
        match event:
            case Accepted():
                self._sink.accepted(event)
            case Layout(chunk):
                self._sink.check(chunk)
                self._sink.layout(chunk)
            case Ready(chunk):
                try:
                    self._sink.check(chunk)
                except ChunkError:
                    await member.client.abandon([chunk])
                    raise
                self._end(member, chunk.part_idx, sent)
                self._contents.note(chunk.content_key, chunk.encoder.instance_id)
                self._ledger.ready(chunk.part_idx)
                self._sink.ready(chunk)
                self._roster.report(member, None)
            case PartFailed():
                self._end(member, event.part_idx, sent)
                self._fail(event.part_idx, event.error)
                self._roster.report(member, event.error)
                self.wake()
            case PartCancelled():
                self._end(member, event.part_idx, sent)
                self._ledger.cancelled(event.part_idx)
                self._sink.cancelled(event.part_idx)

    def _end(self, member: Member, part_idx: int, sent: set[int]) -> None:
        sent.discard(part_idx)
        member.ended(self, part_idx)

    def _fail(self, part_idx: int, error: EncoderError) -> None:
        if self._keys and part_idx in self._keys:
            self._contents.forget(self._keys[part_idx])
        if self._ledger.failed(part_idx, error, self._loop.time()):
            self._sink.failed(part_idx, error)


def _error_of(member: Member, call: asyncio.Task[None]) -> EncoderError | None:
    if call.cancelled():
        return EncoderError(grpc.StatusCode.UNAVAILABLE, f"{member.target} was given up: {member.trouble}")
    match call.exception():
        case None:
            return None
        case EncoderError() as error:
            return error
        case ChunkError() as error:
            return EncoderError(grpc.StatusCode.INTERNAL, f"what {member.target} tells contradicts itself: {error}")
        case error:
            logger.error("a call to %s failed here", member.target, exc_info=error)
            return EncoderError(grpc.StatusCode.INTERNAL, f"the call to {member.target} failed here: {error!r}")


def _content_key(namespace: bytes, salt: bytes, item: MediaItem) -> bytes:
    match item.WhichOneof("source"):
        case "content_key":
            return item.content_key
        case "data" | "frames" if len(namespace) == 32:
            return item_content_key(namespace, salt, item)
        case _:
            return b""  # the encoder alone knows the bytes
