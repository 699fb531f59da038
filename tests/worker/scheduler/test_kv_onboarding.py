"""Through the scheduler, which it is a part of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.config import Offload
from services.worker.contracts.device_blocks import PREFETCHES
from services.worker.scheduler.kv_onboarding import MOST_EXPECTED
from shared.blocks import BlockPool
from shared.hashing import ContentKey, content_keys, pack_tokens, root_key
from shared.messages.cards import Pooling
from shared.messages.frames import NOT_BEGUN
from shared.messages.generate import Sampling
from tests.worker.fake_runner import continuation, embedding
from tests.worker.manual_engine import Engine
from tests.worker.manual_kvbm import Kvbm

PROMPT = [1 + position % 4 for position in range(13)]
"""Six blocks of two that may come from elsewhere, and one token."""
OTHER = [4, 4, *PROMPT]


def kvbm_with(prompt: list[int], *, capacity_blocks: int = 16, wait_s: float = 0.0) -> Kvbm:
    """A kvbm that keeps this prompt's blocks, next to an engine that has nothing and prefills 10 tokens a second."""
    first = Kvbm(Engine())
    first.up()
    first.engine.submit("earlier", prompt, max_tokens=1)
    first.run()
    engine = Engine(capacity_blocks=capacity_blocks, first_tokens_per_s=10.0, wait_s=wait_s)
    kvbm = Kvbm(engine)
    kvbm.kept = first.kept
    kvbm.up()
    return kvbm


def test_blocks_that_the_kvbm_has_are_loaded_instead_of_computed() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.on_disk = set(list(kvbm.kept)[4:])
    kvbm.engine.submit("a", PROMPT, max_tokens=2)
    kvbm.run()
    last = kvbm.engine.last("a")
    assert kvbm.engine.output("a") == continuation(PROMPT, 2, 64)
    assert (last.cached_tokens, last.cached_host_tokens, last.cached_disk_tokens) == (12, 8, 4)
    assert kvbm.engine.runner.computed_tokens == 2


def test_what_the_device_had_already_is_no_gain_of_the_kvbm() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.down()
    kvbm.engine.submit("a", PROMPT[:7], max_tokens=1)
    kvbm.engine.run()
    kvbm.up()
    kvbm.engine.submit("b", PROMPT, max_tokens=1)
    (request,) = kvbm.poll()
    assert len(request.keys) == 3
    kvbm.serve(request.number)
    kvbm.run()
    last = kvbm.engine.last("b")
    assert (last.cached_tokens, last.cached_host_tokens, last.cached_disk_tokens) == (12, 6, 0)


def test_a_mean_asks_for_nothing_and_a_last_for_all_but_its_last_token() -> None:
    asked: tuple[tuple[Pooling, int], ...] = (("mean", 0), ("last", 12))
    for pooling, cached in asked:
        kvbm = kvbm_with(PROMPT)
        kvbm.engine.submit("a", PROMPT, sampling=Sampling(max_tokens=1, pooling=pooling))
        kvbm.run()
        last = kvbm.engine.last("a")
        assert (last.embedding, last.cached_host_tokens) == (embedding(PROMPT), cached)
        assert kvbm.loaded_blocks == cached // 2


def test_of_a_continuation_only_the_prompts_tokens_count() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT[:5], attempt=2, produced=PROMPT[5:], max_tokens=10)
    kvbm.run()
    last = kvbm.engine.last("a", 2)
    assert (last.cached_tokens, last.cached_host_tokens) == (5, 5)


def test_an_attempt_reports_how_long_it_waited_for_blocks() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT, max_tokens=2)
    kvbm.poll()
    kvbm.engine.now_s += 0.25
    kvbm.run()
    (begun,) = kvbm.engine.begun
    assert 0.25 <= begun.onboard_s <= begun.queued_s
    kvbm.engine.submit("b", PROMPT, max_tokens=2)
    kvbm.run()
    assert kvbm.engine.begun[-1].onboard_s == 0.0


def test_an_attempt_that_waits_for_its_turn_does_not_wait_for_blocks() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.submit("long", [4] * 61, max_tokens=1)
    kvbm.know_nothing()
    kvbm.engine.submit("next", OTHER, max_tokens=1)
    kvbm.know_nothing()
    kvbm.run()
    begun = kvbm.engine.begun[1]
    assert begun.waited_s == (0.0, 0.0, begun.queued_s)
    assert (begun.queued_s > 0, begun.onboard_s) == (True, 0.0)


