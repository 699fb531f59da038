"""The entries of a prompt's tokens: names, offsets, and the first token, which has no log-probability."""

from __future__ import annotations

from array import array

from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.prompt_entries import PromptEntries
from shared.hashing import pack_tokens
from shared.messages import PromptLogprobs

TEXTS = [b"", b"Hal", b"lo", "ä".encode()[:1], "ä".encode()[1:], b"!"]
TOKENS = TokenBytes(TEXTS, [b"<s>", *TEXTS[1:]], strip_first_space=False)
PROMPT = [0, 1, 2, 3, 4, 5]


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def test_offsets_count_characters_and_special_tokens_have_none() -> None:
    entries = PromptEntries(TOKENS, pack_tokens(PROMPT), 7)
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
    entries = PromptEntries(TOKENS, pack_tokens([1, 2]), 5)
    entries.opening()
    [one] = entries.push(PromptLogprobs(1, floats(-3), pack_tokens([5, 2]), floats(-0.5, -3)))
    assert [(top.token, top.logprob) for top in one.top] == [(b"!", -0.5), (b"lo", -3.0)]


def test_offsets_never_pass_the_text() -> None:
    entries = PromptEntries(TOKENS, pack_tokens([1, 2, 5]), 4)
    entries.opening()
    assert [one.text_offset for one in entries.push(PromptLogprobs(1, floats(-1, -2)))] == [3, 4]
