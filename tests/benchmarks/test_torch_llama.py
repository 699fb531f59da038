"""benchmarks/gpu/torch_llama.py: torch's model is a Llama, and compiles. It runs in vLLM's environment."""

from __future__ import annotations

import pytest

from tests.worker.vllm.environment import needs_vllm, run_there

pytestmark = needs_vllm
MODEL = """
import json, torch
from msgspec.structs import replace
from benchmarks.gpu.model import LLAMA_8B
from benchmarks.gpu.torch_llama import TorchLlama, layer_and_end

torch.manual_seed(0)
config = replace(LLAMA_8B, layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=512)
model = TorchLlama(torch, config, 64, "cpu")
"""
BESIDE_TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM

theirs = LlamaForCausalLM(LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=64, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
)).eval()
state = {"model.embed_tokens.weight": model.embedding, "lm_head.weight": model.head}
for number, (qkv, output, gate_up, down) in enumerate(model.layers):
    q, k, v = qkv.split((64, 32, 32))
    gate, up = gate_up.chunk(2)
    own = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": output}
    own |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": down}
    state |= {f"model.layers.{number}.{name}.weight": weight for name, weight in own.items()}
_, unexpected = theirs.load_state_dict(state, strict=False)
tokens = torch.randint(512, (3, 13))
functions = layer_and_end(torch, config)
with torch.no_grad():
    want = theirs(tokens).logits
    prompt = model.logits(*functions, tokens[:, :12], torch.arange(12), 13)
    decoded = model.logits(*functions, tokens[:, 12:], torch.tensor([12]), 13)
apart = [float((got - want[:, at]).abs().max() / want.abs().max()) for got, at in ((prompt, 11), (decoded, 12))]
print(json.dumps({"unexpected": unexpected, "apart": apart}))
"""
COMPILED = """
steps = [way for batch in (2, 0) for way in model.ways(batch, 16, "MATH")]
print(json.dumps([name for name, step in steps if step() is None]))
"""


def test_a_prompt_and_the_token_after_it_have_the_logits_of_transformers() -> None:
    told = run_there(MODEL + BESIDE_TRANSFORMERS)
    assert told["unexpected"] == []
    assert told["apart"] == pytest.approx([0.0, 0.0], abs=1e-5)


def test_both_kinds_of_steps_compile_and_run() -> None:
    assert run_there(MODEL + COMPILED) == ["MATH", "MATH"]
