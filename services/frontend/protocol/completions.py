"""The body of /v1/completions: its fields beyond those that chats have too. Pure.

"prompt": "text" | ["text", …] | [1, 2, …] | [[1, 2, …], …]      prompts as text and as token ids may be mixed
"""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.protocol.chat import Choices, CommonFields, TokenId, TokenLimit, TopLogprobs, check_common
from services.frontend.protocol.decoding import decode_body, not_supported, texts_or_ids
from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields

DEFAULT_TOKENS = 16
"""OpenAI's default for `max_tokens`."""

PROMPTS_LIMIT = 2048
"""OpenAI's limit of prompts in one request; `limits.choices` may be lower."""

PROMPT_LOGPROBS_LIMIT = 1 << 18
"""The most log-probabilities of prompt tokens in one answer, counted over all prompts and choices: each token has its
own and those of the likeliest ones. They take 8 bytes each on their way from the worker."""

Prompt = str | Sequence[int]
"""One prompt, as a text or as token ids."""


class CompletionRequest(CommonFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[TokenId | str | list[TokenId]]
    """A prompt, as a text or as token ids, or a list of prompts."""
    max_tokens: TokenLimit | None = None
    """The maximum count of tokens in each answer; 0 only with `echo`, for the prompt alone."""
    logprobs: TopLogprobs | None = None
    """The count of likeliest tokens to report at each position, of the answer and with `echo` of the prompt too."""
    echo: bool | None = None
    """Whether each answer begins with its prompt."""
    suffix: str | None = None
    """The text that follows the answer, so that the answer fills the gap between prompt and suffix. Empty means no
    suffix."""
    best_of: Choices | None = None
    """Number of answers to choose `n` from. `n` itself asks for nothing, since all are returned; more is not built."""


def decode_completion(body: bytes, ignored: IgnoredFields = REFUSE) -> CompletionRequest:
    """Decode and check the body of a completion. Raise InvalidRequest, naming the field."""
    request = decode_body(CompletionRequest, body, ignored)
    check_common(request, ignored)
    if request.best_of is not None and request.best_of < (request.n or 1):
        raise field_error("best_of", "must not be less than n")
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise not_supported("best_of")
    if request.max_tokens == 0 and not request.echo:
        raise field_error("max_tokens", "must be at least 1, unless echo is true")
    if with_prompt_logprobs(request):
        for name in ("suffix", "truncate_prompt_tokens"):
            if getattr(request, name):
                why = "cannot be combined with echo and logprobs: the tokens are not those of the text"
                raise field_error(name, why, UNSUPPORTED)
    prompts = prompts_of(request)
    if request.suffix and not all(isinstance(prompt, str) for _, prompt in prompts):
        raise field_error("suffix", "the prompt must be a text, not token ids")
    if request.suffix and request.truncate_prompt_tokens is not None:
        raise field_error("truncate_prompt_tokens", "cannot be combined with suffix, whose marks it would cut off")
    return request


def with_prompt_logprobs(request: CompletionRequest) -> bool:
    """Return whether the log-probabilities of the prompts' tokens are asked for."""
    return bool(request.echo) and request.logprobs is not None


def prompts_of(request: CompletionRequest) -> list[tuple[str, Prompt]]:
    """Return the prompts, each with the name of its place in the body. Raise InvalidRequest."""
    prompts: list[tuple[str, Prompt]] = list(texts_or_ids(request.prompt, "prompt", PROMPTS_LIMIT).items())
    return prompts if len(prompts) > 1 else [("prompt", prompts[0][1])]
