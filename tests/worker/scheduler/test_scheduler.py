from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.contracts.runner import Drawn
from shared.hashing import KEY_BYTES, content_keys, pack_tokens, root_key
from shared.messages.cards import Pooling
from shared.messages.frames import NOT_BEGUN, NOT_FINITE
from shared.messages.generate import Sampling
from tests.worker.fake_runner import EOS, continuation, embedding, prompt_logprobs
from tests.worker.manual_engine import PIECE_BYTES, Engine, step_with

PROMPT = [1, 2, 3, 4, 1, 2]
LONG = [1 + position % 4 for position in range(40)]
OTHER = [3, 3, 1, 4]
NO_EOS = Sampling(max_tokens=8, ignore_eos=True)
SCORED = Sampling(max_tokens=2, ignore_eos=True, prompt_logprobs=2)
MEAN, LAST = Sampling(max_tokens=1, pooling="mean"), Sampling(max_tokens=1, pooling="last")


def test_a_prompt_is_continued_until_its_last_token() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.run()
    assert len(engine.output("a")) == 8
    assert engine.last("a").finish == "length"


def test_an_end_token_stops_and_is_the_last_of_its_part() -> None:
    engine = Engine()
    prompt = next([1, 2, n, m] for n in range(5) for m in range(5) if continuation([1, 2, n, m], 8, 64)[-1] == EOS)
    engine.submit("a", prompt)
    engine.run()
    assert engine.last("a").finish == "stop"
    assert engine.output("a")[-1] == EOS


def test_a_stop_token_stops_even_where_eos_is_ignored() -> None:
    engine = Engine()
    stop = continuation(PROMPT, 1, 64)[0]
    engine.submit("a", PROMPT, sampling=Sampling(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,)))
    engine.run()
    assert engine.output("a") == [stop]
    assert engine.last("a").finish == "stop"


def test_the_context_length_ends_a_sequence() -> None:
    engine = Engine(context_length=10)
    engine.submit("a", PROMPT, sampling=Sampling(max_tokens=100, ignore_eos=True))
    engine.run()
    assert len(engine.output("a")) == 4
    assert engine.last("a").finish == "length"


def test_a_prompt_that_fills_the_context_is_an_error() -> None:
    engine = Engine(context_length=6)
    engine.submit("a", PROMPT)
    engine.run()
    assert engine.last("a").finish == "error"
    assert "context of 6" in engine.last("a").error


def test_a_prompt_larger_than_the_cache_is_an_error_at_once() -> None:
    engine = Engine(capacity_blocks=2)
    engine.submit("a", PROMPT)
    engine.run()
    assert engine.last("a").finish == "error"
    assert "do not fit" in engine.last("a").error


def test_a_sequence_that_outgrows_the_whole_cache_ends_with_an_error_and_keeps_its_tokens() -> None:
    engine = Engine(capacity_blocks=4)
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.run()
    assert engine.last("a").finish == "error"
    assert "KV cache" in engine.last("a").error
    assert len(engine.output("a")) == 3


def test_a_draw_that_failed_ends_its_sequence_with_the_error_and_no_other() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.submit("b", LONG[:4], sampling=NO_EOS)
    works = engine.scheduler.schedule(0.0)
    assert [work.draws for work in works] == [True, False], "a's prompt is 6 of the step's 8 tokens"
    outcome = engine.scheduler.advance([Drawn(0, error="nothing can follow"), None], 0.001)
    engine.scheduler.validate()
    [failed] = outcome.boundary_parts
    assert (failed.request, failed.finish, failed.error, failed.tokens) == ("a", "error", "nothing can follow", b"")
    assert engine.scheduler.load().running == 1


def test_shared_blocks_stay_until_they_are_taken_back() -> None:
    engine = Engine(capacity_blocks=4)
    cache = engine.scheduler.kv_cache
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    slots = cache.share(content_keys(root_key("model"), pack_tokens([*PROMPT, 7, 7]), 2))
    assert len(slots) == len(PROMPT) // 2
    assert cache.statistics().held == len(slots)
    engine.submit("b", [8] * len(PROMPT), max_tokens=1)
    engine.step()
    assert engine.scheduler.load().waiting == 1, "there is no room"
    cache.take_back(slots)
    engine.run()
    assert engine.last("b").finish == "length"


