"""What clients may ask of /v1/completions, beyond what a chat has too; fields are classed as chat.py says. Pure.

"prompt": "text" | ["text", …] | [1, 2, …] | [[1, 2, …], …]      texts and lists of token ids may be mixed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from services.frontend.protocol.chat import CommonFields, TokenId, TopLogprobs, check_common
from services.frontend.protocol.decoding import Harmless, NotBuilt, decode_body
from shared.errors import InvalidRequest

DEFAULT_TOKENS = 16
"""OpenAI's, where no `max_tokens` is given."""

PROMPTS_LIMIT = 2048
"""OpenAI's; `limits.choices` may be less."""

Prompt = str | Sequence[int]
"""A text, or token ids."""


class CompletionRequest(CommonFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[TokenId | str | list[TokenId]]
    """One, as a text or as token ids, or a list of such ones."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    """Each answer begins with its prompt."""
    suffix: str | None = None
    """The answer is what stands between the prompt and this; empty: as if there were none."""
    # not built
    best_of: Annotated[NotBuilt, Harmless(1)] = None
    """1 asks for nothing, since the only answer is the best one."""


_COMPLETION = msgspec.json.Decoder(CompletionRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest, naming the field."""
    request = decode_body(_COMPLETION, body)
    check_common(request)
    if request.best_of is not None and request.n not in (None, 1):
        raise InvalidRequest("best_of: must not be less than n", param="best_of")
    if request.echo and request.logprobs is not None:
        wrong = "echo: not beside logprobs, as there are none of a prompt"
        raise InvalidRequest(wrong, param="echo", code="unsupported_parameter")
    prompts = prompts_of(request)
    if request.suffix and not all(isinstance(prompt, str) for _, prompt in prompts):
        raise InvalidRequest("suffix: only beside prompts that are texts", param="suffix")
    return request


def prompts_of(request: CompletionRequest) -> list[tuple[str, Prompt]]:
    """The prompts, each with the name of its place in the body. Raises InvalidRequest."""
    given = request.prompt
    if isinstance(given, str):
        return [("prompt", given)]
    tokens = [one for one in given if isinstance(one, int)]
    if len(tokens) == len(given):
        return [("prompt", tokens)]
    if len(given) > PROMPTS_LIMIT:
        raise InvalidRequest(f"prompt: {len(given)} prompts, more than {PROMPTS_LIMIT}", param="prompt")
    prompts: list[tuple[str, Prompt]] = []
    for at, one in enumerate(given):
        if isinstance(one, int):
            raise InvalidRequest("a token id beside prompts", param=f"prompt[{at}]")
        prompts.append((f"prompt[{at}]" if len(given) > 1 else "prompt", one))
    return prompts
