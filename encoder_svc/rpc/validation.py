"""From messages of the contract to commands of the runtime: what passes here needs no second look.

A message that is wrong in itself is refused as a whole, with the path of the field. What only the bytes of an item can
show (empty, not an image, too many pixels) is left to the media workers: it fails that item alone.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

from google.protobuf.duration_pb2 import Duration

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.rpc.media_options import check_not_negative, check_options, invalid
from encoder_svc.runtime.commands import AcquireCommand, CancelCommand, EncodeCommand, ItemCommand, SubscribeCommand
from encoder_svc.settings import Settings
from epd.encoder.v1.encoder_service_pb2 import (
    CACHE_POLICY_BYPASS,
    CACHE_POLICY_USE,
    DELIVERY_CACHE_ONLY,
    DELIVERY_CALLER,
    DELIVERY_RECEIVERS,
    READ_OUTCOME_OK,
    AcquireRequest,
    CachePolicy,
    CancelRequest,
    Delivery,
    EncodeRequest,
    ReadOutcome,
    ReleaseRequest,
    RenewRequest,
    SubscribeRequest,
    UploadHeader,
)
from epd.encoder.v1.media_pb2 import MODALITY_UNSPECIFIED, MODALITY_VIDEO, MediaItem, Modality

# Protobuf makes a new list at each look into an enumeration.
_CACHE_POLICIES, _DELIVERIES = frozenset(CachePolicy.values()), frozenset(Delivery.values())
_MODALITIES, _READ_OUTCOMES = frozenset(Modality.values()), frozenset(ReadOutcome.values())

MAX_NAME_BYTES = 256
"""Of ``request_id``, ``prompt_id``, receivers and ``mime_type``, in UTF-8."""
MAX_SALT_BYTES = 64
MAX_LEASES = 1024
"""Of one ``Release`` or ``Renew``."""
DIGEST_BYTES = 32
"""Of SHA-256, content keys and fingerprints."""
PRIORITIES = range(-100, 101)

MAX_URI_BYTES = 8192
"""Of an address that is fetched. `data:` addresses are bounded like inline media."""
MAX_PIECE_BYTES = 1 << 20
"""Of an upload's piece."""


def to_encode_command(
    request: EncodeRequest,
    data: Mapping[int, bytes],
    settings: Settings,
    *,
    identity: str,
    deadline: float | None,
    new_id: Callable[[], str],
) -> EncodeCommand:
    """Checks an ``Encode`` request and turns it into a command.

    Args:
        request: the message, in which each ``items[i].data`` is set but empty.
        data: what it would be, by ``i``.
        settings: the limits.
        identity: who calls.
        deadline: when the caller stops waiting, on the runtime's clock.
        new_id: makes a request id when the caller gave none.

    Raises:
        ServiceError: the request is wrong as a whole.
    """
    _check_name(request.request_id, "request_id")
    _check_name(request.prompt_id, "prompt_id")
    if not request.items:
        raise invalid("items", "a request needs at least one item")
    if len(request.items) > settings.max_items:
        raise invalid("items", f"{len(request.items)}; a request takes at most {settings.max_items} (Limits.max_items)")
    num_parts = request.num_parts or len(request.items)
    if num_parts > settings.max_parts:
        raise invalid("num_parts", f"{num_parts}; a prompt takes at most {settings.max_parts} (Limits.max_parts)")
    if request.priority not in PRIORITIES:
        raise invalid("priority", f"must be from {PRIORITIES[0]} to {PRIORITIES[-1]}")
    if request.cache_policy not in _CACHE_POLICIES:
        raise invalid("cache_policy", f"{request.cache_policy} is no CachePolicy that this server knows")
    if len(request.cache_salt) > MAX_SALT_BYTES:
        raise invalid("cache_salt", f"{len(request.cache_salt)} bytes; at most {MAX_SALT_BYTES}")
    _check_digest(request.expected_fingerprint, "expected_fingerprint")
    delivery, receivers = _delivery(request, settings)
    if delivery == DELIVERY_CACHE_ONLY and request.cache_policy == CACHE_POLICY_BYPASS:
        raise invalid("cache_policy", "BYPASS keeps nothing, and DELIVERY_CACHE_ONLY only keeps; use USE or REFRESH")
    lease_ttl = _ttl(request.lease_ttl, "lease_ttl", settings)
    _check_places(request.items, num_parts)
    items = tuple(_item(item, data.get(i, b""), f"items[{i}]", settings) for i, item in enumerate(request.items))
    request_id = request.request_id or new_id()
    return EncodeCommand(
        identity=identity,
        request_id=request_id,
        prompt_id=request.prompt_id or request_id,
        num_parts=num_parts,
        items=items,
        delivery=delivery,
        receivers=receivers,
        priority=request.priority,
        cache_policy=request.cache_policy or CACHE_POLICY_USE,
        cache_salt=request.cache_salt,
        expected_fingerprint=request.expected_fingerprint,
        lease_ttl=lease_ttl,
        deadline=deadline,
        skip_layout=request.skip_layout,
    )


