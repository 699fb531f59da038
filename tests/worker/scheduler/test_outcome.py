from __future__ import annotations

from services.worker.contracts.messages import AttemptNote
from services.worker.scheduler.outcome import Outcome
from shared.messages.frames import Part, PromptLogprobs


def part(attempt: int, first: int, tokens: int, embedding: bytes = b"") -> Part:
    return Part("r", attempt, first, bytes(4 * tokens), embedding=embedding)


def test_each_part_is_the_first_or_last_of_its_attempt_or_counts_the_tokens_that_it_brings() -> None:
    outcome = Outcome()
    outcome.add_boundary("f", part(1, 0, 1))
    outcome.add_between("f", part(1, 1, 1), 11)
    outcome.add_between("g", part(2, 5, 3), 12, 3)
    assert [one.first for one in outcome.parts["f"]] == [0, 1]
    assert outcome.boundary_parts == [outcome.parts["f"][0]]
    assert outcome.one_token_attempts == [11, 12, 12, 12]


def test_what_happened_later_comes_after_what_happened_before() -> None:
    outcome, later = Outcome(), Outcome()
    outcome.add_between("f", part(1, 1, 1), 11)
    later.add_between("f", part(1, 2, 1), 11)
    later.add_boundary("g", part(2, 0, 1))
    later.add_note(12, "preempted")
    outcome.extend(later)
    assert [one.first for one in outcome.parts["f"]] == [1, 2]
    assert outcome.boundary_parts == outcome.parts["g"]
    assert outcome.one_token_attempts == [11, 11]
    assert outcome.notes == [AttemptNote(12, "preempted")]


def test_embeddings_are_split_by_their_bytes_and_all_else_is_in_the_first() -> None:
    outcome = Outcome()
    outcome.add_between("f", part(1, 1, 1), 11)
    for attempt in (2, 3, 4):
        outcome.add_boundary("f", part(attempt, 0, 0, bytes(6)))
    split = outcome.split(12)
    assert [[one.attempt for one in each.parts["f"]] for each in split] == [[1, 2, 3], [4]]
    assert [[one.attempt for one in each.boundary_parts] for each in split] == [[2, 3], [4]]
    assert [each.one_token_attempts for each in split] == [[11], []]
    assert outcome.split(18) == [outcome]


def test_prompts_come_first_in_pieces_and_all_else_with_the_last_of_them() -> None:
    outcome, later = Outcome(), Outcome()
    outcome.add_between("f", part(1, 1, 1), 11)
    outcome.add_boundary("g", part(2, 0, 1))
    outcome.prompt_parts.append(("f", Part("r", 3, 0, b"", prompt_logprobs=PromptLogprobs(1, bytes(24)))))
    later.prompt_parts.append(("g", Part("r", 4, 0, b"", prompt_logprobs=PromptLogprobs(5, bytes(4)))))
    later.add_boundary("f", part(3, 0, 1))
    outcome.extend(later)
    first, second = outcome.split(16)
    [one] = first.parts["f"]
    assert one.prompt_logprobs == PromptLogprobs(1, bytes(16))
    assert [(each.attempt, each.prompt_logprobs) for each in second.parts["f"]] == [
        (3, PromptLogprobs(5, bytes(8))),
        (1, None),
        (3, None),
    ]
    assert [each.attempt for each in second.parts["g"]] == [4, 2]
    assert (first.boundary_parts, first.one_token_attempts) == ([], [])
    assert ([each.attempt for each in second.boundary_parts], second.one_token_attempts) == ([2, 3], [11])
    assert not second.prompt_parts
