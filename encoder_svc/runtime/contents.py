"""How a part comes to its content. Pure; the time is passed in.

Its media are brought and hashed, and what they name is found in the cache, joined in the making, or begun.
"""

from __future__ import annotations

from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.admission import Admission
from encoder_svc.runtime.commands import ItemCommand
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.content_names import name_content
from encoder_svc.runtime.observer import Observer
from encoder_svc.runtime.parts import Part
from encoder_svc.runtime.slots import ContentName, Slot
from encoder_svc.runtime.store import Store
from encoder_svc.runtime.uploads import Uploads
from epd.encoder.v1.encoder_service_pb2 import CACHE_POLICY_BYPASS, CACHE_POLICY_REFRESH
from epd.encoder.v1.media_pb2 import MediaItem


class SourceHands(Protocol):
    """Who brings media that are not at hand, and hashes what is large."""

    def bring(self, part: int, item: MediaItem, files: tuple[bytes, ...]) -> None:
        """Fetches the item's ``uri`` unless ``files`` are given, hashes, and reports the part as sourced or failed."""
        ...

    def stop_bringing(self, part: int) -> None:
        """The part has ended. Of no effect if nothing is being brought for it."""
        ...


class ContentListener(Protocol):
    """Who is told what was found."""

    def found(self, part: Part, slot: Slot, now: float) -> None:
        """The embedding is cached."""
        ...

    def joined(self, part: Part, computation: Computation, now: float) -> None:
        """The embedding is being made; the part waits for it with others."""
        ...

    def begun(self, computation: Computation) -> None:
        """The embedding is to be made."""
        ...

    def lacking(self, part: Part, error: ServiceError, now: float) -> None:
        """There is no content: the part fails."""
        ...


class Contents:
    """Finds what parts ask for.

    Args:
        hands: who brings media.
        store: what is cached or in the making.
        uploads: files that were sent ahead.
        admission: what fetched files are charged to.
        observer: counts.
        listener: who is told.
    """

    def __init__(
        self,
        hands: SourceHands,
        store: Store,
        uploads: Uploads,
        admission: Admission,
        observer: Observer,
        listener: ContentListener,
    ) -> None:
        self._hands = hands
        self._store = store
        self._uploads = uploads
        self._admission = admission
        self._observer = observer
        self._listener = listener

    def seek(self, part: Part, item: ItemCommand, cache_namespace: bytes, now: float) -> None:
        """Begins with a part that was admitted."""
        identity = part.request.command.identity
        match item.item.WhichOneof("source"):
            case "content_key":
                if not self._find(part, ContentName(identity, item.item.content_key), now):
                    message = "no embedding of this content is here; send the media themselves"
                    error = ServiceError(Reason.CONTENT_UNKNOWN, message, field="content_key")
                    self._listener.lacking(part, error, now)
            case "upload_id":
                try:
                    file, digest = self._uploads.take(identity, item.item.upload_id)
                    self._admission.media_fetched(part, len(file))
                except ServiceError as error:
                    self._listener.lacking(part, error, now)
                else:
                    self._start(part, (file,), digest, cache_namespace, now)
            case _ if item.digest is not None:
                self._start(part, item.files, item.digest, cache_namespace, now)
            case _:
                self._hands.bring(part.key, item.item, item.files)

    def sourced(
        self, part: Part, files: tuple[bytes, ...], digest: bytes, cache_namespace: bytes, seconds: float, now: float
    ) -> None:
        """A part's media were brought, and hashed."""
        part.fetch_seconds = seconds
        self._observer.stage_took("fetch", seconds)
        if not part.media_bytes:
            try:
                self._admission.media_fetched(part, sum(map(len, files)))
            except ServiceError as error:
                self._listener.lacking(part, error, now)
                return
        self._start(part, files, digest, cache_namespace, now)

    def _start(self, part: Part, files: tuple[bytes, ...], digest: bytes, cache_namespace: bytes, now: float) -> None:
        """The media are at hand: takes the embedding from the cache, joins who makes it, or has it made."""
        command = part.request.command
        if part.item.content_sha256 not in (b"", digest):
            message = "the media are not those that content_sha256 names; send them again, or the right digest"
            error = ServiceError(Reason.MEDIA_DIGEST_MISMATCH, message, field="content_sha256")
            self._listener.lacking(part, error, now)
            return
        name = None
        if command.cache_policy != CACHE_POLICY_BYPASS:
            name = name_content(command.identity, cache_namespace, command.cache_salt, part.item, digest)
            if command.cache_policy != CACHE_POLICY_REFRESH and self._find(part, name, now):
                return
            self._observer.cache_looked_up("miss")
        computation = self._store.begin(part.item, files, name, part.request, now)
        computation.parts.append(part)
        part.computation = computation
        self._listener.begun(computation)

    def _find(self, part: Part, name: ContentName, now: float) -> bool:
        """Takes the embedding from the cache, or joins who makes it."""
        slot = self._store.cached(name)
        if slot is not None:
            assert slot.layout is not None
            if slot.layout.modality != part.item.modality:
                return False  # Only a content key that was given can be of another modality.
            self._observer.cache_looked_up("hit")
            self._listener.found(part, slot, now)
            return True
        computation = self._store.in_the_making(name)
        if computation is None or computation.item.modality != part.item.modality:
            return False
        self._observer.cache_looked_up("joined")
        computation.parts.append(part)
        part.computation = computation
        self._listener.joined(part, computation, now)
        return True