def test_a_repeated_prompt_is_found_but_its_last_token_is_computed() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    computed = engine.runner.computed_tokens
    engine.submit("b", PROMPT, max_tokens=1)
    engine.run()
    assert engine.last("b").cached_tokens == 4
    assert engine.runner.computed_tokens == computed + 2
    assert engine.output("a") == engine.output("b")


def test_output_is_found_by_the_next_turn() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.run()
    engine.submit("b", [*PROMPT, *engine.output("a"), 1])
    engine.run()
    assert engine.last("b").cached_tokens == 12


def test_tenants_with_different_salts_share_nothing() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, salt="one")
    engine.run()
    engine.submit("b", PROMPT, salt="two")
    engine.run()
    assert engine.last("b").cached_tokens == 0
    engine.submit("c", PROMPT, salt="one")
    engine.run()
    assert engine.last("c").cached_tokens == 4


def test_a_long_prompt_is_computed_in_chunks_next_to_decodes() -> None:
    engine = Engine(capacity_blocks=64)
    engine.submit("decoding", PROMPT, sampling=Sampling(max_tokens=20, ignore_eos=True))
    engine.step()
    engine.submit("long", LONG, max_tokens=1)
    steps = 0
    while not engine.parts["long", 1]:
        works = engine.step()
        steps += 1
        assert sum(len(work.tokens) for work in works) <= 8
        assert len(works[0].tokens) == 1, "the decode goes first"
    assert steps >= len(LONG) // 8
    assert len(engine.output("decoding")) == 1 + steps


def test_decodes_beyond_the_budget_do_not_starve_a_prefill() -> None:
    engine = Engine(capacity_blocks=64, max_running=8, step_tokens=2)
    for number in range(6):
        engine.submit(f"decoding {number}", [number % 4 + 1], sampling=Sampling(max_tokens=40, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.submit("late", PROMPT, max_tokens=1)
    for _ in range(3):
        engine.step()
    assert engine.last("late").finish is not None


def test_siblings_that_arrive_together_share_what_the_first_computed() -> None:
    engine = Engine(capacity_blocks=64)
    engine.submit("a", [*LONG, 1], max_tokens=1)
    engine.submit("b", [*LONG, 2], max_tokens=1)
    engine.run()
    assert engine.last("a").cached_tokens == 0
    assert engine.last("b").cached_tokens >= 32
    assert engine.runner.computed_tokens <= len(LONG) + 12


def test_the_youngest_of_the_lowest_priority_gives_its_blocks_back() -> None:
    engine = Engine(capacity_blocks=8)
    six = Sampling(max_tokens=6, ignore_eos=True)
    engine.submit("old", [1, 1], sampling=six)
    engine.submit("young", [2, 2], sampling=six)
    engine.submit("urgent", [3, 3], sampling=six, priority=1)
    engine.run()
    assert engine.scheduler.load().preemptions > 0
    for name, prompt in (("old", [1, 1]), ("young", [2, 2]), ("urgent", [3, 3])):
        assert len(engine.output(name)) == 6, name
        tokens = [*prompt, *engine.output(name)]
        assert [continuation(tokens[:end], 1, 64)[0] for end in range(2, 8)] == tokens[2:]


def test_a_preemption_is_noted_with_its_cause_and_how_long_the_sequence_waited_again() -> None:
    engine = Engine(capacity_blocks=5)
    six = Sampling(max_tokens=6, ignore_eos=True)
    engine.submit("a", [1, 1], sampling=six)
    engine.submit("b", [2, 2], sampling=six)
    engine.run()
    texts = [note.text for note in engine.notes]
    assert texts[0].startswith("preempted, since ")
    assert "needed a block and none was free: it gives its " in texts[0]
    assert texts[1].startswith("goes on after ")
    assert "for free blocks" in texts[1]
    assert len(texts) == 2 * engine.scheduler.load().preemptions


def test_a_wait_is_reported_by_its_causes_with_the_first_block_that_is_missing() -> None:
    engine = Engine(max_running=1)
    engine.submit("a", PROMPT, max_tokens=4)
    engine.submit("b", PROMPT, max_tokens=1)
    engine.run()
    first, second = engine.begun
    assert first.waited_s == (0.0, 0.0, 0.0)
    assert len(first.first_missing) == KEY_BYTES
    blocks, places, tokens = second.waited_s
    assert places == second.queued_s > 0
    assert blocks == tokens == 0
    assert second.first_missing != first.first_missing, "it found the first one's blocks"


def test_draws_are_numbered_by_position_also_after_a_preemption() -> None:
    engine = Engine(capacity_blocks=5)
    six = Sampling(max_tokens=6, ignore_eos=True)
    engine.submit("a", [1, 1], sampling=six)
    engine.submit("b", [2, 2], sampling=six)
    drawn: dict[int, list[int]] = defaultdict(list)
    while engine.scheduler.busy:
        for work in engine.step():
            if work.draws:
                drawn[work.sequence].append(work.draw_index)
    assert engine.scheduler.load().preemptions > 0
    assert list(drawn.values()) == [list(range(6)), list(range(6))]


def test_a_continuation_counts_from_the_original_prompt() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, sampling=NO_EOS)
    engine.run()
    whole = engine.output("a")
    fresh = Engine()
    fresh.submit("a", PROMPT, attempt=2, produced=whole[:3], sampling=NO_EOS)
    fresh.run()
    assert fresh.parts["a", 2][0].first == 3
    assert fresh.output("a", 2) == whole[3:]
    assert fresh.last("a", 2).finish == "length"


def test_a_continuation_with_nothing_left_ends_at_once() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, produced=[1, 2, 3], max_tokens=3)
    engine.run()
    assert engine.last("a").finish == "length"
    assert engine.output("a") == []


