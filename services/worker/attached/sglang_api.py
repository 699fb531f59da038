"""SGLang's own HTTP API: prompts of token ids. Not run against a real server. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from services.worker.attached.api import Api, Row, ServerOutput, Sizes, same, text_only
from services.worker.attached.sglang_events import read_batch
from services.worker.attached.vllm_api import ROWS as VLLM_ROWS
from services.worker.config import AttachedConfig
from services.worker.contracts.messages import Submit
from services.worker.vllm.sampling import seed_for
from shared.errors import MALFORMED, InvalidRequest
from shared.hashing import token_array
from shared.messages.generate import Sampling


def _no_logprobs(sampling: Sampling, _: int) -> dict[str, Any]:
    if sampling.logprobs >= 0:
        raise InvalidRequest("sampling.logprobs: not served by an attached SGLang server", param="sampling.logprobs")
    return {}


ROWS: dict[str, Row] = {
    **same("temperature", "top_p", "min_p", "stop_token_ids", "ignore_eos"),
    **same("presence_penalty", "frequency_penalty", "repetition_penalty"),
    "max_tokens": lambda sampling, continued: {"max_new_tokens": sampling.max_tokens - continued},
    "min_tokens": lambda sampling, continued: {"min_new_tokens": max(0, sampling.min_tokens - continued)},
    "top_k": lambda sampling, _: {"top_k": sampling.top_k or -1},
    "seed": lambda sampling, continued: {"sampling_seed": seed_for(sampling.seed, continued)},
    "logprobs": _no_logprobs,
    "logit_bias": VLLM_ROWS["logit_bias"],
    "grammar": lambda _sampling, _: {},  # the worker refuses it: the settings allow no grammars for SGLang
    "pooling": VLLM_ROWS["pooling"],
    "prompt_logprobs": VLLM_ROWS["prompt_logprobs"],
    "allowed_tokens": lambda _sampling, _: {},  # the worker refuses it: SGLang has nothing like it
}


class _Finish(Struct):
    type: str
    message: str = ""


class _Meta(Struct, frozen=True):
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: _Finish | None = None


class _Error(Struct):
    message: str = "an error without a message"


class _Line(Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta = _Meta()
    error: _Error | None = None


class _Publisher(Struct):
    dp_size: int = 0


class _Info(Struct):
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    kv_events: _Publisher | None = None


_LINE = msgspec.json.Decoder(_Line)
_INFO = msgspec.json.Decoder(_Info)


def _body(submit: Submit, _config: AttachedConfig, _model: str, params: dict[str, Any]) -> dict[str, Any]:
    if submit.salt:
        raise InvalidRequest("salt: not served by an attached SGLang server", param="salt")
    tokens = token_array(submit.tokens).tolist()
    return {"input_ids": tokens, "stream": True, "sampling_params": params | {"no_stop_trim": True}}


def _read(payload: bytes, _submit: Submit, seen: int) -> ServerOutput:
    """A line has all tokens so far, or the new ones alone, as the server was started; the count says which are new."""
    line = _LINE.decode(payload)
    if line.error is not None:
        return ServerOutput(error=line.error.message)
    if line.output_ids is None:
        raise text_only()
    meta, finish = line.meta_info, line.meta_info.finish_reason
    count = meta.completion_tokens - seen
    if not 0 <= count <= len(line.output_ids):
        raise ValueError(f"completion_tokens is {meta.completion_tokens} after {seen}, with {len(line.output_ids)} ids")
    new = line.output_ids[len(line.output_ids) - count :]
    word = None if finish is None else f"abort: {finish.message}" if finish.type == "abort" else finish.type
    return ServerOutput(new, word, meta.cached_tokens)


def _read_info(text: str) -> Sizes:
    try:
        info = _INFO.decode(text)
    except MALFORMED:
        return 0, 0, 0
    size, ranks = max(0, info.page_size or 0), 0 if info.kv_events is None else info.kv_events.dp_size
    return size, max(0, info.max_total_num_tokens or 0) // size if size else 0, ranks


SGLANG = Api(
    path="/generate",
    rows=ROWS,
    body=_body,
    read=_read,
    metrics=(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:generation_tokens_total",
    ),
    sizes=("/server_info", _read_info),
    events=read_batch,
)
