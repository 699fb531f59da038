"""The table of request fields: complete on both sides, and accepted by the real vLLM."""

from __future__ import annotations

from shared.messages import Sampling
from tests.worker.vllm.environment import needs_vllm, run_there


@needs_vllm
def test_every_field_of_both_sides_has_its_row() -> None:
    found = run_there(
        "import json; from vllm import SamplingParams; from services.worker.vllm import sampling as s;"
        "print(json.dumps([sorted(s.FIELDS), sorted(s.MAPPED), sorted(s.UNUSED),"
        " sorted(SamplingParams.__struct_fields__)]))"
    )
    ours, mapped, unused, theirs = (set(names) for names in found)
    assert ours == set(Sampling.__struct_fields__), "a field of Sampling has no row in services/worker/vllm/sampling.py"
    assert mapped | unused == theirs, "a field of SamplingParams is neither set nor listed as unused"
    assert not mapped & unused


@needs_vllm
def test_values_as_vllm_takes_them() -> None:
    found = run_there(
        "import json; from shared.messages import Sampling; from services.worker.vllm.sampling import *;"
        "p = to_sampling_params(Sampling(max_tokens=9, min_tokens=4, temperature=0.5, top_k=3, seed=(1 << 64) - 1,"
        " logprobs=2, stop_token_ids=(5,), logit_bias=((7, 1.5),)), continued=3);"
        "q = to_sampling_params(Sampling(max_tokens=9, temperature=0.0, seed=4), continued=0);"
        "print(json.dumps([p.max_tokens, p.min_tokens, p.top_k, 0 <= p.seed < 1 << 63, p.logprobs, p.stop_token_ids,"
        " p.logit_bias, q.seed, q.logprobs]))"
    )
    assert found == [6, 1, 3, True, 2, [5], {"7": 1.5}, None, None]