def to_acquire_command(request: AcquireRequest, settings: Settings, *, identity: str) -> AcquireCommand:
    """Checks an ``Acquire`` request and turns it into a command.

    Raises:
        ServiceError: a field is wrong.
    """
    _check_digest(request.content_key, "content_key", required=True)
    _check_name(request.prompt_id, "prompt_id")
    num_parts = request.num_parts or 1
    if request.part_idx >= num_parts:
        raise invalid("part_idx", f"{request.part_idx} is not below num_parts ({num_parts}); parts are counted from 0")
    return AcquireCommand(
        identity=identity,
        content_key=request.content_key,
        receivers=_receivers(request.receivers, settings, caller_may_be_one=True),
        prompt_id=request.prompt_id,
        part_idx=request.part_idx,
        num_parts=num_parts,
        lease_ttl=_ttl(request.lease_ttl, "lease_ttl", settings),
    )


def to_subscribe_command(request: SubscribeRequest, *, identity: str) -> SubscribeCommand:
    """Checks a ``Subscribe`` request and turns it into a command.

    Raises:
        ServiceError: it names no receiver.
    """
    if not request.receiver_id:
        raise invalid("receiver_id", "a receiver needs a name")
    _check_name(request.receiver_id, "receiver_id")
    return SubscribeCommand(identity, request.receiver_id, request.incarnation)


def check_upload_header(header: UploadHeader) -> None:
    """Checks the first message of an ``Upload``.

    Raises:
        ServiceError: a field is wrong.
    """
    _check_digest(header.sha256, "header.sha256")


def check_piece(piece: bytes) -> None:
    """Checks a later message of an ``Upload``.

    Raises:
        ServiceError: it is too large.
    """
    if len(piece) > MAX_PIECE_BYTES:
        raise invalid("piece", f"{len(piece)} bytes; a piece has at most {MAX_PIECE_BYTES}")


def to_cancel_command(request: CancelRequest, *, identity: str) -> CancelCommand:
    """Checks a ``Cancel`` request and turns it into a command.

    Raises:
        ServiceError: it names no target.
    """
    if request.WhichOneof("target") == "request_id" and request.request_id:
        return CancelCommand(identity, "request", request.request_id)
    if request.prompt_id:
        return CancelCommand(identity, "prompt", request.prompt_id)
    raise invalid("target", "name a request_id or a prompt_id to cancel")


def to_releases(request: ReleaseRequest) -> list[tuple[bytes, ReadOutcome]]:
    """Checks a ``Release`` request.

    Raises:
        ServiceError: too many leases, or an unknown outcome.
    """
    _check_lease_count(len(request.leases), "leases")
    for i, lease in enumerate(request.leases):
        if lease.outcome not in _READ_OUTCOMES:
            raise invalid(f"leases[{i}].outcome", f"{lease.outcome} is no ReadOutcome that this server knows")
    return [(lease.lease_id, lease.outcome or READ_OUTCOME_OK) for lease in request.leases]


def to_renewals(request: RenewRequest, settings: Settings) -> tuple[list[bytes], float | None]:
    """Checks a ``Renew`` request.

    Returns:
        The leases, and how many seconds they are to live (None: the default).

    Raises:
        ServiceError: too many leases, or a wrong duration.
    """
    _check_lease_count(len(request.lease_ids), "lease_ids")
    return list(request.lease_ids), _ttl(request.ttl, "ttl", settings)


def _delivery(request: EncodeRequest, settings: Settings) -> tuple[Delivery, tuple[str, ...]]:
    if request.delivery not in _DELIVERIES:
        raise invalid("delivery", f"{request.delivery} is no Delivery that this server knows")
    if request.delivery != DELIVERY_RECEIVERS:
        if request.receivers:
            raise invalid("receivers", "receivers are named only with DELIVERY_RECEIVERS")
        if request.delivery == DELIVERY_CACHE_ONLY:
            return DELIVERY_CACHE_ONLY, ()
        return DELIVERY_CALLER, ("",)
    if not request.receivers:
        raise invalid("receivers", "DELIVERY_RECEIVERS needs the names of the receivers")
    return DELIVERY_RECEIVERS, _receivers(request.receivers, settings, caller_may_be_one=False)


def _receivers(names: Sequence[str], settings: Settings, *, caller_may_be_one: bool) -> tuple[str, ...]:
    if len(names) > settings.max_receivers:
        raise invalid("receivers", f"{len(names)}; at most {settings.max_receivers} (Limits.max_receivers)")
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not name and not caller_may_be_one:
            raise invalid(f"receivers[{i}]", "a receiver needs a name")
        _check_name(name, f"receivers[{i}]")
        if name in seen:
            raise invalid(f"receivers[{i}]", "is named twice")
        seen.add(name)
    return tuple(names)


