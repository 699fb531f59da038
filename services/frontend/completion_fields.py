"""What clients may ask of /v1/completions, beyond what a chat has too; fields are classed as openai.py says. Pure.

"prompt": "text" | ["text", …] | [1, 2, …] | [[1, 2, …], …]      texts and lists of token ids may be mixed
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.frontend.openai import Common, TokenId, TopLogprobs, Unset, check_common, decode_body, not_supported
from shared.errors import InvalidRequest

DEFAULT_TOKENS = 16
"""OpenAI's, where no `max_tokens` is given."""

Prompt = str | Sequence[int]
"""A text, or token ids."""


class CompletionRequest(Common, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[TokenId | str | list[TokenId]]
    """One, as a text or as token ids, or a list of such ones."""
    logprobs: TopLogprobs | None = None
    # not built
    best_of: Unset = None
    echo: Unset = None
    suffix: Unset = None


_NOT_BUILT: dict[str, object] = {"best_of": 1, "echo": False, "suffix": ""}
"""Field → the value, beside null, that asks for nothing."""

_COMPLETION = msgspec.json.Decoder(CompletionRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest, naming the field."""
    request = decode_body(_COMPLETION, body)
    check_common(request)
    for field, harmless in _NOT_BUILT.items():
        value = getattr(request, field)
        # `1 == True` in Python: a flag is not a count.
        if value is not None and not (value == harmless and type(value) is type(harmless)):
            raise not_supported(field)
    if request.best_of is not None and request.n not in (None, 1):
        raise InvalidRequest("best_of: less than n", param="best_of")
    prompts_of(request)
    return request


def prompts_of(request: CompletionRequest) -> list[tuple[str, Prompt]]:
    """The prompts, each with the name of its place in the body. Raises InvalidRequest."""
    given = request.prompt
    if isinstance(given, str):
        return [("prompt", given)]
    tokens = [one for one in given if isinstance(one, int)]
    if len(tokens) == len(given):
        return [("prompt", tokens)]
    prompts: list[tuple[str, Prompt]] = []
    for at, one in enumerate(given):
        if isinstance(one, int):
            raise InvalidRequest("a token id beside prompts", param=f"prompt[{at}]")
        prompts.append((f"prompt[{at}]" if len(given) > 1 else "prompt", one))
    return prompts
