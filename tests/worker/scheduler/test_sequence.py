from __future__ import annotations

from services.worker.contracts.messages import Submit
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.sequence import Sequence
from shared.hashing import pack_tokens
from shared.messages.generate import Sampling

PROMPT_TOKENS = 4
LIMITS = SchedulerLimits(
    model="model", context_length=64, eos_token_ids=frozenset((9, 0)), block_size=2, capacity_blocks=16, max_waiting=512
)


def sequence(sampling: Sampling, produced: int = 0) -> Sequence:
    tokens = pack_tokens([5] * (PROMPT_TOKENS + produced))
    return Sequence.of(Submit("r", 1, "f", tokens, PROMPT_TOKENS, sampling, 60.0), LIMITS, 0, 0.0)


def sequence_of(tokens: bytes, expected: Sequence | None = None) -> Sequence:
    return Sequence.of(Submit("r", 1, "f", tokens, 1, Sampling(8), 60.0), LIMITS, 0, 0.0, expected)


def test_ends_of_sequence_and_stop_tokens_are_barred_where_there_is_a_least_number_of_tokens() -> None:
    assert sequence(Sampling(8, stop_token_ids=(3,))).work.barred == ()
    assert sequence(Sampling(8, min_tokens=2)).work.barred == [0, 9]
    both = sequence(Sampling(8, min_tokens=2, stop_token_ids=(3, 9), ignore_eos=True))
    assert both.work.barred == [0, 3, 9], "ends of sequence too, where they end nothing"
    assert both.stop_tokens == {3, 9}


def test_tokens_of_earlier_attempts_count() -> None:
    for produced, barred in ((0, True), (1, True), (2, False)):
        work = sequence(Sampling(8, min_tokens=2), produced).work
        work.end = len(work.history)
        assert bool(work.barred_now) == barred


def test_a_sequence_that_was_expected_has_the_same_keys_without_hashing_its_prompt_again() -> None:
    expected = sequence_of(pack_tokens(range(1, 10)))
    came = sequence_of(pack_tokens(range(1, 14)), expected)
    assert came.keys == sequence_of(pack_tokens(range(1, 14))).keys
    assert came.keys[0] is expected.keys[0]


def test_keys_of_an_expected_sequence_of_other_tokens_are_not_used() -> None:
    expected = sequence_of(pack_tokens([9, *range(2, 10)]))
    assert sequence_of(pack_tokens(range(1, 14)), expected).keys == sequence_of(pack_tokens(range(1, 14))).keys


def test_contents_of_several_blocks_are_those_of_each_also_where_tokens_were_drawn() -> None:
    came = sequence_of(pack_tokens(range(1, 8)))
    came.tokens.append(8)
    each = [came.content(index) for index in range(4)]
    assert [content.tokens for content in each] == [pack_tokens(pair) for pair in ((1, 2), (3, 4), (5, 6), (7, 8))]
    for first in range(5):
        for count in range(5 - first):
            assert came.contents(first, count) == each[first : first + count]
