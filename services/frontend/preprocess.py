"""From a model's directory to a `Model`, and from text to the token ids of a prompt.

A `Model` is loaded once, in a thread, and never changes. Its tokenizer must be, byte for byte, the one of the workers.

Where a tokenizer's words are known exactly (`words.py`), a text is encoded on the event loop, section by section, and
others have a turn every TURN_CHARACTERS: 0.2 µs a token, against 1.1 in `tokenizers` and the way to a thread and back.
What is left to `tokenizers` holds Python's lock for its time, unless it runs in a thread: short texts are encoded where
they come, longer ones in the pool. A template is rendered where it comes as far as INLINE_STEPS go, else in the pool.

Special tokens: a rendered chat is encoded with its special tokens recognised, as vLLM and transformers do, because the
template writes them as text. So a user who writes `<|im_end|>` in a message can end the turn; whoever serves untrusted
text beside trusted text within one conversation should filter it. The prompt of a completion may hold them on purpose.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from services.frontend.detokenize import TokenBytes, read_token_bytes
from services.frontend.template import STEPS_LIMIT, ChatTemplate, Unfinished, pick_templates
from services.frontend.tools import thinking
from services.frontend.tools.formats import FORMATS, FormatName, ReasoningName, format_of, reasoning_of
from services.frontend.words import Words, read_words
from shared.errors import InvalidRequest, ModelError
from shared.hashing import pack_tokens, token_array
from shared.messages import ModelCard

INLINE_CHARACTERS = 4096
"""Texts up to this length are encoded by `tokenizers` on the event loop: 1 ms."""
TURN_CHARACTERS = 8192
"""Encoded from the table of words before others have a turn: 0.5 ms."""
INLINE_STEPS = 256
"""Of a template, on the event loop: 1 ms or so."""


class Parsers(Struct, frozen=True):
    """How what a model writes is taken apart; auto: as its chat template shows."""

    tools: FormatName | Literal["auto", "none"] = "auto"
    reasoning: ReasoningName | Literal["auto", "none"] = "auto"


BY_TEMPLATE = Parsers()


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
    tokenizer_digest: str
    block_size: int


class Limits(Struct, frozen=True):
    """What a prompt must fit into: the least that any worker of the model offers."""

    context_length: int
    vocab_size: int


class Prompt(Struct, frozen=True):
    """A prompt that fits."""

    tokens: bytes
    """Packed u32."""
    max_tokens: int

    @property
    def count(self) -> int:
        return len(self.tokens) // 4


def limits_of(cards: Sequence[ModelCard]) -> Limits:
    """`cards` are those of one model, at least one."""
    return Limits(min(card.context_length for card in cards), min(card.vocab_size for card in cards))


def load_model(card: ModelCard, directory: Path, parsers: Parsers = BY_TEMPLATE) -> Model:
    """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Blocks. Raises ModelError."""
    content = _read(directory / "tokenizer.json")
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
    tool_format = format_of(source) if parsers.tools == "auto" else None if parsers.tools == "none" else parsers.tools
    thinks = parsers.reasoning == "think" or (parsers.reasoning == "auto" and reasoning_of(source) is not None)
    marks = (*(FORMATS[tool_format].marks if tool_format else ()), *(thinking.MARKS if thinks else ()))
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
    config: dict[str, object] = {}
    if path.exists():
        try:
            config = msgspec.json.decode(_read(path), type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
            raise ModelError(f"{path}: {wrong}") from None
    own_file = directory / "chat_template.jinja"
    if own_file.exists():  # wins, as in transformers
        try:
            sources = pick_templates(_read(own_file).decode(), str(own_file))
        except UnicodeDecodeError as wrong:
            raise ModelError(f"{own_file}: {wrong}") from None
    else:
        sources = pick_templates(config.get("chat_template"), str(path))
    if not sources.chat:
        return None, None
    named = _named_tokens(config)
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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as wrong:
        raise ModelError(f"{path}: {wrong.strerror}") from None
    except ValueError as wrong:  # the path comes from a card and may hold anything
        raise ModelError(f"{str(path)!r}: {wrong}") from None


# --- requests


async def render_chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    pool: Executor,
    tools: Sequence[Mapping[str, Any]] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The text of a conversation, up to where its answer begins; `more` are the template's own names. Raises
    InvalidRequest."""
    template = _template(model, messages, with_tools=bool(tools))
    for name in more:
        if name not in template.reads or name == "tools":
            raise _not_read(f"the chat template of {model.name!r} has no {name!r}", f"chat_template_kwargs.{name}")
    try:
        return template.render(messages, INLINE_STEPS, tools=tools, more=more)
    except Unfinished:
        pass
    render = partial(template.render, messages, tools=tools, more=more)
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, render)
    except Unfinished:
        wrong = f"the chat template is not done after {STEPS_LIMIT} steps"
        raise InvalidRequest(wrong, param="messages") from None


