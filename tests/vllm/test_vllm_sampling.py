"""Our sampling parameters as vLLM's, with vLLM itself."""

from __future__ import annotations

from tests.worker.vllm.environment import needs_vllm, run_there

pytestmark = needs_vllm
MAPPED = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"}
MAPPED |= {"repetition_penalty", "logprobs", "stop_token_ids", "ignore_eos", "logit_bias", "min_tokens"}
MAPPED |= {"prompt_logprobs"}
MAPPED |= {"structured_outputs", "output_kind", "detokenize"}
UNUSED = {
    "n": "the frontend makes an attempt of each answer",
    "stop": "frontends find stop strings",
    "include_stop_str_in_output": "frontends find stop strings",
    "bad_words": "no client field",
    "allowed_token_ids": "no client field",
    "prompt_logprob_token_ids": "no client field",
    "prompt_logprob_start": "no client field",
    "logprob_token_ids": "no client field",
    "watermarking": "no client field",
    "thinking_token_budget": "frontends write it into the grammar",
    "repetition_detection": "no client field",
    "flat_logprobs": "the events read lists of dicts",
    "skip_special_tokens": "frontends detokenize",
    "spaces_between_special_tokens": "frontends detokenize",
    "stream_interval": "the engine's: each step is reported",
    "skip_clone": "vLLM's own",
    "output_text_buffer_length": "vLLM's own",
    "_eos_token_id": "vLLM's own",
    "_all_stop_token_ids": "vLLM's own",
    "_watermarking_skipped": "vLLM's own",
    "_bad_words_token_ids": "vLLM's own",
    "extra_args": "for plug-ins",
    "skip_reading_prefix_cache": "vLLM decides",
    "routed_experts_prompt_start": "for training",
    "trace_decode_token_ids": "for training",
}

SCRIPT = """
import json
from shared.errors import InvalidRequest
from shared.messages.generate import Sampling
from services.worker.vllm.sampling import to_pooling_params, to_sampling_params
from vllm import SamplingParams

def made(continued=0, **fields):
    p = to_sampling_params(Sampling(**fields), continued=continued)
    return {name: getattr(p, name) for name in MAPPED if name not in ("structured_outputs", "output_kind")} | {
        "grammar": p.structured_outputs and p.structured_outputs.grammar, "kind": p.output_kind.name}

def refused(**fields):
    try:
        to_sampling_params(Sampling(max_tokens=5, **fields), continued=0)
    except InvalidRequest as wrong:
        return str(wrong)

json_grammar = json.dumps({"grammars": [
    {"lark_grammar": 'start: "@content" <|mark|> @content'},
    {"name": "content", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]})
print(json.dumps({
    "fields": list(SamplingParams.__struct_fields__),
    "plain": made(max_tokens=5),
    "all": made(max_tokens=9, seed=2**64 - 1, top_k=3, top_p=0.5, min_p=0.1, logprobs=2, min_tokens=4, continued=2,
                stop_token_ids=(7,), logit_bias=((3, -100.0),), ignore_eos=True, presence_penalty=1.0,
                frequency_penalty=-1.0, repetition_penalty=1.5, temperature=0.5),
    "lark": made(max_tokens=5, grammar='start: "a ::= b" | /[0-9]+/'),
    "json": made(max_tokens=5, grammar=json_grammar),
    "bad lark": refused(grammar="start: nothing"),
    "bad schema": refused(grammar='{"grammars":[{"json_schema":{"type":"nothing"}}]}'),
    "pooling": to_pooling_params(Sampling(max_tokens=1, pooling="mean")).task,
}))
"""


def test_each_field_arrives() -> None:
    found = run_there(f"MAPPED = {sorted(MAPPED)}\n{SCRIPT}")
    assert set(found["fields"]) == MAPPED | UNUSED.keys()
    assert not MAPPED & UNUSED.keys()

    plain = found["plain"]
    assert (plain["max_tokens"], plain["kind"], plain["detokenize"]) == (5, "DELTA", False)
    assert (plain["logprobs"], plain["logit_bias"], plain["grammar"], plain["seed"]) == (None, None, None, 0)
    wanted: dict[str, object] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "logprobs": 2,
    }
    wanted |= {"stop_token_ids": [7], "logit_bias": {"3": -100.0}, "ignore_eos": True, "temperature": 0.5}
    wanted |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5}
    assert {name: found["all"][name] for name in wanted} == wanted
    assert 0 <= found["all"]["seed"] < 1 << 63

    assert found["lark"]["grammar"] == 'start: "a ::= b" | /[0-9]+/'
    assert found["json"]["grammar"].startswith('start: "@content" <|mark|> headrace_content\nheadrace_content: %json {')
    assert found["bad lark"].startswith("sampling.grammar: ")
    assert found["bad schema"].startswith("sampling.grammar: ")
    assert found["pooling"] == "embed"