def test_others_are_computed_while_one_waits() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT)
    kvbm.poll()
    kvbm.engine.submit("b", [4], max_tokens=1)
    assert len(kvbm.engine.step()) == 1
    assert kvbm.engine.last("b").finish == "length"
    assert kvbm.engine.step() == []
    assert not kvbm.engine.scheduler.busy
    assert kvbm.engine.scheduler.load().onboarding == 1


def test_others_do_not_take_the_room_that_one_who_waits_will_need() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=8)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.engine.submit("b", [4, 4, 4], max_tokens=1)
    assert len(kvbm.poll()) == 1
    assert kvbm.engine.step() == [], "seven blocks and two are more than eight"
    kvbm.engine.submit("urgent", [4], max_tokens=1, priority=1)
    assert len(kvbm.engine.step()) == 1
    kvbm.run()
    assert [name for name, _ in kvbm.engine.parts] == ["urgent", "a", "b"]


def test_one_that_waits_for_its_blocks_ends_where_it_has_not_begun_in_time() -> None:
    kvbm = kvbm_with(PROMPT, wait_s=20.0)
    kvbm.engine.submit("a", PROMPT, wait_left_s=5.0)
    (request,) = kvbm.poll()
    assert kvbm.engine.step() == []
    assert not kvbm.engine.scheduler.busy
    assert kvbm.engine.scheduler.wait_until_s == 5.0
    kvbm.engine.now_s = 5.0
    assert kvbm.engine.step() == []
    assert kvbm.engine.last("a").error.startswith(NOT_BEGUN)
    kvbm.poll()
    assert kvbm.fetches[request.number].abandoned
    kvbm.end()
    assert kvbm.engine.scheduler.load().held_blocks == 0


# --- blocks of a prompt that another worker computes


def test_blocks_of_an_expected_prompt_are_loaded_and_found_when_it_comes() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", PROMPT)
    (request,) = kvbm.poll()
    assert (request.awaits, len(request.keys), request.trace) == (True, 6, "")
    assert kvbm.begin(request.number, 4) == 4
    for index in range(4):
        kvbm.land(request.number, index)
    load = kvbm.engine.scheduler.load()
    assert (load.prefetched_blocks, load.onboarding, load.waiting, load.held_blocks) == (4, 0, 0, 4)
    assert not kvbm.engine.scheduler.living
    kvbm.engine.submit("a", PROMPT, max_tokens=2)
    assert kvbm.poll() == [], "it waits for the rest of its prefetch"
    kvbm.serve(request.number)
    kvbm.run()
    assert kvbm.engine.output("a") == continuation(PROMPT, 2, 64)
    assert kvbm.engine.last("a").cached_tokens == 12
    assert kvbm.engine.runner.computed_tokens == 2


def test_an_expected_prompt_of_full_blocks_is_loaded_whole_since_it_comes_with_a_token_more() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", PROMPT[:12])
    (request,) = kvbm.poll()
    assert len(request.keys) == 6
    kvbm.serve(request.number)
    kvbm.engine.submit("a", PROMPT[:12], attempt=2, produced=PROMPT[12:], max_tokens=4)
    assert kvbm.poll() == []
    (work,) = kvbm.engine.step()
    assert (work.start, work.end) == (12, 13)
    kvbm.run()


def test_what_a_prefetch_does_not_bring_is_fetched_for_the_attempt_itself() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", PROMPT)
    (request,) = kvbm.poll()
    for index in range(kvbm.begin(request.number, 4)):
        kvbm.land(request.number, index)
    kvbm.engine.submit("a", PROMPT, max_tokens=2)
    kvbm.settle(request.number)
    (rest,) = kvbm.poll()
    assert (rest.awaits, len(rest.keys)) == (False, 2)
    kvbm.run()
    assert kvbm.engine.runner.computed_tokens == 2


def test_an_attempt_waits_for_its_prefetch_no_longer_than_computing_would_take() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", PROMPT)
    (request,) = kvbm.poll()
    kvbm.engine.submit("a", PROMPT, max_tokens=2)
    assert kvbm.engine.step() == []
    kvbm.engine.now_s = 1.2
    assert len(kvbm.engine.step()) == 1, "it is computed"
    kvbm.poll()
    assert kvbm.fetches[request.number].abandoned
    kvbm.end()
    kvbm.run()
    assert kvbm.engine.output("a") == continuation(PROMPT, 2, 64)


def test_a_prefetch_ends_with_the_attempt_that_waits_for_it() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", PROMPT)
    (request,) = kvbm.poll()
    kvbm.engine.submit("a", PROMPT, max_tokens=2)
    kvbm.engine.scheduler.cancel("a", 1)
    kvbm.poll()
    assert kvbm.fetches[request.number].abandoned
    kvbm.end()


