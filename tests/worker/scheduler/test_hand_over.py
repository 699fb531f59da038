from __future__ import annotations

from services.worker.scheduler.hand_over import STORING_MOST_S
from shared.hashing import content_keys, pack_tokens, root_key
from shared.messages.generate import Sampling
from tests.worker.fake_runner import continuation
from tests.worker.manual_engine import Engine

PROMPT = [1, 2, 3, 4, 1, 2]
NO_EOS = Sampling(max_tokens=8, ignore_eos=True)


def test_an_attempt_that_only_prefills_ends_with_its_first_token_and_leaves_its_blocks() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, sampling=NO_EOS, prefill_only=True)
    engine.run()
    assert engine.output("a") == continuation(PROMPT, 1, 64)
    assert engine.last("a").finish == "handed_over"
    engine.submit("a", PROMPT, attempt=2, produced=engine.output("a"), sampling=NO_EOS)
    engine.run()
    assert engine.parts["a", 2][0].cached_tokens == 6


def test_a_prompt_is_handed_over_when_its_blocks_are_stored_or_it_has_waited_as_long_as_it_was_computed() -> None:
    for end in ("declined", "waited", "no kvbm", "cancelled"):
        engine = Engine()
        offloading = engine.scheduler.kv_cache.offloading
        offloading.set_enabled(True)
        engine.submit("a", PROMPT, sampling=NO_EOS, prefill_only=True)
        engine.step(0.5)
        assert [(part.finish, len(part.tokens)) for part in engine.parts["a", 1]] == [(None, 4)]
        assert not engine.scheduler.busy
        assert engine.scheduler.living == 1
        assert engine.scheduler.wait_until_s == 1.0, "it was computed for half a second"
        assert engine.scheduler.load().held_blocks == 0
        if end == "declined":
            offloading.declined([content.key for content in offloading.offers(64)])
        elif end == "waited":
            engine.now_s = 1.0
        elif end == "no kvbm":
            offloading.set_enabled(False)
        else:
            engine.scheduler.cancel("a", 1)
        engine.step()
        finish = "cancelled" if end == "cancelled" else "handed_over"
        assert (engine.last("a").finish, engine.last("a").first, engine.last("a").tokens) == (finish, 1, b"")
        assert engine.scheduler.living == 0
        assert engine.scheduler.wait_until_s is None


def test_a_prompt_whose_blocks_another_engine_reads_is_handed_over_with_its_first_token() -> None:
    engine = Engine()
    engine.scheduler.kv_cache.offloading.set_enabled(True)
    shared = content_keys(root_key("model"), pack_tokens(PROMPT), 2)[-1]
    engine.scheduler.kv_cache.is_shared = lambda key: key == shared
    engine.submit("a", PROMPT, sampling=NO_EOS, prefill_only=True)
    engine.step(0.5)
    assert [(part.finish, len(part.tokens)) for part in engine.parts["a", 1]] == [("handed_over", 4)]


def test_a_prompt_whose_blocks_another_engine_reads_after_its_first_token_is_handed_over_at_once() -> None:
    engine = Engine()
    engine.scheduler.kv_cache.offloading.set_enabled(True)
    shared: set[bytes] = set()
    engine.scheduler.kv_cache.is_shared = shared.__contains__
    engine.submit("a", PROMPT, sampling=NO_EOS, prefill_only=True)
    engine.step(0.5)
    assert not engine.scheduler.busy
    shared.add(content_keys(root_key("model"), pack_tokens(PROMPT), 2)[-1])
    assert engine.scheduler.busy, "an engine without other work does not sleep over it"
    engine.step()
    assert engine.last("a").finish == "handed_over"


def test_an_attempt_that_only_prefills_and_is_complete_with_its_first_token_is_not_handed_over() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, max_tokens=1, prefill_only=True)
    engine.run()
    assert engine.last("a").finish == "length"


def test_a_prompt_that_was_computed_for_long_waits_for_its_blocks_no_longer_than_the_most_seconds() -> None:
    engine = Engine(step_tokens=16)
    engine.scheduler.kv_cache.offloading.set_enabled(True)
    engine.submit("a", PROMPT, sampling=NO_EOS, prefill_only=True)
    engine.submit("b", list(reversed(PROMPT)), sampling=NO_EOS, prefill_only=True, time_left_s=60.5)
    engine.step(60.0)
    assert set(engine.scheduler.hand_overs.names) == {("a", 1), ("b", 1)}
    assert engine.scheduler.wait_until_s == 60.5, "the other one's deadline"
    engine.now_s = 60.5
    engine.step()
    assert set(engine.scheduler.hand_overs.names) == {("a", 1)}
    assert engine.scheduler.wait_until_s == 60.0 + STORING_MOST_S
