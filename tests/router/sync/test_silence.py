"""A source is silent only if requests compute blocks there without a batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.sync.silence import Silence


def test_a_source_is_silent_if_requests_compute_blocks_for_a_minute_without_a_batch() -> None:
    silence = Silence(limit_s=60.0)
    silence.prefill_seen(0.0, 1.0)
    silence.prefill_seen(59.0, 60.0)
    assert not silence.silent
    silence.prefill_seen(60.5, 61.0)
    assert silence.silent
    silence.batch_received(61.5)
    assert not silence.silent


def test_an_idle_source_is_not_silent_however_long_it_idles() -> None:
    silence = Silence(limit_s=60.0)
    silence.batch_received(10.0)
    silence.prefill_seen(9.9, 10.1)  # its batch came before its first token
    silence.batch_received(5000.0)
    silence.prefill_seen(4999.9, 5000.1)
    assert not silence.silent


def test_one_lost_batch_before_a_long_pause_does_not_make_a_source_silent() -> None:
    silence = Silence(limit_s=60.0)
    silence.prefill_seen(0.0, 1.0)
    silence.batch_received(5000.0)
    silence.prefill_seen(4999.9, 5000.1)
    assert not silence.silent


def test_without_a_limit_no_source_is_silent() -> None:
    silence = Silence(limit_s=0.0)
    for second in range(1000):
        silence.prefill_seen(second, second + 1)
    assert not silence.silent


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 100.0), st.floats(0.0, 20.0))))
def test_it_is_silent_only_if_no_batch_came_for_the_limit(steps: list[tuple[bool, float, float]]) -> None:
    silence, now_s, heard_s = Silence(limit_s=60.0), 0.0, 0.0
    for heard, pause_s, took_s in steps:
        now_s += pause_s
        if heard:
            silence.batch_received(now_s)
            heard_s = now_s
        else:
            silence.prefill_seen(now_s - took_s, now_s)
        silence.validate()
        assert not silence.silent or now_s - heard_s >= 60.0