def test_cancelling_frees_the_blocks_in_the_middle_of_a_prefill() -> None:
    engine = Engine(capacity_blocks=64)
    engine.submit("a", LONG)
    engine.step()
    assert engine.scheduler.load().held_blocks > 0
    engine.scheduler.cancel("a", 1)
    engine.step()
    assert engine.last("a").finish == "cancelled"
    assert engine.scheduler.load().held_blocks == 0


def test_cancelling_another_attempt_changes_nothing() -> None:
    engine = Engine()
    engine.submit("a", PROMPT)
    engine.scheduler.cancel("a", 2)
    engine.run()
    assert engine.last("a").finish in ("length", "stop")


def test_an_attempt_ends_at_its_deadline_waiting_or_running() -> None:
    engine = Engine(max_running=1)
    engine.submit("running", PROMPT, sampling=Sampling(max_tokens=50, ignore_eos=True), time_left_s=0.05)
    engine.submit("waiting", PROMPT, time_left_s=0.04)
    engine.run()
    assert engine.last("running").finish == "deadline"
    assert engine.last("waiting").finish == "deadline"
    assert engine.output("waiting") == []


def test_an_attempt_that_was_in_no_step_in_time_ends_with_an_error_that_frontends_know() -> None:
    engine = Engine(max_running=1)
    engine.submit("running", PROMPT, sampling=Sampling(max_tokens=20, ignore_eos=True), wait_left_s=0.05)
    engine.submit("waits", PROMPT, wait_left_s=0.05)
    engine.submit("patient", PROMPT, max_tokens=1)
    while not engine.parts["waits", 1]:
        assert engine.now_s < 0.07
        engine.step()
    assert engine.now_s >= 0.05
    [end] = engine.parts["waits", 1]
    assert (end.finish, end.error, end.tokens) == ("error", f"{NOT_BEGUN}: others that the worker computes: 1", b"")
    engine.run()
    assert len(engine.output("running")) == 20, "it had begun in time"
    assert engine.last("patient").finish == "length", "its wait has no limit"


def test_an_attempt_that_was_preempted_may_wait_again_as_long_as_it_has_to() -> None:
    engine = Engine(capacity_blocks=8)
    six = Sampling(max_tokens=6, ignore_eos=True)
    for name, prompt, priority in (("old", [1, 1], 0), ("young", [2, 2], 0), ("urgent", [3, 3], 1)):
        engine.submit(name, prompt, sampling=six, priority=priority, wait_left_s=0.001)
    engine.run()
    assert engine.scheduler.load().preemptions > 0
    assert all(engine.last(name).finish == "length" for name in ("old", "young", "urgent"))


def test_of_a_deadline_and_a_wait_that_are_over_the_deadline_is_the_reason() -> None:
    engine = Engine(max_running=1)
    engine.submit("running", PROMPT, sampling=Sampling(max_tokens=20, ignore_eos=True))
    engine.submit("waits", PROMPT, time_left_s=0.04, wait_left_s=0.04)
    engine.run()
    assert engine.last("waits").finish == "deadline"


def test_a_higher_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    engine = Engine(max_running=1)
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5)):
        engine.submit(name, PROMPT, max_tokens=1, priority=priority)
    engine.run()
    assert [name for name, _ in engine.parts] == ["urgent", "a", "b"]


