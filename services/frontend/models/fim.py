"""Prompts for the text between a beginning and an end, as models were taught to fill in what is missing. Pure.

    prefix first     head <prefix> beginning <suffix> end <middle>      the answer is the middle
    suffix first     head <suffix> end <prefix> beginning               it goes on from the beginning

Each family has marks of its own, which are single tokens. Where a tokenizer has a family's marks, its model is taken to
know them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from shared.hashing import pack_tokens


class FimFamily(Struct, frozen=True):
    """How one is written."""

    prefix: str
    suffix: str
    middle: str = ""
    """Empty: the suffix comes first, and the answer goes on from the prefix."""
    ends: tuple[str, ...] = ()
    """What else may come behind the middle, where a tokenizer has it, beside a new mark and the end of a text."""


FIM_FAMILIES = (
    # Qwen2.5-Coder, CodeGemma
    FimFamily(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite, StableCode; SantaCoder
    FimFamily("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<repo_name>", "<file_sep>")),
    FimFamily("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),
    # CodeLlama
    FimFamily("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # DeepSeek: what it calls a hole is where the suffix begins
    FimFamily("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    # Codestral
    FimFamily("[PREFIX]", "[SUFFIX]"),
)

JOINT = "☺"
"""A text that nothing merges with; CodeLlama and mistral-common use it alike."""


class FimTokens(Struct, frozen=True):
    """A tokenizer's marks. Tokens are packed u32."""

    head: bytes
    """What it puts before any text (Llama: `<s>`)."""
    prefix: bytes
    suffix: bytes
    middle: bytes
    """Empty: the suffix comes first."""
    ends: tuple[int, ...]
    """Tokens that end the answer."""
    joint: bytes
    """Of JOINT, where the tokenizer writes a text's beginning otherwise than its middle (SentencePiece: a space before
    it); empty: it does not. A prefix is a beginning, a suffix is not."""

    def prompt(self, prefix: bytes, suffix: bytes) -> bytes:
        """Packed tokens, of packed tokens."""
        if self.middle:
            return b"".join((self.head, self.prefix, prefix, self.suffix, suffix, self.middle))
        return b"".join((self.head, self.suffix, suffix, self.prefix, prefix))


def read_fim_tokens(
    token_id: Callable[[str], int | None], encode: Callable[[str, bool], Sequence[int]]
) -> FimTokens | None:
    """Of a tokenizer; `encode` takes a text, and whether special tokens go around it. None: it has no known marks."""
    for family in FIM_FAMILIES:
        marks = [mark for mark in (family.prefix, family.suffix, family.middle) if mark]
        ids = [one for mark in marks if (one := token_id(mark)) is not None]
        if len(ids) < len(marks):
            continue
        ends = [one for end in family.ends if (one := token_id(end)) is not None]
        prefix, suffix, middle = [*map(_packed, ids), b""][:3]
        return FimTokens(_head(encode), prefix, suffix, middle, (*ids, *ends), _joint(encode))
    return None


def _head(encode: Callable[[str, bool], Sequence[int]]) -> bytes:
    bare, whole = list(encode("a", False)), list(encode("a", True))
    before = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return pack_tokens(whole[:before])


def _joint(encode: Callable[[str, bool], Sequence[int]]) -> bytes:
    joint, joined = list(encode(JOINT, False)), list(encode(f"{JOINT}a", False))
    behind = joined[len(joint) :]
    return pack_tokens(joint) if joined[: len(joint)] == joint and behind != list(encode("a", False)) else b""


def _packed(token: int) -> bytes:
    return pack_tokens([token])
