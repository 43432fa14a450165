from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.admission import Admission
from encoder_svc.runtime.parts import Part
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.runtime.recording_hands import part_of

IMAGE, AUDIO = Modality.MODALITY_IMAGE, Modality.MODALITY_AUDIO


def admission_of(max_parts: int = 1000, max_bytes: int = 1000, max_patches: int = 1 << 30) -> Admission:
    """An admission whose bounds are those of which the test speaks."""
    return Admission(max_parts, max_bytes, max_patches)


def counts(admission: Admission) -> tuple[int, int, int]:
    """What is charged."""
    return (admission.parts, admission.media_bytes, admission.patches)


def refusal(admission: Admission, parts: int, nbytes: int = 0, *, patches: int = 0, now: float = 0.0) -> ServiceError:
    """Why a request does not come in."""
    before = counts(admission)
    with pytest.raises(ServiceError) as fault:
        admission.enter(nbytes, [patches] * parts, now)
    assert counts(admission) == before
    return fault.value


def part(media_bytes: int = 0, patches: int = 0, modality: Modality = IMAGE) -> Part:
    """A part that was charged so much."""
    made = part_of(None)
    made.item = MediaItem(modality=modality)
    made.media_bytes, made.patches = media_bytes, patches
    return made


def test_f02_admission_is_bounded_by_parts_by_bytes_and_by_patches() -> None:
    admission = admission_of(max_parts=10, max_patches=100)
    admission.enter(900, [10] * 9, 0.0)
    for parts, nbytes, patches in ((2, 0, 0), (1, 101, 0), (1, 0, 11)):
        error = refusal(admission, parts, nbytes, patches=patches)
        assert error.reason is Reason.ADMISSION_FULL
        assert error.retry_after is not None
    admission.enter(100, [10], 0.0)
    assert refusal(admission, 1, 0).reason is Reason.ADMISSION_FULL
    admission.ended(part(patches=10), 1.0)
    assert refusal(admission, 1, 1).reason is Reason.ADMISSION_FULL
    admission.enter(0, [10], 1.0)
    assert counts(admission) == (10, 1000, 100)


@pytest.mark.parametrize(("parts", "nbytes"), [(11, 0), (1, 1001)])
def test_what_can_never_come_in_is_told_so_and_not_to_retry(parts: int, nbytes: int) -> None:
    error = refusal(admission_of(max_parts=10), parts, nbytes)
    assert error.reason is Reason.REQUEST_INVALID
    assert error.retry_after is None


def test_a_request_alone_is_never_refused_for_an_estimate() -> None:
    admission = admission_of(max_patches=100)
    admission.enter(0, [1000] * 50, 0.0)
    assert refusal(admission, 1, patches=1).reason is Reason.ADMISSION_FULL
    for _ in range(50):
        admission.ended(part(patches=1000), 1.0)
    assert counts(admission) == (0, 0, 0)
    admission.enter(0, [1000] * 50, 1.0)


def test_the_delay_grows_with_what_must_end_first_and_with_how_slowly_parts_end() -> None:
    admission = admission_of(max_parts=10)
    admission.enter(0, [0] * 10, 0.0)
    assert refusal(admission, 1).retry_after == 1.0, "nothing is known yet"
    now = 0.0
    for seconds_per_part in (0.1, 0.8):
        for _ in range(100):
            now += seconds_per_part
            admission.ended(part(), now)
            admission.enter(0, [0], now)
        one, ten = (refusal(admission, parts, now=now).retry_after for parts in (1, 10))
        assert one == pytest.approx(seconds_per_part, rel=0.1)
        assert ten == pytest.approx(min(10 * seconds_per_part, 30.0), rel=0.1)


def test_the_delay_is_true_from_the_first_second() -> None:
    admission = admission_of(max_parts=10)
    admission.enter(0, [0] * 10, 0.0)
    for index in range(1, 6):
        admission.ended(part(), index / 10)
        admission.enter(0, [0], index / 10)
    assert refusal(admission, 4, now=0.5).retry_after == pytest.approx(0.4, rel=0.1)


def test_the_delay_counts_bytes_and_patches_by_how_many_parts_hold_them() -> None:
    admission = admission_of(max_bytes=1000, max_patches=100)
    admission.enter(1000, [10] * 10, 0.0)
    for index in range(1, 51):
        admission.ended(part(100, 10), float(index))
        admission.enter(100, [10], float(index))
    assert refusal(admission, 1, 300, now=50.0).retry_after == pytest.approx(3.0, rel=0.15)
    assert refusal(admission, 1, 0, patches=70, now=50.0).retry_after == pytest.approx(7.0, rel=0.15)
    assert refusal(admission, 1, 300, patches=70, now=50.0).retry_after == pytest.approx(7.0, rel=0.15)


