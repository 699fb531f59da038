"""Tokenises texts and detokenises tokens for clients that count: vLLM's /tokenize and /detokenize.

    {"prompt"} or {"messages"}  ──▶  {"count", "max_model_len", "tokens", "token_strs"}
    {"tokens"}                  ──▶  {"prompt"}

A prompt is made as for a completion or a chat, so that counts agree with `usage`. No worker is asked. An answer may be
many times as long as its body: it is limited, and made in turns of TOKENS_PER_TURN with other tasks between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Literal, assert_never

import msgspec

from services.frontend.config import LimitsConfig
from services.frontend.models.chat_template import RENDERED_LIMIT_CHARACTERS
from services.frontend.models.model import Model
from services.frontend.models.preprocess import check_encoded, check_vocabulary, encode, render_chat
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.detokenize import Detokenizer
from services.frontend.protocol import chat
from services.frontend.protocol.tokenize import (
    TOKENS_LIMIT,
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    decode_detokenize,
    decode_tokenize,
)
from services.frontend.protocol.tools import tools_as_rendered
from services.frontend.requests.deadline import allowed_s
from shared.errors import InvalidRequest, RequestTimeout
from shared.hashing import token_array

TokenOperation = Literal["tokenize", "detokenize"]
TOKENS_PER_TURN = 4096
"""The count of tokens that are written before other tasks run: about a millisecond."""


class ServingTokenize:
    """Answers /tokenize and /detokenize."""

    def __init__(self, models: ModelRegistry, pool: Executor, limits: LimitsConfig) -> None:
        self._models = models
        self._pool = pool
        self._limits = limits

    async def answer(self, operation: TokenOperation, body: bytes, *, deadline_header: str | None = None) -> bytes:
        """Return the JSON answer. Raises InvalidRequest, Unavailable and RequestTimeout."""
        try:
            async with asyncio.timeout(allowed_s(None, deadline_header, self._limits)):
                match operation:
                    case "tokenize":
                        return await self._tokenize(decode_tokenize(body))
                    case "detokenize":
                        return await self._detokenize(decode_detokenize(body))
                    case _:
                        assert_never(operation)
        except TimeoutError:
            raise RequestTimeout("the request's deadline passed before its answer was complete") from None

    async def _tokenize(self, request: TokenizeRequest) -> bytes:
        model, limits = self._models.find(request.model)
        if request.messages is None:
            param, special, text = "prompt", True, request.prompt or ""
        else:
            param, special = "messages", False
            text = await render_chat(
                *(model, chat.messages_as_rendered(request.messages), self._pool),
                tools=tools_as_rendered(request.tools or ()),
                more=request.chat_template_kwargs or {},
                answer_begins=request.add_generation_prompt is not False,
            )
        if request.add_special_tokens is not None:
            special = request.add_special_tokens
        packed = await encode(model, text, self._pool, special=special, param=param)
        check_encoded(model, packed, limits, param=param)
        tokens = token_array(packed)
        if len(tokens) > TOKENS_LIMIT:
            raise InvalidRequest(f"{param}: {len(tokens)} tokens, more than {TOKENS_LIMIT}", param=param)
        return msgspec.json.encode(
            Tokenized(
                len(tokens),
                limits.context_length,
                await _listed(tokens, int),
                await _listed(tokens, model.tokenizer.id_to_token) if request.return_token_strs else None,
            )
        )

    async def _detokenize(self, request: DetokenizeRequest) -> bytes:
        model, limits = self._models.find(request.model)
        check_vocabulary(request.tokens, limits, param="tokens")
        text = await detokenize(model, request.tokens, param="tokens")
        return msgspec.json.encode(Detokenized(text))


async def detokenize(model: Model, tokens: Sequence[int], *, param: str) -> str:
    """Return the text of tokens of the vocabulary, special tokens in their written form, as in vLLM. `param` names the
    field that they came from. Raises InvalidRequest."""
    output = Detokenizer(msgspec.structs.replace(model.token_bytes, table=model.token_bytes.names))
    pieces: list[str] = []
    left = RENDERED_LIMIT_CHARACTERS
    for start in range(0, len(tokens), TOKENS_PER_TURN):
        if start:
            await asyncio.sleep(0)
        pieces.append(output.push(tokens[start : start + TOKENS_PER_TURN]))
        left -= len(pieces[-1])
        if left < 0:
            wrong = f"{param}: the text is longer than {RENDERED_LIMIT_CHARACTERS} characters"
            raise InvalidRequest(wrong, param=param)
    return "".join((*pieces, output.finish()))


async def _listed(tokens: Sequence[int], shown: Callable[[int], int | str | None]) -> msgspec.Raw:
    """Return what `shown` returns for each token, as one JSON list."""
    pieces: list[bytes] = []
    for start in range(0, len(tokens), TOKENS_PER_TURN):
        if start:
            await asyncio.sleep(0)
        pieces.append(msgspec.json.encode([shown(token) for token in tokens[start : start + TOKENS_PER_TURN]])[1:-1])
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
