"""Tokenises texts and detokenises tokens for clients that count: vLLM's /tokenize and /detokenize.

    {"prompt"} or {"messages"}  ──▶  {"count", "max_model_len", "tokens", "token_strs"}
    {"tokens"}                  ──▶  {"prompt"}

A prompt is made as for a completion or a chat, so that counts agree with `usage`. No worker is asked. An answer may be
many times as long as its body: it is limited, and made in turns of TOKENS_PER_TURN with other tasks between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from services.frontend.config import LimitsConfig
from services.frontend.models.chat_template import RENDERED_LIMIT_CHARACTERS
from services.frontend.models.encode_pool import KeyPool
from services.frontend.models.model import Model, ModelLimits
from services.frontend.models.preprocess import check_encoded, check_vocabulary, encode, truncate
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.detokenize import Detokenizer
from services.frontend.protocol import tokenize
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.errors import field_error
from services.frontend.requests.terms import allowed_s
from services.frontend.serving.prompts import ImageSize, chat_prompt, until
from services.frontend.serving.request_context import RequestContext
from shared.hashing import token_array

TokenOperation = Literal["tokenize", "detokenize"]
TOKENS_PER_TURN = 4096
"""The count of tokens that are written before other tasks run: about a millisecond."""


class ServingTokenize(Struct, frozen=True):
    """Answers /tokenize and /detokenize."""

    models: ModelRegistry
    limits: LimitsConfig
    sizes: Callable[[ChatRequest, ModelLimits, RequestContext], Awaitable[Sequence[ImageSize]]]
    """Returns the sizes of a chat's images, where their tokens depend on them."""

    async def answer(self, operation: TokenOperation, body: bytes, pool: KeyPool, context: RequestContext) -> bytes:
        """Return the JSON answer. `pool` is the request's. Raise InvalidRequest, Overloaded, Unavailable and
        RequestTimeout."""
        deadline_s = asyncio.get_running_loop().time() + allowed_s(None, context.deadline_header, self.limits)
        if operation == "tokenize":
            answering = self._tokenize(tokenize.decode_tokenize(body, context.ignored), pool, context)
        else:
            answering = self._detokenize(tokenize.decode_detokenize(body, context.ignored))
        return await until(deadline_s, "its answer was complete", answering)

    async def _tokenize(self, request: tokenize.TokenizeRequest, pool: KeyPool, context: RequestContext) -> bytes:
        await self.models.wait_expected(request.model)
        model, limits = self.models.find(request.model)
        param = "prompt" if request.messages is None else "messages"
        special = request.messages is None if request.add_special_tokens is None else request.add_special_tokens
        if request.messages is None:
            packed = await encode(model, request.prompt or "", pool, special=special, param=param)
            check_encoded(model, packed, limits, param=param)
        else:
            asked = tokenize.chat_of(request, request.messages)
            sizes = await self.sizes(asked, limits, context)
            packed = (await chat_prompt(asked, model, limits, pool, context.ignored, sizes, special=special)).tokens
        tokens = token_array(truncate(packed, request.truncate_prompt_tokens, limits, None))
        if len(tokens) > tokenize.TOKENS_LIMIT:
            raise field_error(param, f"{len(tokens)} tokens, more than {tokenize.TOKENS_LIMIT}")
        return msgspec.json.encode(
            tokenize.Tokenized(
                len(tokens),
                limits.context_length,
                await _listed(tokens, int),
                await _listed(tokens, model.tokenizer.id_to_token) if request.return_token_strs else None,
            )
        )

    async def _detokenize(self, request: tokenize.DetokenizeRequest) -> bytes:
        await self.models.wait_expected(request.model)
        model, limits = self.models.find(request.model)
        check_vocabulary(request.tokens, limits, param="tokens")
        text = await detokenize(model, request.tokens, param="tokens")
        return msgspec.json.encode(tokenize.Detokenized(text))


async def detokenize(model: Model, tokens: Sequence[int], *, param: str, ends: bool = True) -> str:
    """Return the text of tokens of the vocabulary, special tokens in their written form, as in vLLM. `param` names the
    field that they came from. `ends` is false if other tokens follow, so that an unfinished character is left to them.
    Raise InvalidRequest."""
    output = Detokenizer(msgspec.structs.replace(model.token_bytes, table=model.token_bytes.names))
    pieces: list[str] = []
    left = RENDERED_LIMIT_CHARACTERS
    for start in range(0, len(tokens), TOKENS_PER_TURN):
        if start:
            await asyncio.sleep(0)
        pieces.append(output.push(tokens[start : start + TOKENS_PER_TURN]))
        left -= len(pieces[-1])
        if left < 0:
            raise field_error(param, f"the text is longer than {RENDERED_LIMIT_CHARACTERS} characters")
    return "".join((*pieces, output.finish() if ends else ""))


async def _listed(tokens: Sequence[int], shown: Callable[[int], int | str | None]) -> msgspec.Raw:
    """Return what `shown` returns for each token, as one JSON list."""
    pieces: list[bytes] = []
    for start in range(0, len(tokens), TOKENS_PER_TURN):
        if start:
            await asyncio.sleep(0)
        pieces.append(msgspec.json.encode([shown(token) for token in tokens[start : start + TOKENS_PER_TURN]])[1:-1])
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
