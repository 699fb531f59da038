"""The body of /v1/completions: its fields beyond those that chats have too. Pure.

"prompt": "text" | ["text", …] | [1, 2, …] | [[1, 2, …], …]      prompts as text and as token ids may be mixed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from services.frontend.protocol.chat import CommonFields, TokenId, TopLogprobs, check_common
from services.frontend.protocol.decoding import Harmless, NotBuilt, decode_body
from shared.errors import InvalidRequest

DEFAULT_TOKENS = 16
"""OpenAI's default for `max_tokens`."""

PROMPTS_LIMIT = 2048
"""OpenAI's limit of prompts in one request; `limits.choices` may be lower."""

Prompt = str | Sequence[int]
"""One prompt, as a text or as token ids."""


class CompletionRequest(CommonFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[TokenId | str | list[TokenId]]
    """A prompt, as a text or as token ids, or a list of prompts."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    """Whether each answer begins with its prompt."""
    suffix: str | None = None
    """The text that follows the answer, so that the answer fills the gap between prompt and suffix. Empty: no
    suffix."""
    # not built
    best_of: Annotated[NotBuilt, Harmless(1)] = None
    """1 asks for nothing, since the only answer is the best one."""


_COMPLETION = msgspec.json.Decoder(CompletionRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Decode and check the body of a completion. Raises InvalidRequest, naming the field."""
    request = decode_body(_COMPLETION, body)
    check_common(request)
    if request.best_of is not None and request.n not in (None, 1):
        raise InvalidRequest("best_of: must not be less than n", param="best_of")
    if request.echo and request.logprobs is not None:
        wrong = "echo: cannot be combined with logprobs, since prompts have none"
        raise InvalidRequest(wrong, param="echo", code="unsupported_parameter")
    prompts = prompts_of(request)
    if request.suffix and not all(isinstance(prompt, str) for _, prompt in prompts):
        raise InvalidRequest("suffix: the prompt must be a text, not token ids", param="suffix")
    return request


def prompts_of(request: CompletionRequest) -> list[tuple[str, Prompt]]:
    """Return the prompts, each with the name of its place in the body. Raises InvalidRequest."""
    given = request.prompt
    if isinstance(given, str):
        return [("prompt", given)]
    tokens = [one for one in given if isinstance(one, int)]
    if len(tokens) == len(given):
        return [("prompt", tokens)]
    if len(given) > PROMPTS_LIMIT:
        raise InvalidRequest(f"prompt: {len(given)} prompts are more than the limit of {PROMPTS_LIMIT}", param="prompt")
    prompts: list[tuple[str, Prompt]] = []
    for at, one in enumerate(given):
        if isinstance(one, int):
            wrong = f"prompt[{at}]: a token id in a list of prompts; put the ids of one prompt in a list of their own"
            raise InvalidRequest(wrong, param=f"prompt[{at}]")
        prompts.append((f"prompt[{at}]" if len(given) > 1 else "prompt", one))
    return prompts
