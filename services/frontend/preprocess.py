"""From a model's directory to a `Model`, and from text to the token ids of a prompt.

A `Model` is loaded once, in a thread, and never changes. Its tokenizer must be, byte for byte, the one of the workers.

Encoding holds Python's lock for about a microsecond a token, unless it runs in `encode_batch_fast` in a thread: short
texts are encoded where they come, longer ones in the pool.

Special tokens: a rendered chat is encoded with its special tokens recognised, as vLLM and transformers do, because the
template writes them as text. So a user who writes `<|im_end|>` in a message can end the turn; whoever serves untrusted
text beside trusted text within one conversation should filter it. The prompt of a completion may hold them on purpose.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from services.frontend.detokenize import TokenBytes, read_token_bytes
from services.frontend.template import ChatTemplate, pick_template
from shared.errors import InvalidRequest, ModelError
from shared.messages import ModelCard

INLINE_CHARACTERS = 1024
"""Texts up to this length are encoded on the event loop."""
TURN_CHARACTERS = 32
"""What a message counts for beside its own texts: a template writes something around them."""


class Model(Struct, frozen=True):
    """What the frontend knows of a model."""

    name: str
    tokenizer: Tokenizer
    token_bytes: TokenBytes
    template: ChatTemplate | None
    """None: the model has none, and no chat."""
    tokenizer_digest: str
    block_size: int


class Limits(Struct, frozen=True):
    """What a prompt must fit into: the least that any worker of the model offers."""

    context_length: int
    vocab_size: int


class Prompt(Struct, frozen=True):
    """A prompt that fits."""

    tokens: Sequence[int]
    max_tokens: int


def limits_of(cards: Sequence[ModelCard]) -> Limits:
    """`cards` are those of one model, at least one."""
    return Limits(min(card.context_length for card in cards), min(card.vocab_size for card in cards))


def load_model(card: ModelCard, directory: Path) -> Model:
    """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Blocks. Raises ModelError."""
    content = _read(directory / "tokenizer.json")
    digest = hashlib.sha256(content).hexdigest()
    if digest != card.tokenizer_digest:
        raise ModelError(
            f"{directory / 'tokenizer.json'}: SHA-256 {digest[:16]}… is not the workers' {card.tokenizer_digest[:16]}…"
        )
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as wrong:  # noqa: BLE001  the package raises bare Exception
        raise ModelError(f"{directory / 'tokenizer.json'}: {wrong}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Model(
        name=card.model,
        tokenizer=tokenizer,
        token_bytes=read_token_bytes(content),
        template=_load_template(directory),
        tokenizer_digest=digest,
        block_size=card.block_size,
    )


def _load_template(directory: Path) -> ChatTemplate | None:
    path = directory / "tokenizer_config.json"
    config: dict[str, object] = {}
    if path.exists():
        try:
            config = msgspec.json.decode(_read(path), type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
            raise ModelError(f"{path}: {wrong}") from None
    own_file = directory / "chat_template.jinja"
    if own_file.exists():  # wins, as in transformers
        try:
            source = _read(own_file).decode()
        except UnicodeDecodeError as wrong:
            raise ModelError(f"{own_file}: {wrong}") from None
    else:
        source = pick_template(config.get("chat_template"), str(path))
    return ChatTemplate(source, _named_tokens(config)) if source else None


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token and their like: written as a text, or as an added token with its content."""
    named: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[key] = text
    return named


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as wrong:
        raise ModelError(f"{path}: {wrong.strerror}") from None
    except ValueError as wrong:  # the path comes from a card and may hold anything
        raise ModelError(f"{str(path)!r}: {wrong}") from None


# --- requests


async def encode_chat(model: Model, messages: Sequence[Mapping[str, str]], pool: Executor) -> list[int]:
    """Raises InvalidRequest."""
    template = model.template
    if template is None:
        raise InvalidRequest(f"the model {model.name!r} has no chat template; use /v1/completions", param="model")
    if sum(TURN_CHARACTERS + sum(map(len, message.values())) for message in messages) <= INLINE_CHARACTERS:
        return _encode(model.tokenizer, template.render(messages), special=False, param="messages")
    return await asyncio.get_running_loop().run_in_executor(
        pool, lambda: _encode(model.tokenizer, template.render(messages), special=False, param="messages")
    )


async def encode_text(model: Model, text: str, pool: Executor) -> list[int]:
    """With the special tokens that the tokenizer puts around a text (Llama: `<s>`). Raises InvalidRequest."""
    if len(text) <= INLINE_CHARACTERS:
        return _encode(model.tokenizer, text, special=True, param="prompt")
    return await asyncio.get_running_loop().run_in_executor(
        pool, lambda: _encode(model.tokenizer, text, special=True, param="prompt")
    )


def _encode(tokenizer: Tokenizer, text: str, *, special: bool, param: str) -> list[int]:
    try:
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=special)
    except Exception as wrong:  # noqa: BLE001  a tokenizer comes with the model, and the package raises bare Exception
        raise InvalidRequest(f"the model's tokenizer fails on the text: {wrong}", param=param) from None
    return encoding.ids


def fit(
    tokens: Sequence[int],
    limits: Limits,
    *,
    max_tokens: int | None,
    default: int | None,
    param: str,
    limit_param: str = "max_tokens",
) -> Prompt:
    """The prompt and how many tokens may follow: `max_tokens`, else `default`, else what the context leaves.

    `param` and `limit_param` name the fields that the prompt and `max_tokens` came from. Raises InvalidRequest.
    """
    if not tokens:
        raise InvalidRequest("the prompt is empty", param=param)
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        at, token = next((at, token) for at, token in enumerate(tokens) if not 0 <= token < limits.vocab_size)
        raise InvalidRequest(
            f"token id {token} at index {at} is outside the vocabulary of {limits.vocab_size}", param=f"{param}[{at}]"
        )
    room = limits.context_length - len(tokens)
    context = f"the model's context of {limits.context_length} tokens"
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {len(tokens)} tokens; with at least one to answer it does not fit {context}",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequest(
            f"the prompt's {len(tokens)} tokens and {limit_param} of {max_tokens} do not fit {context}",
            param=limit_param,
            code="context_length_exceeded",
        )
    wanted = room if max_tokens is None and default is None else max_tokens or default
    assert wanted is not None
    return Prompt(tokens, min(wanted, room))
