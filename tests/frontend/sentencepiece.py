"""Tokenizers as Llama 2, Mistral 7B and Phi-3 have them: ▁ for a space, a token for each byte, and a decoder that drops
the space that stands before a text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.frontend.peers import VOCABULARY

Spaces = Literal["prepend", "first", "always", "none", "metaspace"]
"""What puts the space before a text. `prepend`: a normalizer; `first`, `always`: Metaspace with that scheme; `none`:
nothing, and the decoder drops none, as Gemma's; `metaspace`: Metaspace, which is the decoder too, as XLM-RoBERTa's."""
SPECIAL = ("<unk>", "<s>", "</s>", "<mid>")
FIRST_BYTE = len(SPECIAL)
"""The token id of the byte 0."""


def sentencepiece(spaces: Spaces = "prepend", special: tuple[str, ...] = SPECIAL, words: int = 0) -> Tokenizer:
    """With `words` in all, if it is not 0: the rest are tokens that no text has."""
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helowrd水é"]
    merges: list[tuple[str, str]] = []
    for word in ("▁Hello", "▁world"):
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            pieces.append(word[: end + 1])
    pieces += [f"unused {number}" for number in range(words - len(pieces))]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if spaces == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif spaces == "none":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        scheme = "always" if spaces == "metaspace" else spaces
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaces == "metaspace":
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁"), decoders.Fuse()])
    else:
        tokenizer.decoder = decoders.Sequence([*steps, *([] if spaces == "none" else [decoders.Strip(" ", 1, 0)])])
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in special])
    tokenizer.add_tokens([AddedToken("<call>", normalized=False, special=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", vocab["<s>"])])
    return tokenizer


def give_sentencepiece(directory: Path, spaces: Spaces = "prepend", special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """Give the tiny model in this directory such a tokenizer, and return it."""
    tokenizer = sentencepiece(spaces, special, VOCABULARY - 1)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer
