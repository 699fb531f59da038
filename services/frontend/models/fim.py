"""Prompts for the text between a beginning and an end: fill in the middle (FIM), as models were taught it. Pure.

    prefix first     head <prefix> beginning <suffix> end <middle>      the answer is the middle
    suffix first     head <suffix> end <prefix> beginning               the answer continues the beginning

Each family of models has marks of its own, which are single tokens. If a tokenizer has a family's marks, its model is
assumed to know them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from shared.hashing import pack_tokens


class FimFamily(Struct, frozen=True):
    """The marks of one family, as text."""

    prefix: str
    suffix: str
    middle: str = ""
    """The mark before the answer; empty if the suffix comes first, and the answer continues the prefix."""
    ends: tuple[str, ...] = ()
    """Marks that may follow the middle, if the tokenizer has them; a new mark and the end of the text may too."""


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
    # DeepSeek: its hole is where the suffix begins
    FimFamily("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    # Codestral
    FimFamily("[PREFIX]", "[SUFFIX]"),
)

JOINT = "☺"
"""A text that merges with nothing; CodeLlama and mistral-common use it in the same way."""


class FimTokens(Struct, frozen=True):
    """The marks of a tokenizer. Tokens are packed as u32."""

    head: bytes
    """The tokens that the tokenizer puts before any text (Llama: `<s>`)."""
    prefix: bytes
    suffix: bytes
    middle: bytes
    """The mark before the answer; empty if the suffix comes first."""
    ends: tuple[int, ...]
    """Tokens that end the answer."""
    joint: bytes
    """The tokens of JOINT, if the tokenizer writes the beginning of a text differently from its middle (SentencePiece:
    a space before it); otherwise empty. A prefix is a beginning, a suffix is not."""

    def prompt(self, prefix: bytes, suffix: bytes) -> bytes:
        """Return the packed prompt for a packed prefix and suffix."""
        if self.middle:
            return b"".join((self.head, self.prefix, prefix, self.suffix, suffix, self.middle))
        return b"".join((self.head, self.suffix, suffix, self.prefix, prefix))


def read_fim_tokens(
    token_id: Callable[[str], int | None], encode: Callable[[str, bool], Sequence[int]]
) -> FimTokens | None:
    """Return the marks of a tokenizer; None if it has no known ones. `encode` takes a text, and whether special tokens
    go around it."""
    for family in FIM_FAMILIES:
        marks = [mark for mark in (family.prefix, family.suffix, family.middle) if mark]
        ids = [one for mark in marks if (one := token_id(mark)) is not None]
        if len(ids) < len(marks):
            continue
        ends = [one for end in family.ends if (one := token_id(end)) is not None]
        prefix, suffix, middle = [*(pack_tokens([mark]) for mark in ids), b""][:3]
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
