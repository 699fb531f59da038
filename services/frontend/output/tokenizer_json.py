"""The parts of a tokenizer.json that this frontend reads itself, and GPT-2's alphabet of bytes. Pure."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shared.errors import MALFORMED, ModelError


class FoundToken(Struct):
    """A token in addition to the vocabulary, with the rules by which it is found in a text."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


class TokenizerModel(Struct):
    """The model of a tokenizer: the kind of model, and the ids of its tokens."""

    type: str | None = None
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    dropout: float | None = None
    unk_token: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class DecoderStep(Struct):
    """A step that turns tokens into text, or several."""

    type: str
    decoders: list[DecoderStep] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0
    replacement: str = ""
    prepend_scheme: str = "always"


class TokenizerStep(Struct):
    """A normalizer or pre-tokenizer, or a sequence of them."""

    type: str
    normalizers: list[TokenizerStep] = []
    pretokenizers: list[TokenizerStep] = []
    add_prefix_space: bool = True
    use_regex: bool = True
    individual_digits: bool = False
    pattern: dict[str, str] = {}
    content: str = ""
    behavior: str = ""
    invert: bool = False


class TokenizerJson(Struct):
    """The parsed content of a tokenizer.json."""

    model: TokenizerModel
    added_tokens: list[FoundToken] = []
    decoder: DecoderStep | None = None
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    """The JSON of a TokenizerStep or null; `steps` decodes it."""
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    """The JSON of a TokenizerStep or null; `steps` decodes it."""

    def steps(self) -> tuple[TokenizerStep | None, TokenizerStep | None] | None:
        """Return the normalizer and the pre-tokenizer; None if one has an unknown form, which is no error."""
        try:
            return _STEP.decode(self.normalizer), _STEP.decode(self.pre_tokenizer)
        except MALFORMED:
            return None


_STEP = msgspec.json.Decoder(TokenizerStep | None)


def parse_tokenizer_json(content: bytes) -> TokenizerJson:
    """Parse a tokenizer.json. Raise ModelError."""
    try:
        return msgspec.json.decode(content, type=TokenizerJson)
    except MALFORMED as wrong:
        raise ModelError(f"tokenizer.json: {wrong}") from None


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
CHARACTER_OF_BYTE = {byte: 0x100 + at for at, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))}
"""GPT-2's alphabet: the code points by which a byte-level vocabulary writes bytes that are not printable."""
BYTE_OF_CHARACTER = {chr(CHARACTER_OF_BYTE.get(byte, byte)): byte for byte in range(0x100)}
"""GPT-2's alphabet the other way round."""
