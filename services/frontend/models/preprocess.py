"""Turns messages, or a text, into the token ids of a prompt.

If a tokenizer's words are cached (bpe_cache.py), a text is encoded on the event loop, section by section. Other tasks
run after every CHARACTERS_PER_TURN. This takes 0.2 to 0.6 µs a token, against 1.2 in `tokenizers` and the way to a
thread and back. `tokenizers` holds Python's lock unless it runs in a thread, so short texts are encoded on the loop and
longer ones in the pool. A template is rendered on the loop for up to INLINE_STEPS and INLINE_BYTES, and otherwise in
the pool.

Special tokens: a rendered chat is encoded with its special tokens recognised, as in vLLM and transformers, because the
template writes them as text. So a user who writes `<|im_end|>` in a message can end the turn. A service that puts
untrusted text next to trusted text within one conversation should filter it. The prompt of a completion may have
special tokens on purpose.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct
from tokenizers import Encoding, Tokenizer

from services.frontend.models.chat_template import STEPS_LIMIT, ChatTemplate, MessagesRefused, StepLimitReached
from services.frontend.models.encode_pool import KeyPool
from services.frontend.models.fim import JOINT
from services.frontend.models.message_list import TemplateRules, fit
from services.frontend.models.model import Model, ModelLimits
from shared.errors import InvalidRequest
from shared.freed_memory import give_memory_back
from shared.hashing import pack_tokens, token_array

TEXT_TOKENS_LIMIT = 1 << 20
"""The largest number of tokens that a text is made into, also if the model's context is longer. Until they are packed,
`tokenizers` takes some 350 bytes for each."""
PIECE_CHARACTERS = 32_768
"""The number of characters from which a text is large, and of the pieces in which its tokens are counted: some 30 ms
and 10 MB."""
CUT_TOKENS = 256
"""The number of tokens by which a cut within a text may raise its count; words have less."""
INLINE_CHARACTERS = 4096
"""The longest text that `tokenizers` encodes on the event loop: 1 ms."""
CHARACTERS_PER_TURN = 8192
"""The number of characters that are encoded from the cache before other tasks run: 0.5 ms."""
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""What is put after a message's text to find its end in the rendered text, as in `transformers`. The space shows
whether the template strips texts."""
INLINE_STEPS = 256
"""The number of steps of a template that run on the event loop: about a millisecond."""
INLINE_BYTES = 64 << 10
"""The bytes of tools and variables, as JSON, with which a template runs on the event loop: one step may write all of
them, which takes up to 0.5 µs a byte."""


class Prompt(Struct, frozen=True):
    """A prompt that fits the model's context."""

    tokens: bytes
    """Token ids, packed as u32."""
    max_tokens: int
    images: tuple[int, ...] = ()
    """Where the tokens of each image begin."""

    @property
    def count(self) -> int:
        return len(self.tokens) // 4


async def render_chat(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    pool: KeyPool,
    tools: Sequence[Mapping[str, Any]] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
    *,
    answer_begins: bool = True,
    continues: bool = False,
) -> str:
    """Return the text of a conversation up to the beginning of its answer, unless `answer_begins` is false. With
    `continues` it ends with the text of the last message. `more` has values for the template's own names. Raise
    InvalidRequest."""
    template = _template(model, messages, with_tools=bool(tools))
    begins = answer_begins and not continues
    if continues:
        last = messages[-1]
        messages = [*messages[:-1], {**last, "content": last["content"] + _END_MARK}]

    async def rendered(turns: Sequence[Mapping[str, Any]]) -> str:
        return await _rendered(template, model, turns, pool, tools, more, answer_begins=begins)

    text = await _fitted(template.rules, messages, rendered)
    return _up_to_mark(text, f"messages[{len(messages) - 1}].content") if continues else text


async def _fitted(
    rules: TemplateRules,
    messages: Sequence[Mapping[str, Any]],
    rendered: Callable[[Sequence[Mapping[str, Any]]], Awaitable[str]],
) -> str:
    """Render messages as the template takes them by its rules; if it refuses that, as the strictest would."""
    fitted = fit(messages, rules)
    try:
        return await rendered(fitted)
    except MessagesRefused as refused:
        strict = fit(messages, rules.strict())
        if strict == fitted:
            raise
        try:
            return await rendered(strict)
        except MessagesRefused:
            raise refused from None


async def _rendered(
    template: ChatTemplate,
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    pool: KeyPool,
    tools: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any],
    *,
    answer_begins: bool,
) -> str:
    for name in more:
        if name not in template.reads or name == "tools":
            raise _not_read(f"the chat template of {model.name!r} has no {name!r}", f"chat_template_kwargs.{name}")
    if not (tools or more) or len(msgspec.json.encode((tools, dict(more)))) <= INLINE_BYTES:
        try:
            return template.render(messages, INLINE_STEPS, tools=tools, more=more, answer_begins=answer_begins)
        except StepLimitReached:
            pass
    render = partial(template.render, messages, tools=tools, more=more, answer_begins=answer_begins)
    try:
        return await pool.run(render)
    except StepLimitReached:
        wrong = f"the chat template needs more than {STEPS_LIMIT} steps"
        raise InvalidRequest(wrong, param="messages") from None


