"""Makes tokenizer.json and tokenizer_config.json from a GGUF file's vocabulary (byte-level BPE).

A GGUF file does not say how text is split before merging. It has only a name for it (`tokenizer.ggml.pre`). The
patterns here are those of the models' own tokenizer.json files; llama.cpp has the same table (llama-vocab.cpp).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from shared.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # of gguf.TokenType


def _words(digits: str) -> str:
    """Return the pattern of GPT-4's family: contractions, words, runs of digits, punctuation, spaces."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True, slots=True)
class _Splitter:
    pre_tokenizer: PreTokenizer
    normalizer: Normalizer | None = None
    ignore_merges: bool = False
    """Whether a word that is a token skips the merges (Llama 3)."""
    adds_bos: bool = False
    """Whether a text begins with bos if the file does not say it, as in llama.cpp."""


def splitter_of(name: str) -> _Splitter | None:
    """Return the split that has this name in GGUF files; None if it is not served."""
    match name:
        case "smollm" | "starcoder" | "refact" | "codeshell" | "minerva-7b":  # digits one by one, then GPT-2's pattern
            digits = pre_tokenizers.Digits(individual_digits=True)
            return _Splitter(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))
        case "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "midm-2.0":
            return _Splitter(_by_pattern(_words(r"\p{N}{1,3}")), ignore_merges=True, adds_bos=True)
        case "qwen2" | "deepseek-r1-qwen" | "megrez" | "kormo" | "f2llmv2":
            return _Splitter(_by_pattern(_words(r"\p{N}")), normalizers.NFC())
        case _:
            return None


def _by_pattern(pattern: str) -> PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A GGUF file's `tokenizer.ggml.*`, as stored."""

    where: str
    """The file's path, for errors."""
    splitter: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int | None
    eos: int | None
    adds_bos: bool | None
    """Whether a text begins with bos; None if the file does not say it."""
    chat_template: str
    tool_template: str
    """The template of chats with tools; empty if there is only one."""

    def __post_init__(self) -> None:
        """Check the lists. Raise ModelError."""
        if not all(isinstance(text, str) for text in (*self.tokens, *self.merges)):
            raise ModelError(f"{self.where}: the vocabulary's tokens and merges must be strings")
        if len(set(self.tokens)) != len(self.tokens) or len(self.types) != len(self.tokens):
            raise ModelError(f"{self.where}: the vocabulary names a token twice, or not every token has a type")

    def tokenizer_json(self) -> str:
        """Return the content of tokenizer.json. Raise ModelError if the pre-tokenizer is unknown."""
        splitter = splitter_of(self.splitter)
        if splitter is None:
            named = (
                f"pre-tokenizer {self.splitter!r} is not supported"
                if self.splitter
                else "tokenizer.ggml.pre is missing"
            )
            raise ModelError(f"{self.where}: {named}; take a newer file of the model, or its Hugging Face directory")
        tokenizer = Tokenizer(self._merging(splitter.ignore_merges))
        if splitter.normalizer is not None:
            tokenizer.normalizer = splitter.normalizer
        tokenizer.pre_tokenizer = splitter.pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind == _CONTROL:
                tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            elif kind == _USER_DEFINED:
                tokenizer.add_tokens([AddedToken(token, normalized=False)])
        if self.adds_bos or (self.adds_bos is None and splitter.adds_bos and self.bos is not None):
            bos = self._text(self.bos, "bos_token_id")
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, self.bos)]
            )
        return tokenizer.to_str(pretty=False)

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.bos is not None:
            config["bos_token"] = self._text(self.bos, "bos_token_id")
        if self.eos is not None:
            config["eos_token"] = self._text(self.eos, "eos_token_id")
        named = {"default": self.chat_template, "tool_use": self.tool_template}
        if all(named.values()):
            config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        elif self.chat_template:
            config["chat_template"] = self.chat_template
        return config

    def _merging(self, ignore_merges: bool) -> models.BPE:
        ids = {token: number for number, token in enumerate(self.tokens)}
        merges: list[tuple[str, str]] = []
        for merge in self.merges:
            left, space, right = merge.partition(" ")
            if not space or left not in ids or right not in ids or left + right not in ids:
                raise ModelError(f"{self.where}: the merge {merge!r} is not of tokens in the vocabulary")
            merges.append((left, right))
        return models.BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges)

    def _text(self, token: int | None, field: str) -> str:
        if token is None or not 0 <= token < len(self.tokens):
            raise ModelError(f"{self.where}: {field} {token} is not in the vocabulary of {len(self.tokens)}")
        return self.tokens[token]


def as_json(value: dict[str, Any]) -> str:
    """Return the text of one of a model directory's JSON files."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
