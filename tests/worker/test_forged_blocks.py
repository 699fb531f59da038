"""Two blocks with the same routing hash are still two blocks wherever bytes are kept."""

from __future__ import annotations

from services.worker.contracts.messages import Submit
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.scheduler import Scheduler
from shared.blocks import BlockPool, Content
from shared.hashing import block_hash, content_key, event_hash, pack_tokens, root_key, sequence_hashes
from shared.messages.generate import Sampling
from tests.forge import FORGED, VOCABULARY, forge
from tests.worker.fake_runner import FakeRunner

ONE, OTHER = FORGED


def test_the_search_finds_the_pair_again() -> None:
    assert forge() == FORGED


def test_a_forged_pair_has_one_routing_hash_and_two_content_keys() -> None:
    assert ONE != OTHER
    assert len(ONE) == len(OTHER) == 16
    assert all(0 <= token < VOCABULARY for token in (*ONE, *OTHER))
    one, other = pack_tokens(ONE), pack_tokens(OTHER)
    assert block_hash(one) == block_hash(other)
    assert sequence_hashes(one * 3, 16) == sequence_hashes(other * 3, 16)
    root = root_key("model")
    assert content_key(root, one) != content_key(root, other)
    assert event_hash(content_key(root, one)) != event_hash(content_key(root, other))


def test_a_forged_pair_never_shares_a_slot() -> None:
    pool = BlockPool(2)
    slots, _ = pool.allocate(2)
    kept: list[int] = []
    for slot, block in zip(slots, FORGED, strict=True):
        packed = pack_tokens(block)
        content = Content(key=content_key(root_key("model"), packed), parent=None, tokens=packed)
        assert content.key not in pool
        kept.append(pool.store(slot, content)[0])
    assert len(set(kept)) == 2


def test_an_engine_computes_the_second_of_a_forged_pair() -> None:
    runner = FakeRunner(block_size=16, capacity_blocks=16, context_length=256)
    scheduler = Scheduler(
        SchedulerLimits(
            model="model",
            context_length=256,
            eos_token_ids=frozenset(),
            block_size=16,
            capacity_blocks=16,
            max_waiting=512,
        )
    )
    for block in (ONE, OTHER, ONE):
        submit = Submit(
            request=str(block),
            attempt=1,
            frontend="f",
            tokens=pack_tokens((*block, 1)),
            prompt_tokens=17,
            sampling=Sampling(max_tokens=1),
            time_left_s=60.0,
        )
        scheduler.submit(submit, 0.0)
        cached = [-1]
        while scheduler.busy:
            outcome = scheduler.advance(runner.step(scheduler.schedule(0.0)), 0.01)
            cached += [part.cached_tokens for part in outcome.parts.get("f", [])]
        assert cached[-1] == (16 if runner.computed_tokens > 34 else 0)
    assert runner.computed_tokens == 17 + 17 + 1