def _template(model: Model, messages: Sequence[Mapping[str, Any]], *, with_tools: bool) -> ChatTemplate:
    """One that has a place for all that is said."""
    if model.template is None:
        raise InvalidRequest(f"the model {model.name!r} has no chat template; use /v1/completions", param="model")
    template = model.template
    if with_tools:
        if model.tool_template is None:
            raise _not_read(f"the chat template of {model.name!r} has no place for tools", "tools")
        if model.tool_format is None:
            wrong = f"how {model.name!r} writes calls does not show in its chat template, and no `tool_parser` is set"
            raise _not_read(wrong, "tools")
        template = model.tool_template
    if not template.reads_calls:
        for at, message in enumerate(messages):
            if "tool_calls" in message:
                wrong = f"the chat template of {model.name!r} has no place for calls of tools"
                raise _not_read(wrong, f"messages[{at}].tool_calls")
    return template


def _not_read(wrong: str, param: str) -> InvalidRequest:
    return InvalidRequest(wrong, param=param, code="unsupported_parameter")


async def encode_chat(model: Model, rendered: str, pool: Executor) -> bytes:
    """The packed tokens of a rendered conversation. Raises InvalidRequest."""
    return await _encode(model, rendered, pool, special=False, param="messages")


async def encode_text(model: Model, text: str, pool: Executor) -> bytes:
    """Packed, with the special tokens that the tokenizer puts around a text (Llama: `<s>`). Raises InvalidRequest."""
    return await _encode(model, text, pool, special=True, param="prompt")


async def _encode(model: Model, text: str, pool: Executor, *, special: bool, param: str) -> bytes:
    words = model.words
    if words is None:
        return await _tokenize(model.tokenizer, text, pool, special=special, param=param)
    before, behind = model.around if special else (b"", b"")
    packed = [before]
    left: list[str] = []
    turn = words.work + TURN_CHARACTERS
    for piece in words.encode(text):
        if isinstance(piece, str):
            left.append(piece)
        else:
            if left:
                packed.append(await _tokenize(model.tokenizer, "".join(left), pool, special=False, param=param))
                left.clear()
            packed.append(piece)
        if words.work > turn:
            await asyncio.sleep(0)
            turn = words.work + TURN_CHARACTERS
    if left:
        packed.append(await _tokenize(model.tokenizer, "".join(left), pool, special=False, param=param))
    packed.append(behind)
    return b"".join(packed)


async def _tokenize(tokenizer: Tokenizer, text: str, pool: Executor, *, special: bool, param: str) -> bytes:
    def tokenize() -> bytes:
        try:
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except BaseException as wrong:  # noqa: BLE001  a tokenizer comes with the model, and may even panic
            raise InvalidRequest(f"the model's tokenizer fails on the text: {wrong}", param=param) from None
        return pack_tokens(encoding.ids)

    if len(text) <= INLINE_CHARACTERS:
        return tokenize()
    return await asyncio.get_running_loop().run_in_executor(pool, tokenize)


def check_vocabulary(tokens: Sequence[int], limits: Limits, *, param: str) -> None:
    """`param` names the field that the tokens came from. Raises InvalidRequest."""
    if tokens and (min(tokens) < 0 or max(tokens) >= limits.vocab_size):
        at, token = next((at, token) for at, token in enumerate(tokens) if not 0 <= token < limits.vocab_size)
        raise InvalidRequest(
            f"token id {token} at index {at} is outside the vocabulary of {limits.vocab_size}", param=f"{param}[{at}]"
        )


def check_encoded(model: Model, tokens: bytes, limits: Limits, *, param: str) -> None:
    """The same for packed tokens that the model's tokenizer made."""
    if model.largest_token >= limits.vocab_size:
        check_vocabulary(token_array(tokens), limits, param=param)


def fit(
    tokens: bytes,
    limits: Limits,
    *,
    max_tokens: int | None,
    default: int | None,
    param: str,
    limit_param: str = "max_tokens",
) -> Prompt:
    """The packed prompt and how many tokens may follow: `max_tokens`, else `default`, else what the context leaves.

    `param` and `limit_param` name the fields that the prompt and `max_tokens` came from. Raises InvalidRequest.
    """
    if not tokens:
        raise InvalidRequest("the prompt is empty", param=param)
    count = len(tokens) // 4
    room = limits.context_length - count
    context = f"the model's context of {limits.context_length} tokens"
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {count} tokens; with at least one to answer it does not fit {context}",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequest(
            f"the prompt's {count} tokens and {limit_param} of {max_tokens} do not fit {context}",
            param=limit_param,
            code="context_length_exceeded",
        )
    wanted = room if max_tokens is None and default is None else max_tokens or default
    assert wanted is not None
    return Prompt(tokens, min(wanted, room))
