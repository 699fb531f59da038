"""The request table: what each field of `Sampling` is in vLLM's SamplingParams.

    max_tokens, min_tokens       what is left of them after earlier attempts
    temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, repetition_penalty, ignore_eos   as they are
    seed                         mixed with the number of tokens that earlier attempts produced
    logprobs                     None for -1
    stop_token_ids, logit_bias   as a list, as a dict
    grammar                      structured_outputs (`grammar.py`)
    pooling                      the engine's runner: such a request has PoolingParams

vLLM restarts a request's random numbers with each attempt; so a drawn answer that moves to another engine goes on with
other, equally random tokens, and a greedy one with the same. Presence and frequency penalties count the tokens that an
attempt produced: after a move, those before it no longer count.
"""

from __future__ import annotations

from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from services.worker.vllm.grammar import to_structured_output
from shared.messages import Pooling, Sampling

FIELDS = frozenset(
    (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "pooling"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "stop_token_ids", "logit_bias"),
        "grammar",
    )
)
"""The fields of Sampling that the table has; a test compares them with Sampling's."""
UNUSED = {
    **dict.fromkeys(("n", "stop", "bad_words", "_bad_words_token_ids"), "the frontend does this, for every engine"),
    **dict.fromkeys(
        (
            *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
            "output_text_buffer_length",
        ),
        "they say how text is made, which the frontend does",
    ),
    **dict.fromkeys(
        ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs"),
        "Sampling cannot ask for them",
    ),
    **dict.fromkeys(
        (
            *("allowed_token_ids", "extra_args", "thinking_token_budget", "repetition_detection", "stream_interval"),
            *("skip_reading_prefix_cache", "watermarking", "routed_experts_prompt_start", "trace_decode_token_ids"),
        ),
        "Sampling cannot ask for them",
    ),
    **dict.fromkeys(
        ("skip_clone", "_eos_token_id", "_all_stop_token_ids", "_watermarking_skipped"), "vLLM sets them by itself"
    ),
}
"""Fields of SamplingParams that stay at vLLM's defaults, and why; a test finds new ones."""
MAPPED = frozenset(
    (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "detokenize"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "stop_token_ids", "logit_bias"),
        *("structured_outputs", "output_kind"),
    )
)
"""Fields of SamplingParams that are set here."""
_GOLDEN = 0x9E3779B97F4A7C15


def to_sampling_params(sampling: Sampling, *, continued: int) -> SamplingParams:
    """Return vLLM's parameters of an attempt. `continued` is the number of tokens that earlier attempts produced. Raise
    ValueError where vLLM refuses a value, or cannot hold the grammar."""
    structured = None
    if sampling.grammar:
        kind, text = to_structured_output(sampling.grammar)
        structured = StructuredOutputsParams(**{kind: text})
    return SamplingParams(
        max_tokens=sampling.max_tokens - continued,
        min_tokens=max(0, sampling.min_tokens - continued),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=None if sampling.temperature == 0.0 else _seed(sampling.seed, continued),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=None if sampling.logprobs < 0 else sampling.logprobs,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias) or None,
        structured_outputs=structured,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def to_pooling_params(pooling: Pooling, engine: str) -> PoolingParams:
    """Return vLLM's parameters of an embedding. `engine` is the pooling that the engine was started with, in vLLM's
    words. Raise ValueError where another one is asked for."""
    if pooling.upper() != engine.upper():
        raise ValueError(f"pooling: the engine was started with {engine.lower()}, not {pooling}")
    return PoolingParams(task="embed")


def _seed(seed: int, continued: int) -> int:
    """Return a seed that differs for each continuation, within what torch takes."""
    return (seed + continued * _GOLDEN) & ((1 << 63) - 1)