def test_an_expected_prompt_that_comes_during_its_last_copies_waits_for_these_and_goes_on_in_the_next_step() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", PROMPT)
    (request,) = kvbm.poll()
    assert kvbm.begin(request.number, 6) == 6
    kvbm.engine.submit("a", PROMPT, max_tokens=2)
    assert kvbm.poll() == [], "nothing is fetched twice"
    assert kvbm.engine.step() == []
    for index in range(6):
        kvbm.land(request.number, index)
    kvbm.settle(request.number)
    (work,) = kvbm.engine.step()
    assert (work.start, work.end) == (12, 13)
    kvbm.run()
    assert kvbm.engine.output("a") == continuation(PROMPT, 2, 64)


def test_a_prompt_is_expected_once_and_not_where_it_is_here_already() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", PROMPT)
    kvbm.engine.expect("a", PROMPT)
    assert len(kvbm.poll()) == 1
    kvbm.run()
    kvbm.engine.expect("b", PROMPT)
    kvbm.engine.submit("c", PROMPT)
    kvbm.engine.expect("c", PROMPT)
    assert kvbm.poll() == []
    kvbm.run()


def test_few_prompts_are_expected_at_once_and_they_take_a_share_of_the_blocks() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=16)
    kvbm.engine.expect("long", PROMPT)
    assert kvbm.poll() == [], "seven blocks are more than a quarter of 16"
    kvbm = kvbm_with(PROMPT, capacity_blocks=400)
    for number in range(PREFETCHES + 1):
        kvbm.engine.expect(f"e{number}", [number % 4 + 1, number // 4 + 1, *PROMPT])
    assert len(kvbm.poll()) == PREFETCHES
    kvbm.know_nothing()


def test_the_prompt_that_is_due_first_has_the_next_place_and_not_the_newest_one() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=400)
    prompts = [[number % 4 + 1, number // 4 + 1, *PROMPT] for number in range(PREFETCHES + 2)]
    for number, prompt in enumerate(prompts):
        kvbm.engine.expect(f"e{number}", prompt)
    kvbm.poll()
    kvbm.engine.now_s += 0.5
    kvbm.engine.expect("newest", [4, 4, 4, *PROMPT])
    prompts.append([3, 4])
    kvbm.engine.expect("short", prompts[-1])
    for number in range(3):
        kvbm.engine.scheduler.cancel(f"e{number}", 1)
    asked = [request.keys for request in kvbm.poll()]
    due = [prompts[-1], *prompts[PREFETCHES:-1]]
    assert asked == [content_keys(root_key("model"), pack_tokens(prompt), 2) for prompt in due]
    kvbm.know_nothing()


def test_prompts_that_wait_for_a_place_are_bounded_and_end_with_their_time() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=400)
    for number in range(PREFETCHES):
        kvbm.engine.expect(f"e{number}", [number + 1, 1, *PROMPT])
    for number in range(MOST_EXPECTED):
        digits = [number % 4 + 1, number // 4 % 4 + 1, number // 16 + 1, 2]
        kvbm.engine.expect(f"q{number}", [*digits, *PROMPT], time_left_s=5.0)
    assert len(kvbm.poll()) == PREFETCHES
    kvbm.engine.now_s = 5.0
    kvbm.engine.step()
    kvbm.know_nothing()
    assert kvbm.poll() == [], "the others have no time left"


def test_without_a_kvbm_no_prompt_is_expected_and_a_lost_one_ends_it() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.down()
    kvbm.engine.expect("a", PROMPT)
    kvbm.up()
    assert kvbm.poll() == []
    kvbm.engine.expect("a", PROMPT)
    (request,) = kvbm.poll()
    kvbm.down()
    kvbm.poll()
    assert kvbm.fetches[request.number].abandoned
    kvbm.end()


def test_an_expected_prompt_that_does_not_come_ends_with_its_time_or_its_cancel() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", PROMPT, time_left_s=5.0)
    kvbm.engine.expect("b", OTHER)
    kvbm.poll()
    assert kvbm.engine.scheduler.wait_until_s == 5.0
    kvbm.engine.now_s = 5.0
    assert kvbm.engine.step() == []
    kvbm.engine.scheduler.cancel("b", 1)
    kvbm.poll()
    assert [fetch.abandoned for fetch in kvbm.fetches.values()] == [True, True]
    kvbm.end()
    assert kvbm.engine.scheduler.wait_until_s is None
    assert kvbm.engine.scheduler.load().held_blocks == 0


def test_an_attempt_that_is_here_takes_the_room_of_one_that_is_expected() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=32)
    kvbm.engine.expect("a", PROMPT)
    (request,) = kvbm.poll()
    for index in range(kvbm.begin(request.number, 5)):
        kvbm.land(request.number, index)
    kvbm.engine.submit("b", [2] * 56, max_tokens=1)
    assert kvbm.engine.step(), "it is computed at once"
    kvbm.poll()
    assert kvbm.fetches[request.number].abandoned
    kvbm.end()
    kvbm.run()


def test_an_attempt_leaves_the_blocks_that_one_before_it_waits_for_though_they_came_before_that_one() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=32)
    kvbm.engine.expect("a", PROMPT)
    (request,) = kvbm.poll()
    for index in range(kvbm.begin(request.number, 5)):
        kvbm.land(request.number, index)
    kvbm.engine.submit("a", PROMPT, max_tokens=2)
    kvbm.engine.submit("b", [2] * 48, max_tokens=1)
    for other in kvbm.poll():
        kvbm.settle(other.number)
    assert kvbm.engine.step(), "there is room for b: a needs two blocks more than were loaded for it"
    kvbm.poll()
    assert not kvbm.fetches[request.number].abandoned
    kvbm.run()
    assert kvbm.engine.runner.computed_tokens == 48 + 2


def test_a_prefetch_that_was_answered_late_does_not_make_fetches_seem_slow() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=64)
    kvbm.engine.expect("a", OTHER)
    (request,) = kvbm.poll()
    kvbm.settle(request.number, 10.0)
    kvbm.engine.submit("b", PROMPT, max_tokens=1)
    assert len(kvbm.poll()) == 1, "computing takes 1.2 s, and no fetch took long"
    kvbm.run()