def _up_to_mark(text: str, param: str) -> str:
    """Return the text before the mark. A template that strips a message's text gets it stripped."""
    at = text.rfind(_END_MARK.strip())
    if at < 0:
        raise InvalidRequest(
            f"{param}: the chat template does not show it at the end, so that it cannot be continued", param=param
        )
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()


def _template(model: Model, messages: Sequence[Mapping[str, Any]], *, with_tools: bool) -> ChatTemplate:
    """Return the template that has a place for everything in the request. Raise InvalidRequest."""
    if model.template is None:
        raise InvalidRequest(f"the model {model.name!r} has no chat template; use /v1/completions", param="model")
    template = model.template
    if with_tools:
        if model.tool_template is None:
            raise _not_read(f"the chat template of {model.name!r} has no place for tools", "tools")
        if model.tool_format is None:
            wrong = f"the chat template of {model.name!r} shows no format of tool calls, and no `tool_parser` is set"
            raise _not_read(wrong, "tools")
        template = model.tool_template
    if not template.reads_calls and model.tool_template is not None and model.tool_template.reads_calls:
        if any("tool_calls" in message for message in messages):
            return model.tool_template
    elif not template.reads_calls:
        for at, message in enumerate(messages):
            if "tool_calls" in message:
                wrong = f"the chat template of {model.name!r} has no place for tool calls"
                raise _not_read(wrong, f"messages[{at}].tool_calls")
    return template


def _not_read(wrong: str, param: str) -> InvalidRequest:
    return InvalidRequest(wrong, param=param, code="unsupported_parameter")


async def encode_between(
    model: Model, before: str, after: str, pool: KeyPool, *, param: str, most: int = TEXT_TOKENS_LIMIT
) -> bytes:
    """Return the packed tokens of a prompt for the text between two others. `param` names the field of the first.
    Raise InvalidRequest."""
    fim = model.fim
    if fim is None:
        raise _not_read(f"suffix: {model.name!r} has no tokens for filling in the middle", "suffix")
    prefix = await encode(model, before, pool, special=False, param=param, most=most)
    joined = JOINT + after if fim.joint else after
    suffix = await encode(model, joined, pool, special=False, param="suffix", most=most)
    return fim.prompt(prefix, suffix.removeprefix(fim.joint))


