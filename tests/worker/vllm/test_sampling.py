"""What needs no vLLM of its sampling parameters."""

from __future__ import annotations

from msgspec.structs import fields

from services.worker.vllm.sampling import ROWS, refusal, seed_for, stop_token_ids
from shared.messages.generate import Sampling


def test_each_field_has_a_row() -> None:
    assert ROWS.keys() == {field.name for field in fields(Sampling)}


def test_seeds_of_continuations_differ_and_fit() -> None:
    seeds = [seed_for(2**64 - 1, continued) for continued in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_for(5, 0) == 5
    assert seed_for(5, 3) == seed_for(5, 3)


def test_what_cannot_be_continued_is_refused() -> None:
    assert refusal(Sampling(max_tokens=5), continued=4) == ""
    assert refusal(Sampling(max_tokens=5), continued=5).startswith("sampling.max_tokens: ")
    assert refusal(Sampling(max_tokens=5, grammar="start: /a/"), continued=0) == ""
    assert refusal(Sampling(max_tokens=5, grammar="start: /a/"), continued=1).startswith("sampling.grammar: ")


def test_an_answer_of_vllm_ends_at_all_ends_of_the_model_unless_the_request_ignores_them() -> None:
    assert stop_token_ids(Sampling(max_tokens=5, stop_token_ids=(7, 2)), (2, 0)) == [7, 2, 0]
    assert stop_token_ids(Sampling(max_tokens=5, stop_token_ids=(7,), ignore_eos=True), (2, 0)) == [7]
