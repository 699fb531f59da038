"""Probes: of an idle device, and of one whose numbers are not finite, whose sequences are computed again."""

from __future__ import annotations

import pytest

from services.worker.scheduler.device_probe import MOST_NOT_FINITE
from shared.errors import ModelError
from shared.hashing import content_keys, pack_tokens, root_key
from shared.messages.frames import NOT_FINITE
from shared.messages.generate import Sampling
from tests.worker.manual_engine import Engine, step_with

PROMPT = [1, 2, 3, 4, 1, 2]
NO_EOS = Sampling(max_tokens=8, ignore_eos=True)


def test_numbers_that_are_not_finite_fail_their_sequence_only_and_it_is_computed_again_from_its_tokens() -> None:
    engine = Engine()
    engine.copies = True  # a block may outlive one that was forgotten
    engine.submit("first", PROMPT, max_tokens=1)
    engine.run()
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.submit("b", [4, 4, 4], sampling=NO_EOS)
    for _ in range(3):
        engine.step()
    assert engine.last("a").cached_tokens == 4
    produced = len(engine.output("a"))
    computed = engine.runner.computed_tokens
    assert step_with(engine, lambda work: work.history[0] == PROMPT[0]) == 1
    assert len(engine.output("a")) == produced
    assert len(engine.output("b")) == 4
    cached = {content.key for content in engine.scheduler.kv_cache.snapshot()}
    assert cached.isdisjoint(content_keys(root_key("model"), pack_tokens(PROMPT), 2)), "they have left the cache"
    assert cached, "those of others have not"
    engine.run()
    assert engine.last("a").finish == engine.last("b").finish == "length"
    assert engine.runner.computed_tokens - computed > len(PROMPT) + produced, "nothing was taken from the cache"
    assert (engine.scheduler.load().recomputed, engine.scheduler.load().not_finite) == (1, 0)
    untroubled = Engine()
    untroubled.submit("a", PROMPT, sampling=NO_EOS)
    untroubled.submit("b", [4, 4, 4], sampling=NO_EOS)
    untroubled.run()
    assert (engine.output("a"), engine.output("b")) == (untroubled.output("a"), untroubled.output("b"))


def test_numbers_that_are_not_finite_twice_end_the_sequence_with_an_error_and_no_other() -> None:
    engine = Engine()
    engine.copies = True
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.submit("b", [4, 4, 4], sampling=NO_EOS)
    while engine.scheduler.busy:
        step_with(engine, lambda work: work.history[0] == PROMPT[0])
    assert engine.last("a").finish == "error"
    assert engine.last("a").error.startswith(NOT_FINITE)
    assert engine.last("b").finish == "length"
    assert (engine.scheduler.load().recomputed, engine.scheduler.load().not_finite) == (1, 1)
    assert engine.scheduler.load().held_blocks == 0


def test_one_that_shares_blocks_with_a_failed_sequence_goes_on_and_its_slots_are_free_in_the_end() -> None:
    engine = Engine()
    engine.copies = True
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.step()
    engine.submit("b", [*PROMPT, 3], sampling=NO_EOS)
    engine.step()
    assert step_with(engine, lambda work: work.prompt_tokens == len(PROMPT)) == 1
    assert engine.scheduler.load().running == 1, "the other one"
    engine.run()
    alone = Engine()
    alone.submit("b", [*PROMPT, 3], sampling=NO_EOS)
    alone.run()
    assert engine.output("b") == alone.output("b")
    assert engine.last("a").finish == "length"


def overflow(engine: Engine, first: int, last: int) -> None:
    """Requests, one after the other, of which each ends because its numbers are not finite; a probe's numbers are."""
    for attempt in range(first, last):
        engine.submit("overflows", PROMPT, sampling=NO_EOS, attempt=attempt)
        while engine.scheduler.load().waiting + engine.scheduler.load().running:
            step_with(engine, lambda work: work.prompt_tokens == len(PROMPT))
        assert engine.last("overflows", attempt).error.startswith(NOT_FINITE)


def test_where_nothing_is_finite_any_more_the_engine_ends() -> None:
    engine = Engine()
    engine.copies = True
    overflow(engine, 0, MOST_NOT_FINITE)
    with pytest.raises(ModelError, match="16 sequences failed in a row, and so did a single token"):
        step_with(engine, lambda _: True)


def test_requests_that_all_overflow_end_no_engine_whose_other_numbers_are_finite() -> None:
    engine = Engine()
    engine.copies = True
    for rounds in range(3):
        first = MOST_NOT_FINITE * rounds
        overflow(engine, first, first + MOST_NOT_FINITE)
        assert engine.scheduler.busy, "the probe is due though no request is there"
        [probe] = engine.step()
        assert (list(probe.tokens), probe.start, probe.end, probe.prompt_tokens, probe.draws) == ([0], 0, 1, 1, True)
        assert not engine.scheduler.busy
        assert engine.scheduler.load().held_blocks == 0
        assert engine.parts.keys() == {("overflows", attempt) for attempt in range(first + MOST_NOT_FINITE)}
    assert engine.scheduler.load().not_finite == 3 * MOST_NOT_FINITE


