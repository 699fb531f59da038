"""Finds a model's special tokens: those with names, such as bos_token, and those that end an answer.

The names come from tokenizer_config.json and special_tokens_map.json as in transformers. An answer ends at each token
that any file names as its end, as in SGLang, and at tokens whose text says that a turn is over, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import MALFORMED, ModelError
from shared.model_file import (
    CONFIG,
    CONFIG_LIMIT_BYTES,
    FILES,
    GENERATION,
    LIST_LIMIT_BYTES,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_model_json,
)
from shared.model_files.config_json import ConfigJson, token_ids

END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end_of_turn|>"),
    *("<|end|>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>"),
)
"""Texts of added tokens that end a turn or a text in every family that has them. Many files do not name these tokens:
older GGUF files, and fine-tunes that learned a format of chats which their base model did not have."""
_HARMONY = frozenset(("<|return|>", "<|call|>"))
"""Tokens of a family, gpt-oss, in which <|end|> ends a message and an answer has several."""
_QWEN = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
_GEMMA = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_GPT2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
_OF_CLASS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"Qwen2Tokenizer": _QWEN, "GemmaTokenizer": _GEMMA, "GPT2Tokenizer": _GPT2}
)
"""transformers' defaults: `tokenizer_class`, without Fast at its end → the tokens that a file need not name."""
_CLASS_OF_TYPE = {
    **{"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gemma": "GemmaTokenizer", "gemma2": "GemmaTokenizer"},
    **{"gemma3": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer"},
}
"""`model_type` → the class of a tokenizer whose files name none."""


class _Added(Struct):
    id: int
    content: str


class _Model(Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(Struct):
    added_tokens: list[_Added] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


class _Config(Struct):
    model_type: str | None = None


class _Generation(Struct):
    eos_token_id: Any = None


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; empty if there is none. Raise ModelError."""
    return read_model_json(directory / TOKENIZER_CONFIG, dict[str, Any], limit_bytes=LIST_LIMIT_BYTES, missing=b"{}")


def read_special_tokens_map(directory: Path) -> dict[str, Any]:
    """Return the content of special_tokens_map.json. Empty if there is none, or if tokenizer_config.json has an
    `added_tokens_decoder`: such files are complete, and transformers reads no other. Raise ModelError."""
    if "added_tokens_decoder" in read_tokenizer_config(directory):
        return {}
    return read_model_json(directory / SPECIAL_TOKENS, dict[str, Any], limit_bytes=LIST_LIMIT_BYTES, missing=b"{}")


def read_named_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and the like, by these names. Raise ModelError.

    special_tokens_map.json counts before tokenizer_config.json, and this before the defaults of transformers' class of
    the tokenizer. Null means no token.
    """
    config = read_tokenizer_config(directory)
    named = config.get("tokenizer_class")
    if named is None:
        kind = read_model_json(directory / CONFIG, _Config, limit_bytes=CONFIG_LIMIT_BYTES, missing=b"{}").model_type
        named = _CLASS_OF_TYPE.get(kind or "")
    return named_tokens(_OF_CLASS.get(str(named).removesuffix("Fast"), {}), config, read_special_tokens_map(directory))


def named_tokens(*sources: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of named tokens; a later source replaces an earlier one's. *Pure.*

    A source has a token as a text, as an added token with its content, or as null. `extra_special_tokens` may have
    further names."""
    found: dict[str, str] = {}
    for source in sources:
        more = source.get("extra_special_tokens")
        tokens = {name: value for name, value in source.items() if name.endswith("_token")}
        for name, value in (tokens | (more if isinstance(more, dict) else {})).items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
            elif value is None:
                found.pop(name, None)
    return found


def read_end_tokens(directory: Path, config: ConfigJson, vocab: int, default: int | None = None) -> tuple[int, ...]:
    """Return the ids of all tokens that end an answer, each once: those of config.json (and its text part), of
    generation_config.json, of the tokenizer, and those whose texts say so. `default` counts if there are none.

    `vocab` is the number of the model's tokens. Raise ModelError if config.json or generation_config.json names another
    id. A token that the tokenizer has in excess of the model is left out, since the model cannot write it.
    """
    path = directory / GENERATION
    generation = read_model_json(path, _Generation, missing=b"{}")
    found: list[int] = []
    for where, value in (
        (config.path, config.outer.get("eos_token_id")),
        (config.path, (config.text or {}).get("eos_token_id")),
        (path, generation.eos_token_id),
    ):
        ids = token_ids(value, "eos_token_id", str(where))
        if not all(0 <= token < vocab for token in ids):
            raise ModelError(f"{where}: eos_token_id {tuple(ids)} is outside the vocabulary of {vocab}")
        found.extend(ids)
    found.extend(read_tokenizer_ends(directory, vocab))
    if not found and default is not None and "eos_token_id" not in config.settings:
        found.append(default)
    return tuple(dict.fromkeys(found))


def read_tokenizer_ends(directory: Path, vocab: int) -> tuple[int, ...]:
    """Return the ids of the tokens below `vocab` that end an answer as the tokenizer's files say. Raise ModelError."""
    tokenizer = read_model_json(directory / TOKENIZER, _Tokenizer, limit_bytes=FILES[TOKENIZER], missing=b"{}")
    added = {token.content: token.id for token in tokenizer.added_tokens}
    decoder = read_tokenizer_config(directory).get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if number.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            added.setdefault(token["content"], int(number))
    ends = list(end_of_turn_ids(added))
    eos = read_named_tokens(directory).get("eos_token")
    if eos is not None and (first := added.get(eos, _vocabulary(tokenizer, directory).get(eos))) is not None:
        ends.insert(0, first)
    return tuple(token for token in ends if token < vocab)


def end_of_turn_ids(added: Mapping[str, int]) -> Iterable[int]:
    """Yield the ids of the added tokens (text → id) whose texts end a turn. *Pure.*"""
    for text in END_OF_TURN:
        if text in added and not (text == "<|end|>" and _HARMONY.intersection(added)):
            yield added[text]


def _vocabulary(tokenizer: _Tokenizer, directory: Path) -> dict[str, int]:
    try:
        vocab = msgspec.json.decode(tokenizer.model, type=_Model).vocab
    except MALFORMED as wrong:
        raise ModelError(f"{directory / TOKENIZER}: {wrong}") from None
    return vocab if isinstance(vocab, dict) else {text: number for number, (text, _) in enumerate(vocab)}