def _check_places(items: Iterable[MediaItem], num_parts: int) -> None:
    seen: set[int] = set()
    for i, item in enumerate(items):
        path = f"items[{i}].part_idx"
        if item.part_idx >= num_parts:
            raise invalid(path, f"{item.part_idx} is not below num_parts ({num_parts}); parts are counted from 0")
        if item.part_idx in seen:
            raise invalid(path, f"part {item.part_idx} is in the request twice")
        seen.add(item.part_idx)


def _item(item: MediaItem, data: bytes, path: str, settings: Settings) -> ItemCommand:
    if item.modality not in _MODALITIES:
        raise invalid(f"{path}.modality", f"{item.modality} is no Modality that this server knows")
    if item.modality == MODALITY_UNSPECIFIED:
        raise invalid(f"{path}.modality", "is required: MODALITY_IMAGE, MODALITY_VIDEO or MODALITY_AUDIO")
    _check_name(item.mime_type, f"{path}.mime_type")
    _check_digest(item.content_sha256, f"{path}.content_sha256")
    check_options(item, path)
    files = _files(item, data, path, settings)
    frames_per_second = item.frames.fps if item.WhichOneof("source") == "frames" else None
    if files:
        item.ClearField("source")
    # A copy of its own: the item would keep the whole request alive, media and all.
    lean = MediaItem()
    lean.CopyFrom(item)
    if frames_per_second is not None:
        lean.frames.fps = frames_per_second
        lean.frames.SetInParent()
    return ItemCommand(item=lean, files=files)


def _files(item: MediaItem, data: bytes, path: str, settings: Settings) -> tuple[bytes, ...]:
    """The media files that are in the item; none if it says where they are."""
    match item.WhichOneof("source"):
        case None:
            raise invalid(path, "has no media: set `data`, `uri`, `upload_id`, `content_key` or `frames`")
        case "content_key":
            _check_digest(item.content_key, f"{path}.content_key", required=True)
            return ()
        case "upload_id":
            _check_name(item.upload_id, f"{path}.upload_id")
            return ()
        case "uri":
            _check_uri(item.uri, f"{path}.uri", settings)
            return ()
        case source:
            return _inline_files(item, source, data, path, settings)


def _check_uri(uri: str, path: str, settings: Settings) -> None:
    inline = uri[:5].lower() == "data:"
    most = int(settings.max_inline_bytes) * 4 // 3 + MAX_URI_BYTES if inline else MAX_URI_BYTES
    if len(uri) > most:
        raise invalid(path, f"{len(uri)} characters; at most {most}")


def _inline_files(item: MediaItem, source: str, data: bytes, path: str, settings: Settings) -> tuple[bytes, ...]:
    if source == "data":
        files: tuple[bytes, ...] = (data,)
    else:
        if item.content_sha256:
            raise invalid(f"{path}.content_sha256", "is the digest of one file; frames have none")
        if item.modality != MODALITY_VIDEO:
            raise invalid(f"{path}.frames", "only MODALITY_VIDEO is given as frames")
        if not item.frames.frames:
            raise invalid(f"{path}.frames.frames", "a video needs at least one frame")
        check_not_negative(item.frames.fps, f"{path}.frames.fps")
        files = tuple(item.frames.frames)
    size = sum(map(len, files))
    if size > settings.max_inline_bytes:
        raise ServiceError(
            Reason.MEDIA_TOO_LARGE,
            f"{path}.{source}: {size} bytes; media inside a request have at most {int(settings.max_inline_bytes)} "
            "(Limits.max_inline_bytes), larger ones go through Upload",
            field=f"{path}.{source}",
        )
    return files


def _check_name(name: str, path: str) -> None:
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise invalid(path, f"{size} bytes; at most {MAX_NAME_BYTES}")
    if not name.isprintable() and any(unicodedata.category(character) == "Cc" for character in name):
        raise invalid(path, "has control characters")


def _check_digest(digest: bytes, path: str, *, required: bool = False) -> None:
    if (digest or required) and len(digest) != DIGEST_BYTES:
        raise invalid(path, f"has {len(digest)} bytes; it must have {DIGEST_BYTES}")


def _check_lease_count(count: int, path: str) -> None:
    if count > MAX_LEASES:
        raise invalid(path, f"{count} leases; one call takes at most {MAX_LEASES}")


def _ttl(duration: Duration, path: str, settings: Settings) -> float | None:
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds < 0 or not 0 <= duration.nanos < 10**9:
        raise invalid(path, "must not be negative, and its nanos must be from 0 to 999,999,999")
    return min(seconds, settings.max_lease_seconds) if seconds else None