def test_of_prompts_to_hand_over_the_one_is_first_that_would_end_first_alone() -> None:
    engine = Engine(capacity_blocks=64, step_tokens=4, first_tokens_per_s=4.0)
    engine.submit("long", LONG, max_tokens=8, prefill_only=True)
    engine.step(1.0)
    engine.submit("short", OTHER, max_tokens=8, prefill_only=True)
    assert [work.prompt_tokens for work in engine.step(1.0)] == [len(OTHER)], "the long one computes on after it"
    engine.now_s = 20.0
    engine.submit("late", list(reversed(OTHER)), max_tokens=8, prefill_only=True)
    engine.run()
    assert [name for name, _ in engine.parts] == ["short", "long", "late"], "no prompt is overtaken for ever"


def test_a_prompt_is_overtaken_by_shorter_ones_only_for_as_long_as_it_takes_itself() -> None:
    engine = Engine(capacity_blocks=64, step_tokens=4, max_running=1, overtaking=1.0)
    engine.submit("shows the speed", PROMPT, max_tokens=1)
    engine.run(1.0)
    engine.submit("runs", [4, *PROMPT], max_tokens=2, sampling=NO_EOS)
    engine.step(1.0)
    for name, prompt in (("long", LONG), ("short", OTHER)):
        engine.submit(name, prompt, max_tokens=1)
    engine.now_s += 1.0 + len(LONG)  # at least a token a second
    engine.submit("late", [2, *OTHER], max_tokens=1)
    engine.run(1.0)
    assert [name for name, _ in engine.parts] == ["shows the speed", "runs", "short", "long", "late"]
    assert [begun.overtaken for begun in engine.begun] == [0, 0, 0, 1, 0]
    assert engine.scheduler.load().overtaken == 1


def test_the_next_turn_of_a_conversation_is_computed_before_a_shorter_prompt_of_which_less_is_cached() -> None:
    engine = Engine(capacity_blocks=64, step_tokens=8, max_running=1, overtaking=1.0)
    engine.submit("turn", LONG, max_tokens=1)
    engine.run(1.0)
    engine.submit("runs", OTHER, max_tokens=2, sampling=NO_EOS)
    engine.step(1.0)
    engine.submit("stranger", [4, 4, *PROMPT, *PROMPT], max_tokens=1)
    engine.submit("next turn", [*LONG, 3], max_tokens=1)
    engine.run(1.0)
    assert [name for name, _ in engine.parts] == ["turn", "runs", "next turn", "stranger"]


def test_neither_a_higher_priority_nor_an_answer_that_goes_on_is_overtaken() -> None:
    engine = Engine(capacity_blocks=64, step_tokens=8, max_running=1, overtaking=100.0)
    engine.submit("shows the speed", PROMPT, max_tokens=1)
    engine.run(1.0)
    engine.submit("runs", [4, *PROMPT], max_tokens=2, sampling=NO_EOS)
    engine.step(1.0)
    engine.submit("short", OTHER, max_tokens=1)
    engine.submit("goes on", LONG, attempt=2, produced=continuation(LONG, 2, 64)[:1], sampling=NO_EOS)
    engine.submit("urgent", [1, *LONG], max_tokens=1, priority=1)
    engine.run(1.0)
    assert [name for name, _ in engine.parts] == ["shows the speed", "runs", "urgent", "goes on", "short"]


@pytest.mark.parametrize(("limit", "seconds", "every"), [("wait_left_s", 30.0, 1), ("time_left_s", 38.0, 2)])
def test_a_prompt_is_not_overtaken_until_its_time_is_over(limit: str, seconds: float, every: int) -> None:
    engine = Engine(capacity_blocks=64, step_tokens=4, max_running=1, overtaking=2.0)
    engine.submit("shows the speed", PROMPT, max_tokens=1)
    engine.run(1.0)
    engine.submit("runs", [4, *PROMPT], max_tokens=8, sampling=NO_EOS)
    engine.step(1.0)
    wait_s, time_s = (seconds, 1e9) if limit == "wait_left_s" else (None, seconds)
    engine.submit("long", LONG, max_tokens=1, wait_left_s=wait_s, time_left_s=time_s)  # due after twice 15 s, alone
    for number in range(45):
        if number % every == 0:
            engine.submit(f"short {number}", [number % 9 + 1, *OTHER[:3]], max_tokens=1)
        engine.step(1.0)
    engine.run(1.0)
    assert engine.parts["long", 1][-1].finish == "length"
    assert engine.scheduler.load().overtaken > 0


