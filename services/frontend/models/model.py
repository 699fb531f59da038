"""What the frontend knows of a model, from the model's directory.

A `Model` is loaded once, in a thread, and never changes. Its tokenizer must be, byte for byte, the one of the workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from tokenizers import Tokenizer

from services.frontend.models import template_trial
from services.frontend.models.bpe_cache import Words, read_words
from services.frontend.models.chat_template import ChatTemplate, pick_templates
from services.frontend.models.fim import FimTokens, read_fim_tokens
from services.frontend.output.detokenize import TokenBytes, read_token_bytes
from services.frontend.tool_parsers import reasoning
from services.frontend.tool_parsers.formats import FORMATS, FormatName, ReasoningName, detect_format, detect_reasoning
from shared.errors import ModelError
from shared.hashing import pack_tokens
from shared.messages import ModelCard, Pooling
from shared.model_file import (
    CONFIG_LIMIT_BYTES,
    LIST_LIMIT_BYTES,
    TOKENIZER_LIMIT_BYTES,
    read_model_file,
    read_model_json,
)


class ParserNames(Struct, frozen=True):
    """How what a model writes is taken apart; auto: as its chat template shows."""

    tools: FormatName | Literal["auto", "none"] = "auto"
    reasoning: ReasoningName | Literal["auto", "none"] = "auto"


BY_TEMPLATE = ParserNames()


class Model(Struct, frozen=True):
    """What the frontend knows of a model."""

    name: str
    tokenizer: Tokenizer
    words: Words | None
    """None: all texts are left to the tokenizer."""
    around: tuple[bytes, bytes]
    """Packed special tokens that the tokenizer puts before and behind a text of known words."""
    largest_token: int
    """The largest id that a text can be encoded to."""
    token_bytes: TokenBytes
    template: ChatTemplate | None
    """None: the model has none, and no chat."""
    tool_template: ChatTemplate | None
    """For requests with tools; None: the model's template has no place for them."""
    tool_format: FormatName | None
    """What its calls are written in; None: nobody knows."""
    thinks: bool
    """Its answers may begin with thinking."""
    marked_token_bytes: TokenBytes
    """With the special tokens that mark calls and thinking: for answers that are taken apart."""
    marks: Mapping[str, int]
    """Those marks that are tokens of their own → their ids."""
    fim: FimTokens | None
    """For answers between a prompt and a suffix; None: its tokenizer has no marks for that."""
    tokenizer_digest: str
    block_size: int


class ModelLimits(Struct, frozen=True):
    """What a prompt must fit into: the least that any worker of the model offers."""

    context_length: int
    vocab_size: int
    grammars: bool
    """Whether all of them can be held to a grammar."""
    biases: bool
    """Whether all of them add a `logit_bias`."""
    embedding_size: int = 0
    """Numbers of the embeddings of all of them; 0: not all embed, or not to as many."""
    pooling: Pooling = ""
    """What these are meant to be of; empty: something that is not built, or not the same for all."""


def model_limits(cards: Sequence[ModelCard]) -> ModelLimits:
    """`cards` are those of one model, at least one."""
    sizes = {card.embedding_size for card in cards}
    poolings: set[Pooling] = {card.pooling for card in cards}
    return ModelLimits(
        min(card.context_length for card in cards),
        min(card.vocab_size for card in cards),
        all(card.grammars for card in cards),
        all(card.biases for card in cards),
        sizes.pop() if len(sizes) == 1 else 0,
        poolings.pop() if len(poolings) == 1 else "",
    )


