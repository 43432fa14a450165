"""What is sent: no two files are equal, and all of them are what they are called."""

from __future__ import annotations

import pytest

from encoder_svc.bench.media import CLIP_RATE, CLIP_SECONDS, MEDIUM_NAMES, SOUND_SECONDS, make_media
from encoder_svc.errors import SetupError
from encoder_svc.media.item import open_media
from tests.models.family_cases import LIMITS


@pytest.mark.parametrize("medium", MEDIUM_NAMES)
def test_no_file_comes_twice_and_each_can_be_decoded(medium: str) -> None:
    media = make_media(medium, 64, 5)  # type: ignore[arg-type]
    items = [media.next() for _ in range(20)]
    assert len({item.data for item in items}) == 20
    first, again = items[0], items[len(media.files)]
    for item in (first, again):
        probe = open_media(item, [item.data], LIMITS)
        match medium:
            case "video":
                assert len(probe.frame_times) == CLIP_SECONDS * CLIP_RATE  # type: ignore[union-attr]
                (frame,) = probe.frames([17])  # type: ignore[union-attr]
                assert frame.shape == (64, 64, 3)
                assert frame.float().std() > 10, "a photograph, and not one colour"
            case "audio":
                assert len(probe.waveform(16_000)) == SOUND_SECONDS * 16_000  # type: ignore[union-attr]
            case _:
                assert probe.decode().shape == (64, 64, 3)  # type: ignore[union-attr]


def test_an_odd_side_is_no_video() -> None:
    with pytest.raises(SetupError, match="even"):
        make_media("video", 63, 1)