def test_an_answer_that_has_begun_is_not_preempted_for_a_shorter_prompt_that_came_later() -> None:
    engine = Engine(capacity_blocks=32, step_tokens=64, overtaking=100.0)
    engine.submit("shows the speed", PROMPT, max_tokens=1)
    engine.run(1.0)
    endless = Sampling(max_tokens=20, ignore_eos=True)
    engine.submit("long", LONG, sampling=endless)
    engine.step(1.0)
    engine.submit("short", OTHER, sampling=endless)
    engine.run(1.0)
    given_up = [note.text for note in engine.notes if note.text.startswith("preempted")]
    assert given_up
    assert all("request long needed" in text for text in given_up), "the later one gives its blocks back"


def test_a_speed_that_one_slow_step_showed_lets_no_prompt_be_overtaken_beyond_its_wait() -> None:
    engine = Engine(capacity_blocks=64, step_tokens=8, max_running=1, overtaking=2.0)
    engine.submit("compiles kernels", PROMPT, max_tokens=1)
    engine.run(1e4)
    engine.submit("runs", [4, *PROMPT], max_tokens=2, sampling=NO_EOS)
    engine.step(1.0)
    engine.submit("long", LONG, max_tokens=1, wait_left_s=60.0)
    engine.submit("short", OTHER, max_tokens=1, wait_left_s=60.0)
    engine.run(1.0)
    assert [name for name, _ in engine.parts] == ["compiles kernels", "runs", "long", "short"]


def test_a_prompt_has_longer_steps_while_there_is_nothing_else() -> None:
    engine = Engine(capacity_blocks=64, step_tokens=64, first_tokens_per_s=16.0, lone_step_s=0.5)
    engine.submit("alone", LONG, max_tokens=1)
    assert [len(work.tokens) for work in engine.step(0.5)] == [8]
    engine.submit("comes too", OTHER, max_tokens=1)
    assert [len(work.tokens) for work in engine.step(0.25)] == [4]


def test_without_overtaking_prompts_keep_their_order() -> None:
    engine = Engine(capacity_blocks=64, step_tokens=4, first_tokens_per_s=4.0)
    engine.submit("long", LONG, max_tokens=1)
    engine.step(1.0)
    engine.submit("short", OTHER, max_tokens=1)
    engine.run()
    assert [name for name, _ in engine.parts] == ["long", "short"]


def test_an_answer_that_goes_on_is_computed_before_prompts_that_wait_and_one_that_runs() -> None:
    engine = Engine(capacity_blocks=64, step_tokens=4)
    engine.submit("runs", LONG, max_tokens=1)
    engine.step(1.0)
    engine.submit("waits", OTHER, max_tokens=1)
    drawn = continuation(PROMPT, 3, 64)
    for name in ("begun", "begun later"):
        engine.submit(name, PROMPT, attempt=2, produced=drawn[:1], sampling=NO_EOS)
    engine.submit("urgent", [4, 4, 4, 4], max_tokens=1, priority=1)
    engine.run()
    assert [name for name, _ in engine.parts] == ["urgent", "begun", "begun later", "runs", "waits"]
    assert engine.output("begun", 2) == continuation(PROMPT, 8, 64)[1:]


def test_a_prompt_that_ranks_first_but_has_no_room_lets_the_running_one_go_on() -> None:
    engine = Engine(capacity_blocks=24, step_tokens=4, first_tokens_per_s=4.0)
    engine.submit("long", LONG, max_tokens=8, prefill_only=True)
    engine.step(1.0)
    engine.submit("short", [2] * 12, max_tokens=8, prefill_only=True)
    (work,) = engine.step(1.0)
    assert work.prompt_tokens == len(LONG)
    engine.run()
    assert [name for name, _ in engine.parts] == ["long", "short"]


def test_the_same_attempt_is_taken_once() -> None:
    engine = Engine()
    engine.submit("a", PROMPT)
    engine.submit("a", PROMPT)
    engine.run()
    assert sum(part.finish is not None for part in engine.parts["a", 1]) == 1


def test_logprobs_come_where_they_were_asked_for() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, sampling=Sampling(max_tokens=2, ignore_eos=True, logprobs=0))
    engine.submit("b", PROMPT, sampling=Sampling(max_tokens=2, ignore_eos=True))
    engine.run()
    assert all(part.logprobs is not None and len(part.logprobs) == 1 for part in engine.parts["a", 1])
    assert all(part.logprobs is None for part in engine.parts["b", 1])


