"""Completes tokenizer.json with the added tokens that only other files name, as transformers does.

Without them a mark such as <|im_end|>, which a fine-tune has in its tokenizer_config.json alone, would be split into
pieces that the model never saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import ModelError
from shared.model_file import TOKENIZER, decode_model_json
from shared.model_files.special_tokens import read_named_tokens, read_special_tokens_map, read_tokenizer_config


class AddedToken(Struct, frozen=True):
    """A token that is found in a text before the text is split, and the rules by which it is found."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    """None means that only tokens that are not special are found in normalised text."""

    @property
    def settled(self) -> AddedToken:
        """This token with `normalized` decided."""
        given = self.normalized
        return msgspec.structs.replace(self, normalized=not self.special if given is None else given)


class _Tokenizer(Struct):
    added_tokens: list[AddedToken] = []


def complete_tokenizer(directory: Path, content: bytes) -> bytes:
    """Return the content of a directory's tokenizer.json with what other files add. Raise ModelError.

    A token in `added_tokens_decoder` of tokenizer_config.json counts before the same one in tokenizer.json. A named or
    additional special token that tokenizer.json has in its vocabulary alone becomes an added token.
    """
    path = directory / TOKENIZER
    has = {token.content: token.settled for token in decode_model_json(path, content, _Tokenizer).added_tokens}
    try:
        decoder, names = _declared(directory)
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{directory}: added_tokens_decoder of tokenizer_config.json: {wrong}") from None
    changed = {number: token for number, token in decoder.items() if has.get(token.content) != token}
    known = has.keys() | {token.content for token in changed.values()}
    missing = [AddedToken(text, special=True).settled for text in names if text not in known]
    if not changed and not missing:
        return content
    return _with_tokens(path, content, changed, missing)


def _declared(directory: Path) -> tuple[dict[int, AddedToken], list[str]]:
    """Return tokenizer_config.json's added tokens by their ids, and the texts of special tokens, each once."""
    config = read_tokenizer_config(directory)
    decoder = msgspec.convert(config.get("added_tokens_decoder") or {}, dict[str, AddedToken])
    texts = list(read_named_tokens(directory).values())
    for source in (config, read_special_tokens_map(directory)):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            texts += [_text(token) for token in source.get(name) or () if isinstance(source[name], list)]
    added = {int(number): token.settled for number, token in sorted(decoder.items()) if number.isdecimal()}
    return added, [text for text in dict.fromkeys(texts) if text]


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _with_tokens(path: Path, content: bytes, changed: dict[int, AddedToken], missing: list[AddedToken]) -> bytes:
    """Add the tokens that get the ids that the files say, or that the vocabulary has."""
    import tokenizers  # here: most models need no more than their tokenizer.json

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        for number, token in sorted(changed.items()):
            known = tokenizer.token_to_id(token.content)
            if (tokenizer.get_vocab_size() if known is None else known) == number:
                tokenizer.add_tokens([tokenizers.AddedToken(**msgspec.structs.asdict(token))])
        for token in missing:
            if tokenizer.token_to_id(token.content) is not None:
                tokenizer.add_tokens([tokenizers.AddedToken(**msgspec.structs.asdict(token))])
        return tokenizer.to_str().encode()
    except BaseException as wrong:  # noqa: BLE001  the package raises bare Exception; its panics are no Exception
        raise ModelError(f"{path}: {wrong}") from None