async def encode(
    model: Model, text: str, pool: KeyPool, *, special: bool, param: str, most: int = TEXT_TOKENS_LIMIT
) -> bytes:
    """Return the packed tokens of a text; with `special`, also those that the tokenizer puts around it. `param` names
    the field that it came from. Raise InvalidRequest; for a text of more than `most` tokens, as soon as that is
    known."""
    most = min(most, TEXT_TOKENS_LIMIT)
    longest = model.characters_of_a_token
    if longest is not None and len(text) > most * longest:
        pool.made(most)  # it has more
        raise too_many_tokens(most, param)
    packed = await _encode(model, text, pool, special=special, param=param, most=most)
    pool.made(len(packed) // 4)
    return packed


async def _encode(model: Model, text: str, pool: KeyPool, *, special: bool, param: str, most: int) -> bytes:
    words = model.words
    if words is None:
        return await _tokenize(model, text, pool, special=special, param=param, most=most)
    before, after = model.around if special else (b"", b"")
    packed, size = [before], len(before) + len(after)
    left: list[str] = []
    turn = words.work + CHARACTERS_PER_TURN
    for piece in words.encode(text):
        if isinstance(piece, str):
            left.append(piece)
        else:
            if left:
                packed.append(await _tokenize(model, "".join(left), pool, special=False, param=param, most=most))
                size += len(packed[-1])
                left.clear()
            packed.append(piece)
            size += len(piece)
            if size > 4 * most:
                pool.made(size // 4)
                raise too_many_tokens(most, param)
        if words.work > turn:
            pool.at_least(size // 4)
            await asyncio.sleep(0)
            turn = words.work + CHARACTERS_PER_TURN
    if left:
        packed.append(await _tokenize(model, "".join(left), pool, special=False, param=param, most=most))
    packed.append(after)
    return b"".join(packed)


async def _tokenize(model: Model, text: str, pool: KeyPool, *, special: bool, param: str, most: int) -> bytes:
    """Return what `tokenizers` makes of a text. The tokens of a large one are counted in pieces first, so that it takes
    no more memory than `most` tokens and a piece."""
    if len(text) <= INLINE_CHARACTERS and model.encodes_inline:
        return pack_tokens(_encoding(model.tokenizer, text, param, special=special).ids)
    large = len(text) > PIECE_CHARACTERS
    if large:
        await _check_count(model.tokenizer, text, pool, param, most)

    def tokenize() -> bytes:
        packed = pack_tokens(_encoding(model.tokenizer, text, param, special=special).ids)
        if large:
            give_memory_back()
        return packed

    return await pool.run(tokenize, large=large or not model.encodes_inline)


def _encoding(tokenizer: Tokenizer, text: str, param: str, *, special: bool) -> Encoding:
    try:
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=special)
    except BaseException as wrong:  # noqa: BLE001  a tokenizer comes with the model, and may even panic
        raise InvalidRequest(f"the model's tokenizer fails on the text: {wrong}", param=param) from None
    return encoding


async def _check_count(tokenizer: Tokenizer, text: str, pool: KeyPool, param: str, most: int) -> None:
    """Count the tokens of a text piece by piece, and raise InvalidRequest as soon as they are surely too many."""

    def count(start: int) -> int:
        return len(_encoding(tokenizer, text[start : start + PIECE_CHARACTERS], param, special=False))

    counted, allowed = 0, most
    for start in range(0, len(text), PIECE_CHARACTERS):
        counted += await pool.run(partial(count, start), large=True)
        allowed += CUT_TOKENS
        pool.at_least(counted)
        if counted > allowed:
            pool.made(counted)
            await pool.run(give_memory_back, large=True)
            raise too_many_tokens(most, param)


def too_many_tokens(most: int, param: str) -> InvalidRequest:
    """Return the refusal of a text with more tokens than it may have, whose exact count is unknown."""
    if most == TEXT_TOKENS_LIMIT:
        return InvalidRequest(f"{param} has more than {most} tokens, the most that one text may have", param=param)
    why = f"the prompt has more than {most} tokens; with at least one to answer it does not fit the model's context of"
    return InvalidRequest(f"{why} {most} tokens", param=param, code="context_length_exceeded")


def check_vocabulary(tokens: Sequence[int], limits: ModelLimits, *, param: str) -> None:
    """Raise InvalidRequest for a token id outside the vocabulary. `param` names the field that the tokens came from.
    An array's ids are unsigned."""
    least = 0 if isinstance(tokens, array) else min(tokens, default=0)
    if least < 0 or max(tokens, default=0) >= limits.vocab_size:
        at, token = next((at, token) for at, token in enumerate(tokens) if not 0 <= token < limits.vocab_size)
        why = f"token id {token} at index {at} is outside the vocabulary of {limits.vocab_size}"
        raise InvalidRequest(why, param=f"{param}[{at}]")


def check_encoded(model: Model, tokens: bytes, limits: ModelLimits, *, param: str) -> None:
    """Raise InvalidRequest for a token id outside the vocabulary, in packed tokens from the model's tokenizer."""
    if model.largest_token >= limits.vocab_size:
        check_vocabulary(token_array(tokens), limits, param=param)


def truncate(tokens: bytes, kept: int | None, limits: ModelLimits, max_tokens: int | None) -> bytes:
    """Return the last `kept` tokens of a packed prompt. None keeps all; -1 keeps as many as leave room for
    `max_tokens`, or for one. Raise InvalidRequest."""
    if kept is None:
        return tokens
    most = limits.context_length - 1
    if kept > most:
        why = f"truncate_prompt_tokens: {kept} is more than the {most} that leave room for an answer in the context"
        raise InvalidRequest(why, param="truncate_prompt_tokens")
    if kept < 0:
        kept = max(1, limits.context_length - (max_tokens or 1))
    return tokens[-4 * kept :]


def fit_context(
    tokens: bytes,
    limits: ModelLimits,
    *,
    max_tokens: int | None,
    default: int | None,
    param: str,
    limit_param: str = "max_tokens",
) -> Prompt:
    """Return the packed prompt and how many tokens may follow: `max_tokens`, else `default`, else the rest of the
    context.

    `param` and `limit_param` name the fields that the prompt and `max_tokens` came from. Raise InvalidRequest.
    """
    if not tokens:
        raise InvalidRequest("the prompt is empty", param=param)
    count = len(tokens) // 4
    room = limits.context_length - count
    context = f"the model's context of {limits.context_length} tokens"
    if room < 1:
        why = f"the prompt has {count} tokens; with at least one to answer it does not fit {context}"
        raise InvalidRequest(why, param=param, code="context_length_exceeded")
    if max_tokens is not None and max_tokens > room:
        why = f"the prompt's {count} tokens and {limit_param} of {max_tokens} do not fit {context}"
        raise InvalidRequest(why, param=limit_param, code="context_length_exceeded")
    return Prompt(tokens, min(max_tokens or default or room, room))