def test_expected_prompts_take_no_place_of_fetches_that_attempts_wait_for() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=400)
    for number in range(PREFETCHES):
        kvbm.engine.expect(f"e{number}", [number + 1, 1, *PROMPT])
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    asked = kvbm.poll()
    assert [request.awaits for request in asked] == [False] + [True] * PREFETCHES
    kvbm.serve(asked[0].number)
    kvbm.know_nothing()
    kvbm.run()
    assert kvbm.engine.last("a").cached_host_tokens == 12


def test_who_has_waited_as_long_as_computing_would_take_is_computed() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT)
    kvbm.poll()
    assert kvbm.engine.step() == []
    assert kvbm.engine.scheduler.wait_until_s == 1.2
    kvbm.engine.now_s = 1.2
    assert len(kvbm.engine.step()) == 1
    assert kvbm.engine.scheduler.load().late_onboardings == 1
    kvbm.poll()
    assert kvbm.fetches[0].abandoned
    kvbm.settle(0)
    kvbm.run()
    assert kvbm.engine.output("a") == continuation(PROMPT, 8, 64)


def test_a_limit_of_the_settings_goes_before() -> None:
    kvbm = kvbm_with(PROMPT, wait_s=0.5)
    kvbm.engine.submit("a", PROMPT)
    assert kvbm.engine.scheduler.wait_until_s == 0.5


def test_blocks_that_come_after_their_sequence_gave_up_are_used_all_the_same() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.poll()
    assert kvbm.begin(0, 3) == 3
    kvbm.engine.now_s = 2.0
    kvbm.engine.step()
    kvbm.poll()
    assert kvbm.begin(0, 3) == 0, "no room is made for who has left"
    for index in range(3):
        kvbm.land(0, index)
    kvbm.settle(0)
    kvbm.run()
    assert kvbm.engine.output("a") == continuation(PROMPT, 1, 64)


def test_blocks_enter_the_cache_in_the_order_of_their_chain() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT)
    kvbm.poll()
    kvbm.begin(0, 3)
    kvbm.land(0, 2)
    kvbm.land(0, 1)
    kvbm.engine.step()
    assert kvbm.engine.scheduler.kv_cache.snapshot() == []
    kvbm.land(0, 0)
    kvbm.engine.step()
    assert len(kvbm.engine.scheduler.kv_cache.snapshot()) == 3


def test_batches_enter_the_cache_in_the_order_of_their_chain_up_to_the_first_bad_copy() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.poll()
    kvbm.begin(0, 6)
    kvbm.land_together(0, 2, [True, False, True])
    assert kvbm.engine.scheduler.kv_cache.snapshot() == []
    kvbm.land_together(0, 0, [True, True])
    kvbm.land_together(0, 5, [True])
    assert len(kvbm.engine.scheduler.kv_cache.snapshot()) == 3
    kvbm.settle(0)
    kvbm.run()
    last = kvbm.engine.last("a")
    assert (last.cached_tokens, last.cached_host_tokens) == (6, 6)
    assert kvbm.engine.output("a") == continuation(PROMPT, 1, 64)