def load_model(card: ModelCard, directory: Path, parsers: ParserNames = BY_TEMPLATE) -> Model:
    """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Blocks. Raises ModelError."""
    content = read_model_file(directory / "tokenizer.json", TOKENIZER_LIMIT_BYTES)
    digest = hashlib.sha256(content).hexdigest()
    if digest != card.tokenizer_digest:
        raise ModelError(
            f"{directory / 'tokenizer.json'}: SHA-256 {digest[:16]}… is not the workers' {card.tokenizer_digest[:16]}…"
        )
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except BaseException as wrong:  # noqa: BLE001  the package raises bare Exception, and panics, which are none
        raise ModelError(f"{directory / 'tokenizer.json'}: {wrong}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words, around = _read_words(tokenizer, content)
    token_bytes = read_token_bytes(content)
    template, tool_template = _load_templates(directory)
    source = "" if tool_template is None else tool_template.source
    if parsers.tools == "auto":
        tool_format = detect_format(source)
    else:
        tool_format = None if parsers.tools == "none" else parsers.tools
    thinks = parsers.reasoning == "think" or (parsers.reasoning == "auto" and detect_reasoning(source) is not None)
    marks = (*(FORMATS[tool_format].marks if tool_format else ()), *(reasoning.MARKS if thinks else ()))
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    return Model(
        name=card.model,
        tokenizer=tokenizer,
        words=words,
        around=around,
        largest_token=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
        token_bytes=token_bytes,
        template=template,
        tool_template=tool_template if tool_template is not None and "tools" in tool_template.reads else None,
        tool_format=tool_format,
        thinks=thinks,
        marked_token_bytes=token_bytes.showing(marks) if marks else token_bytes,
        marks={mark: added[mark] for mark in marks if mark in added},
        fim=_read_infill(tokenizer),
        tokenizer_digest=digest,
        block_size=card.block_size,
    )


def _read_words(tokenizer: Tokenizer, content: bytes) -> tuple[Words | None, tuple[bytes, bytes]]:
    """As in Model."""
    bpe = tokenizer.model
    words = read_words(content, lambda word: [token.id for token in bpe.tokenize(word)], tokenizer.token_to_id)
    if words is None:
        return None, (b"", b"")
    around = {_around(tokenizer, words, probe) for probe in ("a", "b")}
    [found] = around if len(around) == 1 else [None]
    return (None, (b"", b"")) if found is None else (words, found)


def _read_infill(tokenizer: Tokenizer) -> FimTokens | None:
    try:
        return read_fim_tokens(
            tokenizer.token_to_id, lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids
        )
    except BaseException:  # noqa: BLE001  a tokenizer comes with the model, and may not know even these texts
        return None


def _around(tokenizer: Tokenizer, words: Words, probe: str) -> tuple[bytes, bytes] | None:
    """None: the tokenizer does more to a text than to put tokens before and behind."""
    try:
        alone, whole = tokenizer.encode(probe, add_special_tokens=False).ids, tokenizer.encode(probe).ids
    except BaseException:  # noqa: BLE001  a tokenizer comes with the model, and may not know even this text
        return None
    if not alone or list(words.encode(probe)) != [pack_tokens(alone)]:
        return None
    for start in range(len(whole) - len(alone) + 1):
        if whole[start : start + len(alone)] == alone:
            return pack_tokens(whole[:start]), pack_tokens(whole[start + len(alone) :])
    return None


def _load_templates(directory: Path) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """The one for requests without tools, and the one for those with tools: mostly the same."""
    path = directory / "tokenizer_config.json"
    config = read_model_json(path, dict[str, object], limit_bytes=LIST_LIMIT_BYTES, missing=b"{}")
    own_file = directory / "chat_template.jinja"
    if own_file.exists():  # wins, as in transformers
        try:
            sources = pick_templates(read_model_file(own_file, CONFIG_LIMIT_BYTES).decode(), str(own_file))
        except UnicodeDecodeError as wrong:
            raise ModelError(f"{own_file}: {wrong}") from None
    else:
        sources = pick_templates(config.get("chat_template"), str(path))
    if not sources.chat:
        return None, None
    named = _named_tokens(config)
    for source in {sources.chat, sources.tools}:
        template_trial.try_template(source, named)
    chat = ChatTemplate(sources.chat, named)
    return chat, chat if sources.tools == sources.chat else ChatTemplate(sources.tools, named)


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token and their like: written as a text, or as an added token with its content."""
    named: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[key] = text
    return named
