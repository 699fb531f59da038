"""vLLM's HTTP API: completions of token ids. Pure.

What `services/worker/vllm/sampling.py` says of continued answers, penalties and seeds holds here too.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from services.worker.attached.api import Api, Row, ServerOutput, same, text_only
from services.worker.config import AttachedConfig
from services.worker.contracts.messages import Submit
from services.worker.vllm.event_batch import decode_events
from services.worker.vllm.grammar_text import lark_text
from services.worker.vllm.sampling import seed_for
from shared.errors import InvalidRequest
from shared.hashing import pack_tokens, token_array, unpack_tokens
from shared.messages.frames import TokenLogprob
from shared.messages.generate import Sampling
from shared.vllm_sizes import read_sizes


def _grammar(sampling: Sampling, _: int) -> dict[str, Any]:
    try:
        return {"structured_outputs": {"grammar": lark_text(sampling.grammar)}} if sampling.grammar else {}
    except ValueError as wrong:
        raise InvalidRequest(f"sampling.grammar: {wrong}", param="sampling.grammar") from None


ROWS: dict[str, Row] = {
    **same("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"),
    **same("presence_penalty", "frequency_penalty", "repetition_penalty"),
    "max_tokens": lambda sampling, continued: {"max_tokens": sampling.max_tokens - continued},
    "min_tokens": lambda sampling, continued: {"min_tokens": max(0, sampling.min_tokens - continued)},
    "seed": lambda sampling, continued: {"seed": seed_for(sampling.seed, continued)},
    "logprobs": lambda sampling, _: {"logprobs": None if sampling.logprobs < 0 else sampling.logprobs},
    "logit_bias": lambda sampling, _: {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias}},
    "allowed_tokens": lambda sampling, _: (
        {"allowed_token_ids": unpack_tokens(sampling.allowed_tokens)} if sampling.allowed_tokens else {}
    ),
    "grammar": _grammar,
    "pooling": lambda _sampling, _: {},  # the worker refuses it: the engine says that it makes no embeddings
    "prompt_logprobs": lambda _sampling, _: {},  # the worker refuses it: the engine says that it computes none
}


class _Logprobs(Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class _Choice(Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Error(Struct):
    message: str = ""
    code: int | str | None = None
    """A status of HTTP from vLLM; gateways in front of it may write another one's word."""

    @property
    def refuses(self) -> bool:
        """Whether another server would say the same of the request."""
        return str(self.code) in ("400", "413", "422")


class _Line(Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_LINE = msgspec.json.Decoder(_Line)


def _body(submit: Submit, config: AttachedConfig, model: str, params: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "prompt": token_array(submit.tokens).tolist(), "stream": True}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if submit.salt:
        body["cache_salt"] = submit.salt
    if config.priorities:
        body["priority"] = -submit.priority
    return body | params


def _read(payload: bytes, submit: Submit, _seen: int) -> ServerOutput:
    line = _LINE.decode(payload)
    if line.error is not None:
        said = " ".join(line.error.message.split()) or "an error without a message"
        if line.error.refuses:
            raise InvalidRequest(said)
        return ServerOutput(error=said)
    if not line.choices:
        return ServerOutput()
    one = line.choices[0]
    if one.token_ids is None:
        raise text_only()
    finish = "abort by the server" if one.finish_reason == "abort" else one.finish_reason  # none of ours is open
    return ServerOutput(
        one.token_ids,
        finish,
        logprobs=None if one.logprobs is None else _entries(one.logprobs, submit.sampling.logprobs),
    )


def _entries(logprobs: _Logprobs, count: int) -> tuple[TokenLogprob, ...]:
    """Return the entries with `count` likeliest tokens; vLLM adds the drawn one, and writes `token_id:17`."""
    entries: list[TokenLogprob] = []
    for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        likeliest = sorted(((value, name) for name, value in top.items()), reverse=True)[:count]
        ids = pack_tokens([int(name.removeprefix("token_id:")) for _, name in likeliest])
        entries.append(TokenLogprob(own, ids, tuple(value for value, _ in likeliest)))
    return tuple(entries)


VLLM = Api(
    path="/v1/completions",
    rows=ROWS,
    body=_body,
    read=_read,
    metrics=(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:iteration_tokens_total_count",
    ),
    sizes=("/metrics", read_sizes),
    events=decode_events,
)
