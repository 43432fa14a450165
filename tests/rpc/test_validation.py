"""What is refused before the runtime hears of it: each wrong field by its own path, and nothing that is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from pydantic import ByteSize

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.rpc.validation import (
    MAX_LEASES,
    MAX_URI_BYTES,
    to_cancel_command,
    to_encode_command,
    to_releases,
    to_renewals,
)
from encoder_svc.rpc.wire import parse_encode_request
from encoder_svc.runtime.commands import CancelCommand, EncodeCommand
from encoder_svc.settings import Settings
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.media_pb2 import FrameSequence, MediaItem, Modality

IMAGE, VIDEO, AUDIO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO
SETTINGS = Settings(
    model=Path("/nowhere"),
    max_inline_bytes=ByteSize(1000),
    max_items=3,
    max_parts=8,
    max_receivers=2,
    lease_seconds=10,
    max_lease_seconds=20,
)


def image(part_idx: int = 0, data: bytes = b"bytes", **fields: object) -> MediaItem:
    return MediaItem(part_idx=part_idx, modality=IMAGE, data=data, **fields)  # type: ignore[arg-type]


def video(**options: float) -> MediaItem:
    item = MediaItem(modality=VIDEO, data=b"bytes")
    item.video.SetInParent()
    for name, value in options.items():
        setattr(item.video, name, value)
    return item


def check(request: pb.EncodeRequest, deadline: float | None = None) -> EncodeCommand:
    message, data = parse_encode_request(request.SerializeToString())
    return to_encode_command(message, data, SETTINGS, identity="me", deadline=deadline, new_id=lambda: "made")


def edit(change: Callable[[pb.EncodeRequest], object]) -> pb.EncodeRequest:
    request = pb.EncodeRequest(items=[image()])
    change(request)
    return request


def with_item(item: MediaItem) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[image(0), item])


NAN, INFINITY = float("nan"), float("inf")
WRONG_REQUESTS = {
    "no items": ("items", pb.EncodeRequest()),
    "too many items": ("items", pb.EncodeRequest(items=[image(i) for i in range(4)])),
    "too many parts": ("num_parts", pb.EncodeRequest(items=[image()], num_parts=9)),
    "part outside": ("items[1].part_idx", pb.EncodeRequest(items=[image(0), image(5)], num_parts=5)),
    "part outside by count": ("items[0].part_idx", pb.EncodeRequest(items=[image(1)])),
    "part twice": ("items[1].part_idx", pb.EncodeRequest(items=[image(1), image(1)])),
    "request id too long": ("request_id", pb.EncodeRequest(items=[image()], request_id="é" * 129)),
    "request id with control": ("request_id", pb.EncodeRequest(items=[image()], request_id="a\nb")),
    "request id with C1 control": ("request_id", pb.EncodeRequest(items=[image()], request_id="a\x85b")),
    "prompt id too long": ("prompt_id", pb.EncodeRequest(items=[image()], prompt_id="x" * 257)),
    "prompt id with control": ("prompt_id", pb.EncodeRequest(items=[image()], prompt_id="\0")),
    "priority too high": ("priority", pb.EncodeRequest(items=[image()], priority=101)),
    "priority too low": ("priority", pb.EncodeRequest(items=[image()], priority=-101)),
    "unknown delivery": ("delivery", edit(lambda request: setattr(request, "delivery", 77))),
    "unknown cache policy": ("cache_policy", edit(lambda request: setattr(request, "cache_policy", 77))),
    "salt too long": ("cache_salt", pb.EncodeRequest(items=[image()], cache_salt=bytes(65))),
    "short fingerprint": ("expected_fingerprint", pb.EncodeRequest(items=[image()], expected_fingerprint=bytes(31))),
    "negative ttl": ("lease_ttl", pb.EncodeRequest(items=[image()], lease_ttl=Duration(seconds=-1))),
    "negative nanos": ("lease_ttl", pb.EncodeRequest(items=[image()], lease_ttl=Duration(seconds=1, nanos=-1))),
    "too many nanos": ("lease_ttl", pb.EncodeRequest(items=[image()], lease_ttl=Duration(nanos=10**9))),
    "receivers for the caller": ("receivers", pb.EncodeRequest(items=[image()], receivers=["lm"])),
    "receivers missing": ("receivers", pb.EncodeRequest(items=[image()], delivery=pb.DELIVERY_RECEIVERS)),
    "receivers too many": (
        "receivers",
        pb.EncodeRequest(items=[image()], delivery=pb.DELIVERY_RECEIVERS, receivers=["a", "b", "c"]),
    ),
    "receiver twice": (
        "receivers[1]",
        pb.EncodeRequest(items=[image()], delivery=pb.DELIVERY_RECEIVERS, receivers=["a", "a"]),
    ),
    "receiver unnamed": (
        "receivers[0]",
        pb.EncodeRequest(items=[image()], delivery=pb.DELIVERY_RECEIVERS, receivers=[""]),
    ),
    "receiver too long": (
        "receivers[0]",
        pb.EncodeRequest(items=[image()], delivery=pb.DELIVERY_RECEIVERS, receivers=["x" * 257]),
    ),
    "no modality": ("items[1].modality", with_item(MediaItem(part_idx=1, data=b"x"))),
    "unknown modality": ("items[1].modality", with_item(MediaItem(part_idx=1, data=b"x", modality=9))),  # type: ignore[arg-type]
    "no source": ("items[1]", with_item(MediaItem(part_idx=1, modality=IMAGE))),
    "short digest": ("items[1].content_sha256", with_item(image(1, content_sha256=bytes(31)))),
    "short content key": ("items[1].content_key", with_item(MediaItem(part_idx=1, modality=IMAGE, content_key=b""))),
    "mime type too long": ("items[1].mime_type", with_item(image(1, mime_type="x" * 257))),
    "frames of an image": (
        "items[1].frames",
        with_item(MediaItem(part_idx=1, modality=IMAGE, frames=FrameSequence(frames=[b"x"]))),
    ),
    "no frames": ("items[1].frames.frames", with_item(MediaItem(part_idx=1, modality=VIDEO, frames=FrameSequence()))),
    "negative frame rate": (
        "items[1].frames.fps",
        with_item(MediaItem(part_idx=1, modality=VIDEO, frames=FrameSequence(frames=[b"x"], fps=-1))),
    ),
    "options of another modality": ("items[0].video", pb.EncodeRequest(items=[image(video={})])),
    "audio options of an image": ("items[0].audio", pb.EncodeRequest(items=[image(audio={})])),
    "pixels in disorder": (
        "items[0].image.min_pixels",
        pb.EncodeRequest(items=[image(image={"min_pixels": 2, "max_pixels": 1})]),
    ),
    "unknown detail": ("items[0].image.detail", edit(lambda request: setattr(request.items[0].image, "detail", 9))),
    "infinite fps": ("items[0].video.fps", pb.EncodeRequest(items=[video(fps=INFINITY)])),
    "NaN fps": ("items[0].video.fps", pb.EncodeRequest(items=[video(fps=NAN)])),
    "negative start": ("items[0].video.start_seconds", pb.EncodeRequest(items=[video(start_seconds=-0.1)])),
    "fps and frames": ("items[0].video.num_frames", pb.EncodeRequest(items=[video(fps=1, num_frames=4)])),
    "frames in disorder": ("items[0].video.min_frames", pb.EncodeRequest(items=[video(min_frames=5, max_frames=4)])),
    "video pixels in disorder": (
        "items[0].video.min_pixels",
        pb.EncodeRequest(items=[video(min_pixels=5, max_pixels=4)]),
    ),
    "end before start": ("items[0].video.end_seconds", pb.EncodeRequest(items=[video(start_seconds=2, end_seconds=1)])),
    "cache only past the cache": (
        "cache_policy",
        pb.EncodeRequest(items=[image()], delivery=pb.DELIVERY_CACHE_ONLY, cache_policy=pb.CACHE_POLICY_BYPASS),
    ),
    "receivers of the cache": (
        "receivers",
        pb.EncodeRequest(items=[image()], delivery=pb.DELIVERY_CACHE_ONLY, receivers=["a"]),
    ),
    "upload id with control": ("items[1].upload_id", with_item(MediaItem(part_idx=1, modality=IMAGE, upload_id="\n"))),
    "audio end NaN": (
        "items[0].audio.end_seconds",
        pb.EncodeRequest(items=[MediaItem(modality=AUDIO, data=b"x", audio={"end_seconds": NAN})]),
    ),
}


@pytest.mark.parametrize(("field", "request_"), WRONG_REQUESTS.values(), ids=WRONG_REQUESTS.keys())
def test_a_wrong_field_is_refused_by_its_path(field: str, request_: pb.EncodeRequest) -> None:
    with pytest.raises(ServiceError, match=f"^{re.escape(field)}: ") as refused:
        check(request_)
    assert refused.value.reason is Reason.REQUEST_INVALID
    assert refused.value.field == field


@pytest.mark.parametrize(
    "source", [{"uri": "https://example.org/cat.jpg"}, {"upload_id": "abc"}, {"content_key": bytes(range(32))}]
)
def test_media_that_are_elsewhere_come_without_files(source: dict[str, Any]) -> None:
    command = check(pb.EncodeRequest(items=[MediaItem(modality=IMAGE, **source)]))
    assert command.items[0].files == ()
    assert command.items[0].item == MediaItem(modality=IMAGE, **source)


def test_a_data_uri_may_be_as_long_as_inline_media() -> None:
    longest = SETTINGS.max_inline_bytes * 4 // 3 + MAX_URI_BYTES - len("data:,")
    check(pb.EncodeRequest(items=[MediaItem(modality=IMAGE, uri="data:," + "x" * longest)]))
    for uri in ("data:," + "x" * (longest + 1), "https://x/" + "x" * MAX_URI_BYTES):
        with pytest.raises(ServiceError, match=r"^items\[0\]\.uri: "):
            check(pb.EncodeRequest(items=[MediaItem(modality=IMAGE, uri=uri)]))


def test_a_delivery_to_the_cache_has_no_receivers() -> None:
    command = check(pb.EncodeRequest(items=[image()], delivery=pb.DELIVERY_CACHE_ONLY))
    assert (command.delivery, command.receivers) == (pb.DELIVERY_CACHE_ONLY, ())


@pytest.mark.parametrize(
    "item",
    [
        image(1, data=bytes(1001)),
        MediaItem(part_idx=1, modality=VIDEO, frames=FrameSequence(frames=[bytes(501), bytes(500)])),
    ],
)
def test_media_above_the_inline_limit_are_told_of_upload(item: MediaItem) -> None:
    with pytest.raises(ServiceError, match=r"1001 bytes.* 1000 .*Upload") as refused:
        check(with_item(item))
    assert refused.value.reason is Reason.MEDIA_TOO_LARGE


def test_a_request_with_nothing_set_gets_the_defaults() -> None:
    command = check(pb.EncodeRequest(items=[image()]))
    assert (command.request_id, command.prompt_id, command.num_parts) == ("made", "made", 1)
    assert (command.delivery, command.receivers) == (pb.DELIVERY_CALLER, ("",))
    assert (command.cache_policy, command.lease_ttl, command.deadline) == (pb.CACHE_POLICY_USE, None, None)


def test_a_request_with_everything_set_comes_through_whole() -> None:
    data = bytes(range(256))
    frames = FrameSequence(frames=[b"one", b"two"], fps=2)
    options = video(fps=2, start_seconds=1, end_seconds=3, min_frames=2, max_frames=9, use_audio_in_video=True).video
    request = pb.EncodeRequest(
        request_id="request",
        prompt_id="prompt",
        num_parts=8,
        priority=-100,
        cache_policy=pb.CACHE_POLICY_BYPASS,
        cache_salt=bytes(64),
        expected_fingerprint=bytes(32),
        lease_ttl=Duration(seconds=15),
        skip_layout=True,
        delivery=pb.DELIVERY_RECEIVERS,
        receivers=["lm-3/tp0", "lm-3/tp1"],
        items=[
            image(7, data, mime_type="image/png", content_sha256=bytes(32), image={"min_pixels": 4, "max_pixels": 9}),
            MediaItem(part_idx=2, modality=VIDEO, frames=frames, video=options),
        ],
    )
    command = check(request, deadline=3.5)
    assert (command.identity, command.request_id, command.prompt_id) == ("me", "request", "prompt")
    assert command.num_parts == 8
    assert (command.receivers, command.priority, command.deadline) == (("lm-3/tp0", "lm-3/tp1"), -100, 3.5)
    assert (command.cache_salt, command.expected_fingerprint, command.skip_layout) == (bytes(64), bytes(32), True)
    assert command.lease_ttl == 15
    assert [item.files for item in command.items] == [(data,), (b"one", b"two")]
    first, second = (item.item for item in command.items)
    assert (first.part_idx, first.mime_type, first.image.max_pixels) == (7, "image/png", 9)
    assert (second.part_idx, second.video) == (2, options)
    # The bytes travel beside the item, once; only what the frames' digest needs stays.
    assert [item.WhichOneof("source") for item in (first, second)] == [None, "frames"]
    assert second.frames == FrameSequence(fps=2)


def test_bytes_that_only_decoding_can_judge_are_let_through() -> None:
    assert check(with_item(image(1, data=b""))).items[1].files == (b"",)


def test_a_lease_lives_no_longer_than_the_server_allows() -> None:
    assert check(pb.EncodeRequest(items=[image()], lease_ttl=Duration(seconds=9999))).lease_ttl == 20
    assert to_renewals(pb.RenewRequest(lease_ids=[b"a"], ttl=Duration(seconds=9999)), SETTINGS) == ([b"a"], 20)
    assert to_renewals(pb.RenewRequest(lease_ids=[b"a"]), SETTINGS) == ([b"a"], None)


@pytest.mark.parametrize(
    "request_", [pb.CancelRequest(), pb.CancelRequest(request_id=""), pb.CancelRequest(prompt_id="")]
)
def test_a_cancel_needs_a_target(request_: pb.CancelRequest) -> None:
    with pytest.raises(ServiceError, match=r"^target: ") as refused:
        to_cancel_command(request_, identity="me")
    assert refused.value.reason is Reason.REQUEST_INVALID


def test_a_cancel_names_a_request_or_a_prompt() -> None:
    assert to_cancel_command(pb.CancelRequest(request_id="a"), identity="me") == CancelCommand("me", "request", "a")
    assert to_cancel_command(pb.CancelRequest(prompt_id="a"), identity="me") == CancelCommand("me", "prompt", "a")


def test_releases_and_renewals_are_bounded_and_known() -> None:
    leases = [pb.LeaseRelease(lease_id=b"x") for _ in range(MAX_LEASES)]
    assert len(to_releases(pb.ReleaseRequest(leases=leases))) == MAX_LEASES
    assert to_releases(pb.ReleaseRequest(leases=leases[:1])) == [(b"x", pb.READ_OUTCOME_OK)]
    with pytest.raises(ServiceError, match=r"^leases: 1025"):
        to_releases(pb.ReleaseRequest(leases=[*leases, leases[0]]))
    with pytest.raises(ServiceError, match=r"^leases\[0\]\.outcome: 9"):
        to_releases(pb.ReleaseRequest(leases=[pb.LeaseRelease(outcome=9)]))  # type: ignore[arg-type]
    with pytest.raises(ServiceError, match=r"^lease_ids: 1025"):
        to_renewals(pb.RenewRequest(lease_ids=[b"x"] * 1025), SETTINGS)
