from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from services.virtual.loads import LoadTrace, TracePrompts, TraceRequest, agents, chats, ideal, read_trace, unshared
from shared.hashing import sequence_hashes, unpack_hashes


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}\n'
        '{"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 2]}\n'
    )
    load = read_trace(file)
    assert [each.arrival_s for each in load.requests] == [0.0, 3.0]
    assert [each.output_tokens for each in load.requests] == [5, 1]


def test_the_ideal_cache_reuses_full_blocks_and_leaves_a_token_to_compute() -> None:
    first, again = TraceRequest(0, 0.0, [7, 8], 128, 1), TraceRequest(1, 1.0, [7, 8], 128, 1)
    longer, partial = TraceRequest(2, 2.0, [7, 8, 9], 150, 1), TraceRequest(3, 3.0, [7, 8, 9], 150, 1)
    best = ideal(LoadTrace("made", 64, [first, again, longer, partial]))
    assert best.cached_blocks == 0 + 1 + 2 + 2
    assert best.cached_tokens == 5 * 64
    assert (best.full_blocks, best.prompt_tokens) == (8, 556)


def test_prompts_are_hashed_as_their_tokens_are() -> None:
    prompts, request = TracePrompts(64), TraceRequest(0, 0.0, [7, 300, 70_000], 150, 1)
    packed = prompts.tokens(request)
    assert len(packed) == 4 * 150
    assert unpack_hashes(prompts.hashes(request)) == sequence_hashes(packed, 64)
    assert prompts.tokens(TraceRequest(1, 0.0, [7, 301, 70_000], 150, 1)) != packed


@pytest.mark.parametrize("make", [unshared, chats, agents])
def test_made_up_loads_have_as_many_requests_as_asked_for_in_order_with_names_for_all_tokens(
    make: Callable[[int, Random], LoadTrace],
) -> None:
    load = make(200, Random(1))
    assert [each.number for each in load.requests] == list(range(200))
    arrivals = [each.arrival_s for each in load.requests]
    assert arrivals == sorted(arrivals)
    assert all(len(each.names) == -(-each.prompt_tokens // load.block_size) for each in load.requests)


def test_a_load_can_be_stretched_to_another_rate() -> None:
    load = unshared(100, Random(1))
    assert load.at(2.5).rate == pytest.approx(2.5)


def test_a_window_is_a_load_of_its_own() -> None:
    load = chats(20, Random(1))
    window = load.window(5, 10)
    assert [each.number for each in window.requests] == list(range(10))
    assert [each.names for each in window.requests] == [each.names for each in load.requests[5:15]]
    began_s = load.requests[5].arrival_s
    assert [each.arrival_s for each in window.requests] == [each.arrival_s - began_s for each in load.requests[5:15]]
