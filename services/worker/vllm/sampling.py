"""Our sampling parameters as vLLM's. ROWS has one row for each field of Sampling.

What is different on vLLM:

- presence and frequency penalties: they count the tokens produced since the attempt began. On a continuation vLLM takes
  the earlier output for prompt, so these two penalties miss it; its parameters offer nothing better.
  `repetition_penalty` counts the prompt too, so it is the same.
- seed: a continuation draws from a seed of its own, made from the request's and the number of tokens that it continues:
  the same seed would repeat the random numbers of the first tokens. So a request with a seed has the same answer each
  time only if it is not continued.
- grammar: vLLM's matcher begins at the first new token, so a continuation under a grammar is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from services.worker.vllm.grammar_text import lark_text
from shared.errors import InvalidRequest
from shared.hashing import unpack_tokens
from shared.messages.generate import Sampling

_SEED_MASK = (1 << 63) - 1
_ODD = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9

Row = Callable[[Sampling, int], dict[str, Any]]
"""A field's arguments of vllm.SamplingParams, from the parameters and the number of earlier tokens."""


def seed_for(seed: int, continued: int) -> int:
    """Return the seed of an attempt, 0 … 2⁶³ - 1: some of vLLM's samplers keep it as int64, and -1 means none."""
    if continued:
        mixed = (seed + continued * _ODD) % (1 << 64)
        mixed = ((mixed ^ (mixed >> 30)) * _MIX) % (1 << 64)
        seed = mixed ^ (mixed >> 31)
    return seed & _SEED_MASK


def _same(name: str) -> Row:
    return lambda sampling, _: {name: getattr(sampling, name)}


ROWS: dict[str, Row] = {
    "max_tokens": lambda sampling, continued: {"max_tokens": sampling.max_tokens - continued},
    "temperature": _same("temperature"),
    "top_p": _same("top_p"),
    "top_k": _same("top_k"),  # 0 is off there, too
    "min_p": _same("min_p"),
    "seed": lambda sampling, continued: {"seed": seed_for(sampling.seed, continued)},
    "presence_penalty": _same("presence_penalty"),
    "frequency_penalty": _same("frequency_penalty"),
    "repetition_penalty": _same("repetition_penalty"),
    "logprobs": lambda sampling, _: {"logprobs": None if sampling.logprobs < 0 else sampling.logprobs},
    "prompt_logprobs": lambda sampling, _: {
        "prompt_logprobs": None if sampling.prompt_logprobs < 0 else sampling.prompt_logprobs
    },
    "stop_token_ids": lambda sampling, _: {"stop_token_ids": list(sampling.stop_token_ids)},
    "ignore_eos": _same("ignore_eos"),
    "grammar": lambda sampling, _: _structured(sampling.grammar),
    "logit_bias": lambda sampling, _: {"logit_bias": dict(sampling.logit_bias) or None},
    "allowed_tokens": lambda sampling, _: (
        {"allowed_token_ids": unpack_tokens(sampling.allowed_tokens)} if sampling.allowed_tokens else {}
    ),
    "pooling": lambda _sampling, _: {},  # to_pooling_params
    "min_tokens": lambda sampling, continued: {"min_tokens": max(0, sampling.min_tokens - continued)},
}


def refusal(sampling: Sampling, *, continued: int) -> str:
    """Return why vLLM cannot compute this, beginning with the field. Empty if it can. `continued`: output tokens that
    earlier attempts produced."""
    if continued >= sampling.max_tokens and not sampling.pooling:
        return f"sampling.max_tokens: {sampling.max_tokens}, of which {continued} were produced already"
    if sampling.grammar and continued:
        return "sampling.grammar: this engine cannot continue an answer under a grammar"
    return ""


def first_token(sampling: Sampling, continued: int) -> Sampling:
    """Return the parameters of an attempt that ends with its first token."""
    return replace(sampling, max_tokens=continued + 1, min_tokens=min(sampling.min_tokens, continued + 1))


def stop_token_ids(sampling: Sampling, ends: Sequence[int]) -> list[int]:
    """Return the tokens at which vLLM stops: the request's, and the model's `ends` unless the request ignores them."""
    return [*dict.fromkeys((*sampling.stop_token_ids, *(() if sampling.ignore_eos else ends)))]


def to_sampling_params(sampling: Sampling, *, continued: int, ends: Sequence[int] = ()) -> Any:
    """Return vllm.SamplingParams, whose outputs are new token ids only. Its limits count from the attempt's first
    token, ours from the request's. `ends` are the tokens that end an answer unless it ignores its end; vLLM by itself
    knows only some of them.

    Raise InvalidRequest, naming the field: also for a grammar that vLLM's guidance backend does not accept. Its check
    has no tokenizer, so errors that only the tokens show come later."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.structured_output.backend_guidance import (
        validate_guidance_grammar,
    )

    if fault := refusal(sampling, continued=continued):
        raise InvalidRequest(fault, param=fault.partition(":")[0])
    given: dict[str, Any] = {}
    for row in ROWS.values():
        given |= row(sampling, continued)
    given["stop_token_ids"] = stop_token_ids(sampling, ends)
    param = "sampling"
    try:
        params = SamplingParams(**given, output_kind=RequestOutputKind.DELTA, detokenize=False)
        param = "sampling.grammar"
        validate_guidance_grammar(params)
    except (VLLMValidationError, ValueError) as wrong:
        raise InvalidRequest(f"{param}: {' '.join(str(wrong).split())}", param=param) from None
    return params


def to_pooling_params(sampling: Sampling) -> Any:
    """Return vllm.PoolingParams for an embedding. vLLM's engine has one kind of pooling, set at its start: the caller
    makes sure that it is `sampling.pooling`."""
    from vllm.pooling_params import PoolingParams

    assert sampling.pooling, "the request generates text"
    # A mean is that of the states of this step: with a cached prefix vLLM's core ends ("partial prefill").
    return PoolingParams(task="embed", skip_reading_prefix_cache=sampling.pooling == "mean")


def _structured(grammar: str) -> dict[str, Any]:
    if not grammar:
        return {}
    from vllm.sampling_params import StructuredOutputsParams

    try:
        return {"structured_outputs": StructuredOutputsParams(grammar=lark_text(grammar))}
    except ValueError as wrong:
        raise InvalidRequest(f"sampling.grammar: {wrong}", param="sampling.grammar") from None