def test_load_tells_what_a_step_that_only_decodes_takes_lately() -> None:
    engine = Engine()
    engine.submit("r", [1, 2, 3, 4], sampling=Sampling(max_tokens=50, ignore_eos=True))
    assert engine.step(elapsed_s=5.0)[0].tokens
    assert engine.scheduler.load().step_s == 0.0, "that was a prefill"
    engine.step(elapsed_s=0.1)
    assert engine.scheduler.load().step_s == 0.1
    engine.step(elapsed_s=0.2)
    assert 0.1 < engine.scheduler.load().step_s < 0.15
    for _ in range(40):
        engine.step(elapsed_s=0.2)
    assert 0.18 < engine.scheduler.load().step_s < 0.2


def test_an_embedding_is_all_that_comes_of_its_prompt() -> None:
    engine = Engine(capacity_blocks=64)
    for name, prompt, sampling in (("a", LONG, MEAN), ("b", LONG, LAST), ("c", [EOS], MEAN), ("d", [3], LAST)):
        engine.submit(name, prompt, sampling=sampling)
    engine.run()
    for name, prompt in (("a", LONG), ("b", LONG), ("c", [EOS]), ("d", [3])):
        [part] = engine.parts[name, 1]
        assert (part.first, part.tokens, part.finish, part.embedding) == (0, b"", "stop", embedding(prompt))


def test_what_is_embedded_may_fill_the_context() -> None:
    engine = Engine(context_length=6)
    engine.submit("fits", PROMPT, sampling=MEAN)
    engine.submit("too long", [*PROMPT, 1], sampling=MEAN)
    engine.run()
    assert engine.last("fits").finish == "stop"
    assert "context of 6" in engine.last("too long").error


def test_a_mean_takes_no_block_from_others_but_leaves_them_its_own() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    computed = engine.runner.computed_tokens
    engine.submit("mean", PROMPT, sampling=MEAN)
    engine.run()
    assert engine.last("mean").cached_tokens == 0
    assert engine.runner.computed_tokens == computed + len(PROMPT)
    engine = Engine()
    engine.submit("mean", PROMPT, sampling=MEAN)
    engine.run()
    for name, sampling in (("last", LAST), ("a", NO_EOS)):
        engine.submit(name, PROMPT, sampling=sampling)
        engine.run()
        assert engine.last(name).cached_tokens == 4


def test_a_mean_that_was_preempted_in_its_midst_begins_again() -> None:
    engine = Engine(capacity_blocks=23, step_tokens=4)
    engine.submit("decoding", [1, 1], sampling=Sampling(max_tokens=12, ignore_eos=True), priority=1)
    engine.step()
    engine.submit("mean", LONG, sampling=MEAN)
    engine.run()
    assert engine.scheduler.load().preemptions > 0
    assert engine.last("mean").embedding == embedding(LONG)


def test_log_probabilities_of_a_prompt_come_chunk_by_chunk_before_its_first_token() -> None:
    engine = Engine(capacity_blocks=24, step_tokens=8)
    engine.submit("a", LONG, sampling=SCORED)
    chunks = []
    while not engine.output("a"):
        [work] = engine.step()
        chunks.append(work.end - work.start)
        given = engine.prompt("a")
        assert given is not None
        assert given == prompt_logprobs(LONG, 1, min(sum(chunks), len(LONG) - 1), 2), "all that are known"
    assert len(chunks) == 5
    engine.run()
    before = [part.prompt_logprobs is not None for part in engine.parts["a", 1]]
    assert before == sorted(before, reverse=True)
    assert all(one.prompt_logprobs.size_bytes <= PIECE_BYTES for one in engine.parts["a", 1] if one.prompt_logprobs)
    assert engine.output("a") == continuation(LONG, 2, 64)


def test_a_scored_prompt_takes_no_block_from_others_but_leaves_them_its_own() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    computed = engine.runner.computed_tokens
    engine.submit("scored", PROMPT, sampling=SCORED)
    engine.run()
    assert engine.last("scored").cached_tokens == 0
    assert engine.runner.computed_tokens == computed + len(PROMPT) + 1
    assert engine.prompt("scored") == prompt_logprobs(PROMPT, 1, len(PROMPT) - 1, 2)
    engine = Engine()
    engine.submit("scored", PROMPT, sampling=SCORED)
    engine.run()
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    assert engine.last("a").cached_tokens == 4


