from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.admission import Admission


def refusal(admission: Admission, parts: int, nbytes: int = 0) -> ServiceError:
    """Why a request does not come in."""
    before = (admission.parts, admission.media_bytes)
    with pytest.raises(ServiceError) as fault:
        admission.enter(parts, nbytes)
    assert (admission.parts, admission.media_bytes) == before
    return fault.value


def test_f02_admission_is_bounded_by_parts_and_by_bytes() -> None:
    admission = Admission(max_parts=10, max_bytes=1000)
    admission.enter(9, 900)
    for parts, nbytes in ((2, 0), (1, 101)):
        error = refusal(admission, parts, nbytes)
        assert error.reason is Reason.ADMISSION_FULL
        assert error.retry_after is not None
    admission.enter(1, 100)
    assert refusal(admission, 1, 0).reason is Reason.ADMISSION_FULL
    admission.part_ended(1.0)
    assert refusal(admission, 1, 1).reason is Reason.ADMISSION_FULL
    admission.enter(1, 0)


@pytest.mark.parametrize(("parts", "nbytes"), [(11, 0), (1, 1001)])
def test_what_can_never_come_in_is_told_so_and_not_to_retry(parts: int, nbytes: int) -> None:
    error = refusal(Admission(max_parts=10, max_bytes=1000), parts, nbytes)
    assert error.reason is Reason.REQUEST_INVALID
    assert error.retry_after is None


def test_the_delay_grows_with_what_must_end_first_and_with_how_slowly_parts_end() -> None:
    admission = Admission(max_parts=10, max_bytes=1000)
    admission.enter(10, 0)
    one, ten = refusal(admission, 1).retry_after, refusal(admission, 10).retry_after
    assert one is not None
    assert ten is not None
    assert ten == pytest.approx(10 * one)
    for index in range(50):
        admission.part_ended(index * 0.8)
        admission.enter(1, 0)
    slow = refusal(admission, 1).retry_after
    assert slow == pytest.approx(0.8, rel=0.05)


def test_a_pause_without_work_is_no_slowness() -> None:
    admission = Admission(max_parts=1, max_bytes=1000)
    for index in range(50):
        admission.enter(1, 0)
        admission.part_ended(index * 1000.0)
    admission.enter(1, 0)
    assert refusal(admission, 1).retry_after == pytest.approx(0.05)


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 2000), st.floats(0, 1e6)), max_size=50))
def test_the_delay_is_sane_and_the_counters_never_pass_their_bounds(steps: list[tuple[int, int, float]]) -> None:
    admission = Admission(max_parts=1000, max_bytes=1000)
    now = 0.0
    inside: list[int] = []
    for parts, nbytes, seconds in steps:
        now += seconds
        fits = admission.parts + parts <= 1000 and admission.media_bytes + nbytes <= 1000
        if fits:
            admission.enter(parts, nbytes)
            inside.append(nbytes)
        else:
            error = refusal(admission, parts, nbytes)
            assert error.reason is Reason.REQUEST_INVALID or 0.05 <= (error.retry_after or 0) <= 30.0
            if inside:
                admission.media_dropped(inside.pop())
            if admission.parts:
                admission.part_ended(now)
        assert 0 <= admission.parts <= 1000
        assert 0 <= admission.media_bytes <= 1000
