"""When an encoder gets calls, with the time passed in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from encoder_client.fleet.encoder_health import (
    FAULTS_TO_EJECT,
    FIRST_EJECTION,
    LONGEST_EJECTION,
    SHORTEST_PAUSE,
    EncoderHealth,
    HealthState,
)
from encoder_client.fleet.failure_kinds import FailureKind


def state_of(health: EncoderHealth) -> HealthState:
    return health.state


def serving() -> EncoderHealth:
    health = EncoderHealth()
    health.poll_succeeded(True, 0.0)
    return health


def test_it_gets_nothing_before_it_has_answered() -> None:
    health = EncoderHealth()
    assert not health.available(0.0)
    health.poll_succeeded(False, 0.0)
    assert not health.available(0.0)
    health.poll_succeeded(True, 0.0)
    assert health.available(0.0)


def test_a_lost_connection_ejects_at_once_and_faults_in_a_row() -> None:
    health = serving()
    health.failed(FailureKind.LOST, None, 1.0)
    assert state_of(health) is HealthState.EJECTED
    health = serving()
    for _ in range(FAULTS_TO_EJECT - 1):
        health.failed(FailureKind.FAULT, None, 1.0)
    health.succeeded()
    for _ in range(FAULTS_TO_EJECT - 1):
        health.failed(FailureKind.FAULT, None, 1.0)
    assert health.available(1.0)
    health.poll_failed(1.0)
    assert state_of(health) is HealthState.EJECTED


def test_it_comes_back_by_one_probe() -> None:
    health = serving()
    health.failed(FailureKind.LOST, None, 10.0)
    health.poll_succeeded(True, 10.0 + FIRST_EJECTION / 2)
    assert state_of(health) is HealthState.EJECTED
    health.poll_succeeded(True, 10.0 + FIRST_EJECTION)
    assert health.available(11.0)
    health.began()
    assert not health.available(11.0)
    health.succeeded()
    assert state_of(health) is HealthState.SERVING


def test_a_probe_that_tells_nothing_frees_its_place() -> None:
    health = serving()
    health.failed(FailureKind.LOST, None, 0.0)
    health.poll_succeeded(True, FIRST_EJECTION)
    health.began()
    health.left()
    assert health.available(FIRST_EJECTION)


def test_each_probe_that_fails_doubles_the_time() -> None:
    health, now = serving(), 0.0
    for exponent in range(8):
        health.failed(FailureKind.LOST, None, now)
        ejection = min(FIRST_EJECTION * 2**exponent, LONGEST_EJECTION)
        health.poll_succeeded(True, now + ejection - 0.01)
        assert state_of(health) is HealthState.EJECTED
        now += ejection
        health.poll_succeeded(True, now)
        assert state_of(health) is HealthState.PROBING
    health.succeeded()
    assert health.ejections == 0


def test_a_busy_encoder_is_left_alone_as_long_as_it_says() -> None:
    health = serving()
    health.failed(FailureKind.BUSY, 2.0, 10.0)
    health.failed(FailureKind.BUSY, None, 10.0)
    assert not health.available(11.9)
    assert health.available_at() == 12.0
    assert health.available(12.0)
    health.failed(FailureKind.BUSY, None, 20.0)
    assert health.available(20.0 + SHORTEST_PAUSE)
    assert state_of(health) is HealthState.SERVING


def test_bad_input_is_no_failure_of_the_encoder() -> None:
    health = serving()
    for _ in range(10):
        health.failed(FailureKind.FINAL, None, 0.0)
        health.failed(FailureKind.ELSEWHERE, None, 0.0)
    assert health.available(0.0)


def test_an_encoder_that_drains_is_not_ejected() -> None:
    health = serving()
    health.poll_succeeded(False, 1.0)
    assert not health.available(1.0)
    assert health.available_at() is None
    health.poll_succeeded(True, 2.0)
    assert health.available(2.0)


class Histories(RuleBasedStateMachine):
    """Whatever happens: no forbidden transition, and an encoder that answers is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.health = EncoderHealth()
        self.now = 0.0

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_call_begins(self) -> None:
        if self.health.available(self.now):
            self.health.began()

    @rule(kind=st.sampled_from(FailureKind), retry_after=st.none() | st.floats(0, 5))
    def a_call_fails(self, kind: FailureKind, retry_after: float | None) -> None:
        self.health.failed(kind, retry_after, self.now)

    @rule()
    def a_call_ends_well(self) -> None:
        self.health.succeeded()

    @rule()
    def a_call_is_left(self) -> None:
        self.health.left()

    @rule(serving=st.booleans())
    def a_poll_is_answered(self, serving: bool) -> None:
        self.health.poll_succeeded(serving, self.now)

    @rule()
    def a_poll_is_not(self) -> None:
        self.health.poll_failed(self.now)

    @invariant()
    def it_is_never_lost_for_good(self) -> None:
        health = EncoderHealth(**vars(self.health))
        later = self.now + LONGEST_EJECTION + 5
        health.left()
        health.poll_succeeded(True, later)
        assert health.available(later)


TestHistories = Histories.TestCase


@given(st.lists(st.sampled_from(FailureKind), max_size=20))
def test_an_ejected_encoder_is_told_the_same_failure_by_other_calls(kinds: list[FailureKind]) -> None:
    health = serving()
    health.failed(FailureKind.LOST, None, 0.0)
    for kind in kinds:
        health.failed(kind, None, 0.0)
    assert state_of(health) is HealthState.EJECTED
    assert health.ejections == 1