def test_a_token_drawn_between_failures_makes_a_probe_unnecessary() -> None:
    engine = Engine()
    engine.copies = True
    overflow(engine, 0, MOST_NOT_FINITE - 1)
    engine.submit("between", [1, 2], max_tokens=1)
    engine.run()
    overflow(engine, MOST_NOT_FINITE, 2 * MOST_NOT_FINITE - 1)
    assert not engine.scheduler.busy


def test_a_token_drawn_in_the_step_of_a_probe_counts_as_the_probe_does() -> None:
    engine = Engine()
    engine.copies = True
    overflow(engine, 0, MOST_NOT_FINITE)
    engine.submit("fine", [1, 2], sampling=NO_EOS)
    assert step_with(engine, lambda work: work.prompt_tokens == 1) == 1
    engine.run()
    assert engine.last("fine").finish == "length"


def test_a_probe_goes_before_new_prompts_and_the_step_computes_no_more_sequences_than_may_run() -> None:
    engine = Engine(max_running=1)
    engine.copies = True
    overflow(engine, 0, MOST_NOT_FINITE)
    engine.submit("waits", PROMPT, max_tokens=1)
    assert [work.prompt_tokens for work in engine.step()] == [1]
    assert [work.prompt_tokens for work in engine.step()] == [len(PROMPT)]
    assert engine.last("waits").finish == "length"


def test_a_probe_waits_for_a_free_block() -> None:
    engine = Engine()
    engine.copies = True
    overflow(engine, 0, MOST_NOT_FINITE)
    pool = engine.scheduler.kv_cache._pool
    taken, _ = pool.allocate(pool.available)
    assert engine.scheduler.schedule(engine.now_s) == []
    engine.scheduler.advance([], 0.0)
    assert not engine.scheduler.busy, "it waits without a spin"
    for slot in taken:
        pool.release(slot)
    engine.scheduler.kv_cache.unpin([])
    assert engine.scheduler.busy
    assert [work.prompt_tokens for work in engine.step()] == [1]
    assert not engine.scheduler.busy


def test_an_asked_probe_is_computed_once_and_leaves_no_block_no_event_and_no_part() -> None:
    engine = Engine()
    engine.scheduler.ask_probe([1, 2, 1])
    assert engine.scheduler.busy
    [probe] = engine.step()
    assert (list(probe.tokens), probe.start, probe.end, len(probe.blocks), probe.draws) == ([1, 2, 1], 0, 3, 2, True)
    assert engine.scheduler.step_tokens == 0, "it counts for no client"
    assert not engine.scheduler.probe.asked
    assert not engine.scheduler.busy
    assert not engine.cached
    assert not engine.parts
    load = engine.scheduler.load()
    assert (load.held_blocks, load.cached_blocks, load.prefill_tokens_per_s, load.step_s) == (0, 0, 0.0, 0.0)


def test_an_asked_probe_takes_free_blocks_before_cached_ones() -> None:
    engine = Engine(capacity_blocks=4)
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    cached = set(engine.cached)
    assert len(cached) == 3
    for _ in range(3):
        engine.scheduler.ask_probe([1, 2])
        engine.step()
    assert engine.cached == cached


def test_requests_that_come_with_an_asked_probe_get_the_same_tokens_as_without() -> None:
    engine, without = Engine(), Engine()
    engine.scheduler.ask_probe([1, 2, 1])
    for one in (engine, without):
        one.submit("a", PROMPT, sampling=NO_EOS)
        one.submit("b", [4, 4, 4], sampling=NO_EOS)
        one.run()
    assert not engine.scheduler.probe.asked
    assert (engine.output("a"), engine.output("b")) == (without.output("a"), without.output("b"))


def test_an_asked_probe_waits_until_there_is_a_place_and_a_block() -> None:
    engine = Engine(max_running=1)
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.step()
    engine.scheduler.ask_probe([1, 2])
    engine.step()
    assert engine.scheduler.probe.asked
    engine.run()
    assert not engine.scheduler.probe.asked
    assert engine.last("a").finish == "length"


def test_numbers_of_an_asked_probe_that_are_not_finite_end_no_engine_whose_sequences_did_not_fail() -> None:
    engine = Engine()
    engine.copies = True
    overflow(engine, 0, MOST_NOT_FINITE - 1)
    engine.scheduler.ask_probe([1, 2])
    assert step_with(engine, lambda _: True) == 1
    assert not engine.scheduler.busy
    overflow(engine, MOST_NOT_FINITE, MOST_NOT_FINITE + 1)
    assert engine.scheduler.busy, "now so many have failed that a probe is due"
