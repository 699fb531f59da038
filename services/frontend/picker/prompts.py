"""Reads of a request's body what routers need: its prompt's blocks, and how much load it is.

    body ─▶ its API's own decoder ─▶ a chat or a completion ─▶ template, tokens, hashes ─▶ GatewayPrompt
        └── it cannot be read here: another path, an unknown model, a picture, more than 4 MiB ─▶ by load alone

A picker refuses no request that a server may serve, so what cannot be read here goes to a server by load alone, and
that answers for itself. What this process has no room for is refused.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from msgspec import Struct

from services.frontend.anthropic import request as anthropic
from services.frontend.protocol import responses_request
from services.frontend.protocol.chat import decode_chat
from services.frontend.protocol.completions import DEFAULT_TOKENS, decode_completion
from services.frontend.protocol.decoding import decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.operations import FOREIGN_PATHS, PATHS
from services.frontend.protocol.text_plan import TextRequest, plan_of
from services.frontend.requests.terms import deadline_of, served_priority
from services.frontend.serving.chat import ServingChat
from services.frontend.serving.foreign import ServingForeign
from services.frontend.serving.prompts import IMAGES_READ, TOKENISED, key_pool, until
from services.frontend.serving.request_context import RequestContext
from services.frontend.serving.text_prompts import AskedText, tokenise_text
from shared.errors import InvalidRequest, Overloaded, RequestTimeout, Unavailable
from shared.hashing import pack_hashes, seed_of, sequence_hashes

BYTES_A_TOKEN = 4
"""How many bytes of a body that is not read count as a token of load."""


class _NamedModel(Struct):
    model: str | None = None


_find_model = msgspec.json.Decoder(_NamedModel).decode


class GatewayPrompt(Struct, frozen=True):
    """What routers need to know of a request."""

    model: str
    """The name of the base model. Empty if the request names none that is known."""
    deadline: float
    """On the event loop's clock."""
    prompt_tokens: int
    max_tokens: int = 1
    hashes: bytes = b""
    """The sequence hashes of the prompt's full blocks, packed u64. Empty if the prompt was not read."""
    lora: str = ""
    session: str = ""
    priority: int = 0
    unread: str = ""
    """Why the prompt was not read. Empty if it was."""


class GatewayPrompts(Struct, frozen=True):
    """Reads the bodies of all requests."""

    chat: ServingChat
    foreign: ServingForeign

    async def read(self, path: str, body: bytes, context: RequestContext) -> GatewayPrompt:
        """Return what a body asks for, and admit it. Raise Overloaded and RequestTimeout."""
        try:
            prompt = await self._read(path.partition("?")[0], body, context)
        except (Overloaded, RequestTimeout):
            raise
        except (InvalidRequest, Unavailable) as why:
            prompt = self._unread(body, context, str(why))
        context.permit.model = prompt.model
        context.permit.add_tokens(0)  # they are a server's, and none is here
        return prompt

    async def _read(self, path: str, body: bytes, context: RequestContext) -> GatewayPrompt:
        request, limits = self._decode(path, body, context), self.chat.service.limits
        plan = plan_of(request)
        deadline = deadline_of(request.deadline_s, context.deadline_header, context.received_s, limits)
        priority = served_priority(request.priority, context.lowest_priority)
        model, of_model = self.chat.models.find(request.model)
        asked = AskedText(request, plan, model, of_model, context, deadline.at, priority)
        pool, most = key_pool(self.chat.pool, context.permit), min(limits.choices, limits.requests)
        default = None if plan.is_chat else DEFAULT_TOKENS
        sizes = await until(deadline.at, IMAGES_READ, self.chat.image_sizes(request, of_model, context))
        tokenised = await until(deadline.at, TOKENISED, tokenise_text(asked, pool, default, most, sizes))
        first = tokenised.prompts[0]  # the others of a completion go where it goes
        seed = seed_of(model.lora, context.salt(request.cache_salt))
        self.chat.metrics.hops["tokenise"].observe(asyncio.get_running_loop().time() - context.received_s)
        return GatewayPrompt(
            model=model.base,
            deadline=deadline.at,
            prompt_tokens=first.count,
            max_tokens=first.max_tokens,
            hashes=pack_hashes(sequence_hashes(first.tokens, model.block_size, seed)),
            lora=model.lora,
            session=request.prompt_cache_key or context.session,
            priority=priority,
        )

    def _decode(self, path: str, body: bytes, context: RequestContext) -> TextRequest:
        """Return a body as a chat or a completion. Raise InvalidRequest and Unavailable."""
        ignored = context.ignored
        if path == PATHS["chat"]:
            return decode_chat(body, ignored)
        if path == PATHS["completions"]:
            return decode_completion(body, ignored)
        if path == PATHS["responses"]:
            asked = responses_request.decode_response(body, ignored)
            if asked.request.previous_response_id is not None:
                raise field_error("previous_response_id", "its server has that conversation")
            return responses_request.as_chat(asked, [], ignored)
        if path == FOREIGN_PATHS["messages"]:
            return self.foreign.as_chat(decode_body(anthropic.MessagesRequest, body, ignored), context)[0]
        raise InvalidRequest(f"{path[:64]} has no prompt that is read here")

    def _unread(self, body: bytes, context: RequestContext, why: str) -> GatewayPrompt:
        """Return how a body that is not read is routed. Its load is what a text of its size would be."""
        named = None
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            named = _find_model(body).model
        deadline = context.received_s + self.chat.service.limits.deadline_s
        tokens = max(1, len(body) // BYTES_A_TOKEN)
        return GatewayPrompt(self.chat.models.base_of(named), deadline, tokens, unread=why)