def test_a_scored_prompt_waits_for_no_block_of_the_kvbm() -> None:
    engine = Engine()
    cache = engine.scheduler.kv_cache
    cache.set_connected(True)
    engine.submit("scored", PROMPT, sampling=SCORED)
    [work] = engine.step()
    assert (work.start, cache.fetch_changes()) == (0, ([], []))
    engine.submit("plain", OTHER, sampling=NO_EOS)
    engine.step()
    [fetch], _ = cache.fetch_changes()
    assert len(fetch.keys) == 1, "another prompt asks"


def test_two_scored_prompts_at_once_share_nothing_before_it_is_scored() -> None:
    engine = Engine(capacity_blocks=24, step_tokens=4)
    for name in ("a", "b"):
        engine.submit(name, LONG[:20], sampling=SCORED)
    engine.run()
    for name in ("a", "b"):
        assert engine.prompt(name) == prompt_logprobs(LONG[:20], 1, 19, 2)


def test_a_prompt_that_was_preempted_in_its_midst_sends_no_log_probability_twice() -> None:
    engine = Engine(capacity_blocks=23, step_tokens=4)
    engine.submit("decoding", [1, 1], sampling=Sampling(max_tokens=12, ignore_eos=True), priority=1)
    engine.step()
    engine.submit("scored", LONG, sampling=SCORED)
    scored: list[int] = []
    while engine.scheduler.busy:
        scored += [position for work in engine.step() for position in work.scoring]
    assert engine.scheduler.load().preemptions > 0
    assert scored == list(range(len(LONG) - 1)), "each position once"
    assert engine.prompt("scored") == prompt_logprobs(LONG, 1, len(LONG) - 1, 2)
    assert engine.output("scored") == continuation(LONG, 2, 64)


def test_after_a_preemption_blocks_whose_positions_were_scored_are_reused() -> None:
    engine = Engine(capacity_blocks=24, step_tokens=8)
    engine.submit("scored", LONG, sampling=SCORED)
    engine.step()
    engine.step()
    [sequence] = engine.scheduler._running
    assert (sequence.computed, sequence.work.scored) == (16, 17)
    engine.scheduler._requeue(sequence)
    [work] = engine.step()
    assert work.start == 16, "its own blocks are cached"
    engine.run()
    assert engine.prompt("scored") == prompt_logprobs(LONG, 1, len(LONG) - 1, 2)


def test_a_scored_prompt_that_is_cancelled_in_its_midst_leaves_nothing() -> None:
    engine = Engine(capacity_blocks=24, step_tokens=8)
    engine.submit("scored", LONG, sampling=SCORED)
    engine.step()
    engine.scheduler.cancel("scored", 1)
    engine.run()
    assert engine.last("scored").finish == "cancelled"
    assert engine.prompt("scored") == prompt_logprobs(LONG, 1, 8, 2)
    assert engine.scheduler.load().held_blocks == engine.scheduler.living == 0


