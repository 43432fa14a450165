"""The estimate of what an item costs: the right order, and bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from encoder_client import audio, image, video
from encoder_client.fleet.media_cost import HELD, LEAST, MOST, UNKNOWN, estimated_cost
from epd.encoder.v1.media_pb2 import AudioOptions, MediaItem, Modality, VideoOptions

sizes = st.integers(0, 1 << 16)


@given(sizes, sizes)
def test_more_bytes_cost_no_less(one: int, other: int) -> None:
    small, large = sorted((one, other))
    for make in (image, video, audio):
        assert LEAST <= estimated_cost(make(bytes(small))) <= estimated_cost(make(bytes(large))) <= MOST


def test_options_bound_it() -> None:
    file = bytes(1 << 20)
    assert estimated_cost(image(file, max_pixels=196_000)) == 1000
    assert estimated_cost(image(b"small", min_pixels=196_000)) == 1000
    assert estimated_cost(video(file, options=VideoOptions(total_pixels=392_000))) == 1000
    assert estimated_cost(audio(file, options=AudioOptions(end_seconds=10))) == 500


def test_frames_count_together() -> None:
    frame = bytes(49_000)
    assert estimated_cost(video([frame] * 8)) == 4 * estimated_cost(image(frame))


def test_what_is_elsewhere_costs_a_photograph_and_what_is_held_nothing() -> None:
    assert estimated_cost(image("https://example.com/a.jpg")) == UNKNOWN
    assert estimated_cost(MediaItem(modality=Modality.MODALITY_IMAGE, content_key=bytes(32))) == HELD
