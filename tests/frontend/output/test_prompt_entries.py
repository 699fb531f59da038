"""The entries of a prompt's tokens: names, offsets, and the first token, which has no log-probability."""

from __future__ import annotations

from array import array

from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.prompt_entries import PromptEntries
from shared.hashing import pack_tokens
from shared.messages.frames import PromptLogprobs

TEXTS = [b"", b"Hal", b"lo", "ä".encode()[:1], "ä".encode()[1:], b"!"]
TOKENS = TokenBytes(TEXTS, [b"<s>", *TEXTS[1:]], strip_first_space=False)
PROMPT = [0, 1, 2, 3, 4, 5]


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_offsets_count_characters_and_special_tokens_have_none() -> None:
    entries = PromptEntries(TOKENS, pack_tokens(PROMPT), "Halloä!")
    found = [
        entries.opening(),
        *entries.push(PromptLogprobs(1, floats(-1, -2))),
        *entries.push(PromptLogprobs(3, floats(-3, -4, -5))),
    ]
    assert [one.token for one in found] == [b"<s>", *TEXTS[1:]]
    assert [one.text_offset for one in found] == [0, 0, 3, 5, 5, 6]
    assert [one.logprob for one in found[1:]] == [-1, -2, -3, -4, -5]
    assert [one.opens_prompt for one in found] == [True, *[False] * 5]


def test_the_likeliest_tokens_are_named() -> None:
    entries = PromptEntries(TOKENS, pack_tokens([1, 2]), "Hallo")
    entries.opening()
    [one] = entries.push(PromptLogprobs(1, floats(-3), pack_tokens([5, 2]), floats(-0.5, -3)))
    assert [(top.token, top.logprob) for top in one.top] == [(b"!", -0.5), (b"lo", -3.0)]


def test_offsets_never_pass_the_text() -> None:
    entries = PromptEntries(TOKENS, pack_tokens([1, 2, 5]), "Hall")
    entries.opening()
    assert [one.text_offset for one in entries.push(PromptLogprobs(1, floats(-1, -2)))] == [3, 4]


def test_a_special_token_has_characters_where_the_text_has_it() -> None:
    entries = PromptEntries(TOKENS, pack_tokens([0, 1, 0, 2]), "Hal<s>lo")
    found = [entries.opening(), *entries.push(PromptLogprobs(1, floats(-1, -2, -3)))]
    assert [one.text_offset for one in found] == [0, 0, 3, 6]


def test_the_space_that_a_text_drops_is_in_no_name() -> None:
    spaced = TokenBytes([b"", b" Hello"], [b"<s>", b" Hello"], strip_first_space=True)
    entries = PromptEntries(spaced, pack_tokens([0, 1, 1]), "Hello Hello")
    given = PromptLogprobs(1, floats(-1, -2), pack_tokens([1, 1]), floats(-1, -2))
    found = [entries.opening(), *entries.push(given)]
    assert [one.token for one in found] == [b"<s>", b"Hello", b" Hello"]
    assert [top.token for one in found for top in one.top] == [b"Hello", b" Hello"]
    assert [one.text_offset for one in found] == [0, 0, 5]