def test_no_block_after_a_bad_copy_is_used() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.poll()
    kvbm.begin(0, 6)
    for index in (0, 2, 3, 4, 5):
        kvbm.land(0, index)
    kvbm.land(0, 1, good=False)
    kvbm.settle(0)
    kvbm.run()
    last = kvbm.engine.last("a")
    assert (last.cached_tokens, last.cached_host_tokens) == (2, 2)
    assert kvbm.engine.output("a") == continuation(PROMPT, 1, 64)


def test_a_sequence_that_ends_while_its_blocks_load_leaves_no_block_held() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT)
    kvbm.poll()
    kvbm.begin(0, 6)
    kvbm.land(0, 0)
    kvbm.engine.scheduler.cancel("a", 1)
    kvbm.engine.step()
    assert kvbm.engine.last("a").finish == "cancelled"
    assert kvbm.engine.scheduler.load().held_blocks == 5, "copies write there"
    kvbm.poll()
    assert kvbm.fetches[0].abandoned
    kvbm.end()
    kvbm.run()


def test_an_end_before_its_fetch_began_is_not_reported() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT)
    kvbm.engine.scheduler.cancel("a", 1)
    assert kvbm.poll() == []
    kvbm.run()


def test_siblings_wait_for_the_first_ones_blocks_and_ask_only_for_the_rest() -> None:
    kvbm = kvbm_with([*PROMPT, 1, 2])
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.engine.submit("b", [*PROMPT, 1, 2], max_tokens=1)
    (request,) = kvbm.poll()
    assert kvbm.engine.scheduler.load().onboarding == 2
    kvbm.serve(request.number)
    (rest,) = kvbm.poll()
    assert len(rest.keys) == 1
    kvbm.serve(rest.number)
    kvbm.run()
    assert kvbm.engine.last("b").cached_tokens == 14
    assert kvbm.engine.last("b").cached_host_tokens == 2


def test_a_sibling_that_finds_all_is_admitted_without_asking() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.engine.submit("b", PROMPT, max_tokens=1)
    kvbm.serve(kvbm.poll()[0].number)
    assert kvbm.poll() == []
    kvbm.run()
    assert kvbm.engine.last("b").cached_tokens == 12


def test_who_came_during_the_step_that_computed_its_blocks_waits_no_longer_than_until_the_next_one() -> None:
    engine = Engine(step_tokens=16, wait_s=10.0)
    kvbm = Kvbm(engine)
    kvbm.up()
    engine.submit("a", PROMPT, max_tokens=1)
    kvbm.know_nothing()
    works = engine.scheduler.schedule(engine.now_s)
    engine.submit("b", PROMPT, max_tokens=1)
    (request,) = kvbm.poll()  # it sees no block of the step; the kvbm takes its time
    assert len(request.keys) == 6
    engine.take(engine.scheduler.advance(engine.runner.step(works), 0.01))
    assert engine.scheduler.busy
    (work,) = engine.step()
    assert (work.start, engine.output("b")) == (12, continuation(PROMPT, 1, 64))
    assert kvbm.poll() == []
    assert kvbm.fetches[request.number].abandoned
    assert engine.scheduler.load().late_onboardings == 0
    kvbm.settle(request.number)
    kvbm.run()


def test_whose_own_blocks_have_all_come_waits_for_the_end_of_its_fetch() -> None:
    kvbm = kvbm_with(PROMPT)
    engine = kvbm.engine
    engine.submit("a", PROMPT, max_tokens=1)
    (request,) = kvbm.poll()
    kvbm.begin(request.number, 6)
    for index in range(6):
        kvbm.land(request.number, index)
    assert engine.step() == []
    assert not kvbm.fetches[request.number].abandoned
    kvbm.settle(request.number)
    kvbm.run()


def test_only_the_first_of_the_queue_are_asked_for() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=100)
    for number in range(12):
        kvbm.engine.submit(f"r{number}", [1 + number % 4, 1 + number // 4, *PROMPT], max_tokens=1)
    assert len(kvbm.poll()) == 8
    kvbm.run()


def test_a_sequence_without_room_asks_when_there_is_some_and_no_later_one_asks_before() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=2 * 8 + 7)
    for number in range(3):
        kvbm.engine.submit(f"r{number}", [1 + number, 1, *PROMPT], max_tokens=1)
    kvbm.engine.submit("small", [4, 4, 4], max_tokens=1)
    assert [request.number for request in kvbm.poll()] == [0, 1]
    kvbm.know_nothing()
    kvbm.engine.step()
    assert kvbm.poll() == []
    while kvbm.engine.scheduler.load().running:
        kvbm.engine.step()
    assert [request.number for request in kvbm.poll()] == [2, 3]
    kvbm.run()


def test_what_is_only_cached_is_room() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=7)
    kvbm.engine.submit("a", [4] * 13, max_tokens=1)
    kvbm.run()
    assert kvbm.engine.scheduler.load().cached_blocks == 6
    kvbm.engine.submit("b", PROMPT, max_tokens=1)
    (request,) = kvbm.poll()
    assert len(request.keys) == 6
    kvbm.run()
    assert kvbm.engine.last("b").cached_host_tokens == 12