def test_a_row_of_a_prompt_that_is_not_finite_is_computed_once_more_and_then_ends_it() -> None:
    engine = Engine(capacity_blocks=24, step_tokens=8)
    engine.submit("scored", LONG, sampling=SCORED)
    engine.step()
    assert step_with(engine, lambda _: True) == 1
    given = engine.prompt("scored")
    assert given is not None
    assert given.count == 8, "nothing of the wrong chunk"
    assert engine.scheduler.load().recomputed == 1
    engine.step()
    engine.step()
    assert engine.prompt("scored") == prompt_logprobs(LONG, 1, 16, 2), "none twice"
    assert step_with(engine, lambda _: True) == 1
    engine.run()
    assert engine.last("scored").finish == "error"
    assert engine.last("scored").error.startswith(NOT_FINITE)


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever else is asked for, each prompt gets exactly its own continuation."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            capacity_blocks=10, context_length=24, max_running=3, max_waiting=6, step_tokens=6, overtaking=2.0
        )
        self.engine.copies = True  # a block may outlive one that was forgotten
        self.asked: dict[str, tuple[list[int], list[int], Sampling]] = {}

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=26),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        time_left_s=st.sampled_from([0.02, 1e9, 1e9, 1e9]),
        wait_left_s=st.sampled_from([None, None, 0.0, 0.02]),
        salt=st.sampled_from(["", "", "tenant"]),
        pooling=st.sampled_from(["", "", "mean", "last"]),
        begun=st.sampled_from([0, 0, 0, 1, 3]),
        scores=st.sampled_from([-1, -1, 0, 2]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        time_left_s: float,
        wait_left_s: float | None,
        salt: str,
        pooling: Pooling,
        begun: int,
        scores: int,
    ) -> None:
        drawn = [] if pooling else continuation(prompt, max_tokens, 24)[:-1][:begun]
        scores = -1 if pooling or drawn else scores
        name = f"r{len(self.asked)}"
        sampling = Sampling(max_tokens=max_tokens, pooling=pooling, prompt_logprobs=scores)
        self.asked[name] = (prompt, drawn, sampling)
        self.engine.submit(
            name,
            prompt,
            produced=drawn,
            sampling=sampling,
            priority=priority,
            time_left_s=time_left_s,
            wait_left_s=wait_left_s,
            salt=salt,
        )

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        self.engine.scheduler.cancel(f"r{pick % len(self.asked)}", 1)

    @rule(count=st.integers(1, 6), elapsed_s=st.sampled_from([0.001, 0.01, 0.5]))
    def step(self, count: int, elapsed_s: float) -> None:
        for _ in range(count):
            works = self.engine.step(elapsed_s)
            assert works or not self.engine.scheduler.load().waiting, "attempts wait and nothing is computed"

    @rule()
    def clear(self) -> None:
        """Forget all cached blocks, of running requests too."""
        scheduler = self.engine.scheduler
        self.engine.take(scheduler.drain())
        scheduler.clear()
        self.engine.cached.clear()
        assert (scheduler.kv_cache.digest, scheduler.kv_cache.snapshot()) == (0, [])

    @rule(tokens=st.integers(1, 6))
    def ask_probe(self, tokens: int) -> None:
        """Its first token is 0, as of all probes."""
        self.engine.scheduler.ask_probe([0] * tokens)

    @rule(pick=st.integers(0, 2))
    def step_that_is_not_finite(self, pick: int) -> None:
        """Make one of its works not finite, but for a probe; each block may outlive another from then on."""
        self.engine.copies = True
        numbers = itertools.count()
        step_with(self.engine, lambda work: work.history[0] != 0 and next(numbers) == pick)

    @rule(count=st.integers(1, 40))
    def overflow(self, count: int) -> None:
        """The numbers of all requests are not finite for some steps; those of a probe are."""
        self.engine.copies = True
        for _ in range(count):
            step_with(self.engine, lambda work: work.history[0] != 0)

    @invariant()
    def consistent(self) -> None:
        self.engine.scheduler.validate()

    def teardown(self) -> None:
        self.engine.run()
        for name, (prompt, drawn, sampling) in self.asked.items():
            expected = [] if sampling.pooling else continuation(prompt, sampling.max_tokens, 24)[len(drawn) :]
            output, last = self.engine.output(name), self.engine.last(name)
            assert last.embedding == (embedding(prompt) if sampling.pooling and last.finish == "stop" else b"")
            assert sum(part.finish is not None for part in self.engine.parts[name, 1]) == 1
            assert output == expected[: len(output)]
            given = self.engine.prompt(name)
            if given is not None:
                assert given == prompt_logprobs(prompt, 1, given.count, sampling.prompt_logprobs)
            elif output:
                assert sampling.prompt_logprobs < 0 or len(prompt) == 1
            assert given is None or not output or given.count == len(prompt) - 1
            if last.finish in ("stop", "length"):
                assert output == expected
            else:
                assert last.finish in ("cancelled", "deadline", "error")
            assert last.finish != "error" or last.error
            assert not (output and last.error.startswith(NOT_BEGUN))


def test_a_clear_ends_an_attempt_that_all_of_the_cache_has_no_room_for_again() -> None:
    """It has drawn one token more than fits: it would wait for ever."""
    machine = SchedulerMachine()
    more: dict[str, Any] = {"time_left_s": 60.0, "wait_left_s": None, "pooling": "", "priority": 0, "salt": ""}
    machine.submit(begun=0, max_tokens=2, prompt=[1] * 20, scores=-1, **more)
    for _ in range(4):
        machine.engine.step(0.001)
    machine.clear()
    machine.step(count=1, elapsed_s=0.001)
    assert machine.engine.last("r0").error == "the KV cache of 10 blocks is full"
    machine.teardown()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=25)