def test_a_pause_without_work_is_no_slowness() -> None:
    admission = admission_of(max_parts=1)
    now = 0.0
    for _ in range(50):
        now += 1000.0
        admission.enter(0, [0], now)
        admission.ended(part(), now + 0.01)
    admission.enter(0, [0], now + 2000.0)
    assert refusal(admission, 1, now=now + 2000.01).retry_after == pytest.approx(0.05)


def test_a_standstill_with_work_is_slowness() -> None:
    admission = admission_of(max_parts=1)
    for index in range(50):
        admission.enter(0, [0], index * 0.1)
        admission.ended(part(), index * 0.1 + 0.09)
    admission.enter(0, [0], 5.0)
    delays = [refusal(admission, 1, now=5.0 + later).retry_after or 0 for later in (0.0, 5.0, 10.0, 60.0)]
    assert delays == sorted(delays)
    assert delays[-1] == 30.0, "and the delay is bounded"


def test_the_rate_of_ends_is_that_of_the_last_seconds() -> None:
    admission = admission_of()
    assert admission.rate(0.0) < 0.01
    for index in range(200):
        admission.enter(0, [0], index / 4)
        admission.ended(part(), index / 4)
    assert admission.rate(50.0) == pytest.approx(4.0, rel=0.1)
    assert admission.rate(100.0) < 0.01


def test_estimates_follow_what_is_measured_by_modality() -> None:
    admission = admission_of()
    first = admission.estimate(IMAGE)
    assert first > 0
    admission.enter(0, [first], 0.0)
    image = part(patches=first)
    admission.measured(image, 40)
    assert (image.patches, admission.patches, admission.estimate(IMAGE)) == (40, 40, 40)
    assert admission.estimate(AUDIO) == first
    admission.ended(image, 1.0)
    assert counts(admission) == (0, 0, 0)
    for _ in range(100):
        admission.measured(part(patches=0), 400)
    assert admission.estimate(IMAGE) == pytest.approx(400, rel=0.01)


def test_fetched_media_are_charged_until_they_are_dropped_once() -> None:
    admission = admission_of()
    admission.enter(0, [1], 0.0)
    fetched = part(patches=1)
    admission.media_fetched(fetched, 700)
    assert admission.media_bytes == 700
    admission.media_dropped(fetched)
    admission.media_dropped(fetched)
    admission.ended(fetched, 1.0)
    assert counts(admission) == (0, 0, 0)


STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 500), min_size=1, max_size=5), st.integers(0, 1200), st.floats(0, 1e6)),
    max_size=50,
)


@given(STEPS, st.randoms(use_true_random=False))
def test_the_delay_is_sane_and_the_counters_never_pass_their_bounds(
    steps: list[tuple[list[int], int, float]], chance: Random
) -> None:
    admission = Admission(20, 1000, 2000)
    now = 0.0
    inside: list[Part] = []
    for patches, nbytes, seconds in steps:
        now += seconds
        fits = len(inside) + len(patches) <= 20 and admission.media_bytes + nbytes <= 1000
        fits = fits and (not inside or admission.patches + sum(patches) <= 2000)
        if fits:
            admission.enter(nbytes, patches, now)
            inside += [part(nbytes if index == 0 else 0, cost) for index, cost in enumerate(patches)]
        else:
            with pytest.raises(ServiceError) as fault:
                admission.enter(nbytes, patches, now)
            error = fault.value
            assert error.reason is Reason.REQUEST_INVALID or 0.05 <= (error.retry_after or 0) <= 30.0
        if inside and chance.random() < 0.5:
            one = chance.choice(inside)
            admission.measured(one, chance.randrange(900))
            admission.media_dropped(one)
        if inside and chance.random() < 0.5:
            admission.ended(inside.pop(chance.randrange(len(inside))), now)
        assert admission.rate(now) > 0
        charged = (len(inside), sum(one.media_bytes for one in inside), sum(one.patches for one in inside))
        assert counts(admission) == charged
        assert admission.parts <= 20
        assert admission.media_bytes <= 1000
    for one in inside:
        admission.ended(one, now)
    assert counts(admission) == (0, 0, 0)