def test_who_shares_blocks_that_are_held_needs_room_for_the_others_only() -> None:
    kvbm = kvbm_with([*PROMPT, 1, 2], capacity_blocks=12)
    kvbm.down()
    kvbm.engine.submit("a", PROMPT, sampling=Sampling(max_tokens=8, ignore_eos=True))
    while not kvbm.engine.output("a"):
        kvbm.engine.step()
    kvbm.up()
    kvbm.engine.submit("b", [*PROMPT, 1, 2], max_tokens=1)
    (request,) = kvbm.poll()
    assert len(request.keys) == 1
    kvbm.serve(request.number)
    kvbm.engine.step()
    assert kvbm.engine.last("b").cached_host_tokens == 2
    kvbm.run()


def test_where_computing_is_cheaper_than_a_round_trip_no_sequence_asks_until_that_is_forgotten() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.poll()
    kvbm.settle(0, took_s=1.0)
    kvbm.run()
    tried = 0
    while not (asked := kvbm.poll()):
        kvbm.engine.run()
        tried += 1
        assert tried < 400
        prompt = [tried % 5, tried // 5 % 5, tried // 25 % 5, tried // 125, 1]
        kvbm.engine.submit(f"r{tried}", prompt, max_tokens=1)
    assert tried > 10
    kvbm.settle(asked[0].number, took_s=0.001)
    kvbm.run()
    kvbm.engine.submit("again", OTHER, max_tokens=1)
    assert len(kvbm.poll()) == 1, "a good round trip is believed at once"
    kvbm.run()


def test_with_a_bound_of_its_own_each_sequence_asks_however_long_others_waited() -> None:
    kvbm = kvbm_with(PROMPT, wait_s=20.0)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.poll()
    kvbm.settle(0, took_s=1000.0)
    kvbm.run()
    kvbm.engine.submit("b", OTHER, max_tokens=1)
    assert len(kvbm.poll()) == 1
    kvbm.run()


def test_what_asking_one_kvbm_cost_says_nothing_of_the_next_one() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.poll()
    kvbm.settle(0, took_s=1000.0)
    kvbm.run()
    kvbm.engine.submit("b", OTHER, max_tokens=1)
    assert kvbm.poll() == []
    kvbm.run()
    kvbm.down()
    kvbm.up()
    kvbm.engine.submit("c", [3, *OTHER], max_tokens=1)
    assert len(kvbm.poll()) == 1
    kvbm.run()


def test_without_a_kvbm_no_sequence_waits() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.engine.submit("b", PROMPT, max_tokens=1)
    kvbm.poll()
    kvbm.begin(0, 2)
    kvbm.down()
    kvbm.engine.step()
    kvbm.poll()
    assert kvbm.fetches[0].abandoned
    kvbm.end()
    kvbm.run()
    assert kvbm.engine.output("a") == continuation(PROMPT, 1, 64)


@pytest.mark.parametrize("up", [True, False])
def test_who_waits_is_not_looked_up_in_each_step(monkeypatch: pytest.MonkeyPatch, up: bool) -> None:
    """Eight of 100,000 tokens each, in the cache already, would cost each step 3 ms."""
    engine = Engine(max_running=1, capacity_blocks=64)
    kvbm = Kvbm(engine)
    if up:
        kvbm.up()
    for number in range(9):
        engine.submit(f"r{number}", PROMPT, max_tokens=8)
    kvbm.know_nothing()
    engine.step()
    kvbm.know_nothing()
    lookups = 0

    def counted(look_up: Callable[[BlockPool, Iterable[ContentKey]], int]) -> Callable[..., int]:
        def counting(pool: BlockPool, keys: Iterable[ContentKey]) -> int:
            nonlocal lookups
            lookups += 1
            return look_up(pool, keys)

        return counting

    monkeypatch.setattr(BlockPool, "longest_prefix", counted(BlockPool.longest_prefix))
    monkeypatch.setattr(BlockPool, "held_prefix", counted(BlockPool.held_prefix))
    for _ in range(3):
        engine.step()
        kvbm.poll()
    assert engine.scheduler.load().waiting == 8
    assert lookups <= 3  # of the one that has come among the first eight
    monkeypatch.undo()
    kvbm.run()


def test_no_room_is_taken_that_running_sequences_may_grow_into() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=10, wait_s=10.0)
    number = beside_a_decode(kvbm)
    for _ in range(4):
        kvbm.engine.step()
    assert kvbm.begin(number, 6) == 5, "the decode has taken two of the eight that were there, and may take another"
    for index in range(5):
        kvbm.land(number, index)
    kvbm.settle(number)
    kvbm.run()


