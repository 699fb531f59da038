"""The attempts of a vLLM engine, and the parts that its outputs become."""

from __future__ import annotations

import pytest

from services.worker.contracts.messages import Submit
from services.worker.vllm.attempts import AttemptTable
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.frames import NOT_BEGUN, Part
from shared.messages.generate import Sampling


def submit(number: int, *, tokens: int = 10, prompt: int = 10, **fields: object) -> Submit:
    given = {"time_left_s": 100.0, "number": number} | fields
    packed = pack_tokens(range(tokens))
    return Submit(f"r{number}", 1, "front", packed, prompt, Sampling(max_tokens=5), **given)  # type: ignore[arg-type]


def parts(table: AttemptTable) -> list[Part]:
    return table.take_outcome().parts.get("front", [])


def test_parts_follow_one_another_and_count_the_cached_prompt() -> None:
    table = AttemptTable()
    key = table.add(submit(1), 0.0)
    assert table.unbegun_tokens == 10
    assert not table.has_begun(key)
    table.record_output(key, [7], cached_tokens=4)
    assert table.unbegun_tokens == 0
    assert table.has_begun(key)
    table.record_output(key, [8, 9])
    table.record_output(key, [3], finish="stop")
    outcome = table.take_outcome()
    found = outcome.parts["front"]
    assert [(part.first, unpack_tokens(part.tokens), part.finish) for part in found] == [
        (0, [7], None),
        (1, [8, 9], None),
        (3, [3], "stop"),
    ]
    assert {part.cached_tokens for part in found} == {4}
    assert outcome.boundary_parts == [found[0], found[2]]
    assert outcome.one_token_attempts == [1, 1]
    assert len(table) == 0
    table.validate()


def test_a_continuation_counts_on() -> None:
    table = AttemptTable()
    key = table.add(submit(1, tokens=13), 0.0)
    table.record_output(key, [1], finish="length")
    (part,) = parts(table)
    assert (part.first, part.finish) == (3, "length")


def test_outputs_after_the_end_are_dropped() -> None:
    table = AttemptTable()
    key = table.add(submit(1), 0.0)
    table.end(key, "cancelled")
    assert [part.finish for part in parts(table)] == ["cancelled"]
    table.record_output(key, [5])
    table.end(key, "error", "late")
    assert parts(table) == []
    assert table.find("r1", 1) is None
    table.validate()


def test_an_end_that_is_not_known_is_an_error_that_says_so() -> None:
    table = AttemptTable()
    key = table.add(submit(1), 0.0)
    table.record_output(key, [], finish="repetition")
    (part,) = parts(table)
    assert (part.finish, part.error) == ("error", "the engine ended the request: repetition")


def test_deadlines_end_attempts() -> None:
    table = AttemptTable()
    early, late = table.add(submit(1, time_left_s=1.0), 0.0), table.add(submit(2, time_left_s=9.0), 0.0)
    assert table.expire(0.5, 0) == []
    assert table.expire(1.0, 0) == [early]
    assert [part.finish for part in parts(table)] == ["deadline"]
    assert table.find("r2", 1) == late
    table.validate()


def test_only_those_that_vllm_has_not_begun_end_for_waiting() -> None:
    table = AttemptTable()
    keys = [table.add(submit(number, wait_left_s=1.0, priority=number == 3), 0.0) for number in (1, 2, 3)]
    assert table.expire(2.0, 0) == [], "all have begun"
    assert table.expire(2.0, 1) == [keys[1]], "the one of a higher priority began before it"
    (part,) = parts(table)
    assert part.finish == "error"
    assert part.error.startswith(NOT_BEGUN)
    table.record_output(keys[0], [4])
    assert table.expire(2.0, 1) == [keys[2]]
    table.validate()


def handing_over(table: AttemptTable, *, took_s: float = 0.4) -> str:
    """Add an attempt that another worker goes on with, and record its token at second 5."""
    key = table.add(submit(1, prefill_only=True), 0.0)
    table.record_output(key, [7], finish="length", waited_s=(4.6, took_s), now_s=5.0)
    (first,) = parts(table)
    assert (unpack_tokens(first.tokens), first.finish) == ([7], None), "the token does not wait"
    table.validate()
    return key


def test_an_attempt_is_handed_over_once_its_blocks_are_stored() -> None:
    table = AttemptTable()
    key = handing_over(table)
    table.hand_over(["another"])
    assert table.expire(5.3, 0) == []
    assert (parts(table), table.storing) == ([], [key])
    table.hand_over([key])
    (last,) = parts(table)
    assert (last.first, last.tokens, last.finish) == (1, b"", "handed_over")
    table.hand_over([key])
    assert (parts(table), len(table), table.storing) == ([], 0, [])
    table.validate()


@pytest.mark.parametrize(("took_s", "until_s"), [(0.4, 5.4), (3.0, 6.0)])
def test_blocks_are_waited_for_as_long_as_the_prompt_took_and_a_second_at_most(took_s: float, until_s: float) -> None:
    table = AttemptTable()
    handing_over(table, took_s=took_s)
    assert table.expire(until_s - 0.01, 0) == []
    assert parts(table) == []
    assert table.expire(until_s, 0) == [], "vLLM has ended it already"
    assert [part.finish for part in parts(table)] == ["handed_over"]
    table.validate()


def test_a_cancelled_attempt_waits_no_longer_for_its_blocks() -> None:
    table = AttemptTable()
    key = handing_over(table)
    table.end(key, "cancelled")
    table.hand_over([key])
    assert [part.finish for part in parts(table)] == ["cancelled"]
    table.validate()


def test_an_attempt_whose_first_token_ends_it_is_not_handed_over() -> None:
    table = AttemptTable()
    key = table.add(submit(1, prefill_only=True), 0.0)
    table.record_output(key, [2], finish="stop", now_s=5.0)
    assert [part.finish for part in parts(table)] == ["stop"]
    assert table.storing == []