def beside_a_decode(kvbm: Kvbm) -> int:
    """One decodes in two blocks, PROMPT waits for six; its number."""
    kvbm.engine.submit("a", [4, 4, 4], sampling=Sampling(max_tokens=12, ignore_eos=True))
    kvbm.know_nothing()
    while not kvbm.engine.output("a"):
        kvbm.engine.step()
    kvbm.engine.submit("b", PROMPT)
    (request,) = kvbm.poll()
    assert len(request.keys) == 6
    return request.number


def test_a_prefix_is_held_once_though_there_was_no_room_after_it_at_first() -> None:
    kvbm = kvbm_with(PROMPT)
    kvbm.down()
    kvbm.engine.submit("a", PROMPT[:7], max_tokens=1)
    kvbm.engine.run()
    kvbm.up()
    kvbm.engine.submit("b", PROMPT)
    number = kvbm.poll()[0].number
    assert kvbm.begin(number, 0) == 0
    assert kvbm.begin(number, 2) == 2
    kvbm.end()
    kvbm.run()


def test_a_decode_takes_back_what_is_held_for_those_that_wait() -> None:
    kvbm = kvbm_with(PROMPT, capacity_blocks=10, wait_s=10.0)
    number = beside_a_decode(kvbm)
    assert kvbm.begin(number, 6) == 6
    for index in range(6):
        kvbm.land(number, index)
    for _ in range(6):
        kvbm.poll()
        assert not kvbm.fetches[number].abandoned
        assert len(kvbm.engine.step()) == 1
    kvbm.poll()
    assert kvbm.fetches[number].abandoned
    assert kvbm.engine.scheduler.load().preemptions == 0
    kvbm.settle(number)
    kvbm.run()


def test_a_lone_decode_without_room_waits_for_copies_instead_of_failing() -> None:
    kvbm = kvbm_with([], capacity_blocks=6)
    kvbm.engine.submit("a", [1, 2, 3, 4, 1], max_tokens=1)
    kvbm.settle(kvbm.poll()[0].number)
    kvbm.engine.run()
    assert len(kvbm.take_offers()) == 2
    kvbm.down()
    kvbm.engine.submit("b", [4, 4, 4], sampling=Sampling(max_tokens=8, ignore_eos=True))
    while kvbm.engine.scheduler.busy:
        kvbm.engine.step()
    assert kvbm.engine.scheduler.load().waiting == 1
    assert not kvbm.engine.parts["b", 1][-1].finish
    kvbm.end_saves()
    kvbm.engine.run()
    assert kvbm.engine.last("b").finish == "length"


class OnboardingMachine(RuleBasedStateMachine):
    """Whatever the kvbm and its copies do, each prompt gets exactly its own continuation, and nothing leaks."""

    @initialize(offload=st.sampled_from(["filled", "evicted"]))
    def start(self, offload: Offload) -> None:
        self.engine = Engine(
            capacity_blocks=12,
            context_length=24,
            max_running=3,
            max_waiting=9,
            step_tokens=6,
            first_tokens_per_s=50.0,
            offload=offload,
            offers_limit=8,
        )
        self.kvbm = Kvbm(self.engine)
        self.kvbm.up()
        self.asked: dict[str, tuple[list[int], Sampling]] = {}

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=22),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        time_left_s=st.sampled_from([0.02, 1e9, 1e9, 1e9]),
        salt=st.sampled_from(["", "", "tenant"]),
        pooling=st.sampled_from(["", "", "mean", "last"]),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, priority: int, time_left_s: float, salt: str, pooling: Pooling = ""
    ) -> None:
        name, sampling = f"r{len(self.asked)}", Sampling(max_tokens=max_tokens, pooling=pooling)
        self.asked[name] = (prompt, sampling)
        self.engine.submit(name, prompt, sampling=sampling, priority=priority, time_left_s=time_left_s, salt=salt)

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 100), suffix=st.lists(st.integers(1, 2), max_size=4))
    def submit_again(self, pick: int, suffix: list[int]) -> None:
        prompt = self.asked[f"r{pick % len(self.asked)}"][0]
        self.submit([*prompt, *suffix][:22], 4, 0, 1e9, "")

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        self.engine.scheduler.cancel(f"r{pick % len(self.asked)}", 1)

    @rule(count=st.integers(1, 6), elapsed_s=st.sampled_from([0.001, 0.01, 0.5]))
    def step(self, count: int, elapsed_s: float) -> None:
        for _ in range(count):
            self.engine.step(elapsed_s)

    @rule()
    def turn(self) -> None:
        self.kvbm.poll()

    @precondition(lambda self: self.kvbm.fetches)
    @rule(pick=st.integers(0, 100), count=st.integers(1, 8))
    def begin(self, pick: int, count: int) -> None:
        numbers = list(self.kvbm.fetches)
        self.kvbm.begin(numbers[pick % len(numbers)], count)

    @precondition(lambda self: any(fetch.loading for fetch in self.kvbm.fetches.values()))
    @rule(pick=st.integers(0, 100), good=st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=4))
    def land(self, pick: int, good: list[bool]) -> None:
        loading = [(number, index) for number, fetch in self.kvbm.fetches.items() for index in fetch.loading]
        number, first = loading[pick % len(loading)]
        together = [one for index, one in enumerate(good, first) if (number, index) in loading]
        if len(together) == len(good):
            self.kvbm.land_together(number, first, good)
        else:
            self.kvbm.land(number, first, good[0])

    @precondition(lambda self: any(not fetch.loading for fetch in self.kvbm.fetches.values()))
    @rule(pick=st.integers(0, 100), took_s=st.sampled_from([0.0, 0.001, 0.01, 1.0]))
    def settle(self, pick: int, took_s: float) -> None:
        ready = [number for number, fetch in self.kvbm.fetches.items() if not fetch.loading]
        self.kvbm.settle(ready[pick % len(ready)], took_s)

    @rule(most=st.integers(1, 4))
    def take_offers(self, most: int) -> None:
        offers = self.kvbm.take_offers(most)
        self.kvbm.on_disk.update(content.key for content in offers[::2])

    @rule(count=st.integers(1, 6))
    def end_saves(self, count: int) -> None:
        self.kvbm.end_saves(count)

    @rule()
    def serve_all(self) -> None:
        for request in self.kvbm.poll():
            self.kvbm.serve(request.number)
        self.kvbm.save()

    @rule(up=st.booleans())
    def restart(self, up: bool) -> None:
        self.kvbm.down()
        if up:
            self.kvbm.up()

    @invariant()
    def consistent(self) -> None:
        self.engine.scheduler.validate()
        load = self.engine.scheduler.load()
        if self.engine.scheduler.busy or not load.waiting:
            return
        assert not load.running
        if not self.kvbm.saving and not any(fetch.loading for fetch in self.kvbm.fetches.values()):
            assert load.onboarding, "attempts wait, for nothing"

    def teardown(self) -> None:
        self.wait_for_a_silent_kvbm()
        self.kvbm.poll()
        self.kvbm.end()
        self.kvbm.down()
        self.engine.run()
        self.check_answers()

    def wait_for_a_silent_kvbm(self) -> None:
        """Nothing more comes: each sequence that no copy keeps from running ends."""
        for _ in range(2000):
            self.kvbm.poll()
            if not self.engine.scheduler.busy:
                until_s = self.engine.scheduler.wait_until_s
                if until_s is None or until_s > 1e8:
                    break
                self.engine.now_s = max(self.engine.now_s, until_s)
            self.engine.step()
        load = self.engine.scheduler.load()
        assert not load.onboarding, "waits past its bound"
        assert not load.waiting or self.kvbm.saving or any(fetch.loading for fetch in self.kvbm.fetches.values())

    def check_answers(self) -> None:
        for name, (prompt, sampling) in self.asked.items():
            expected = [] if sampling.pooling else continuation(prompt, sampling.max_tokens, 24)
            output, last = self.engine.output(name), self.engine.last(name)
            assert last.embedding == (embedding(prompt) if sampling.pooling and last.finish == "stop" else b"")
            assert sum(part.finish is not None for part in self.engine.parts[name, 1]) == 1
            assert output == expected[: len(output)]
            if last.finish in ("stop", "length"):
                assert output == expected
            else:
                assert last.finish in ("cancelled", "deadline", "error")
            assert "KV cache" not in last.error or len(prompt) + len(output) >= 24
            assert 0 <= last.cached_host_tokens + last.cached_disk_tokens <= last.cached_tokens <= len(prompt)


TestOnboardingMachine = OnboardingMachine.TestCase
TestOnboardingMachine.settings = settings(max_examples=100, stateful_step_count=40)
