"""Writes a small random model as a Hugging Face directory: real files, real tokenizer, no download.

    config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json

The weights follow from the seed alone, so two directories of equal arguments answer alike. The tokenizer is a
byte-level BPE whose ids fill the model's vocabulary: any text encodes, any id decodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The first ids; `<|im_end|>` is the end of a turn."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "LlavaForConditionalGeneration": "llava",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
}
"""The `model_type` of each architecture, by which transformers finds its classes."""
VISION = {
    **{"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 1, "image_size": 28, "patch_size": 14},
}
"""The settings of a part that sees images; it has no weights here, because they are not read."""
CLIP = {
    **{"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "image_size": 28, "patch_size": 7},
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "image_size": 30}
"""The vision towers of a tiny LLaVA, whose weights are there. 30 pixels are four patches and a rest, which is cut."""
IMAGE_TOKEN = 319
"""The token that stands for a tiny LLaVA's images, the last one of 320."""
IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of a tiny LLaVA, which writes a token for each image."""
DType = Literal["float32", "float16", "bfloat16"]


def write_tiny_model(
    directory: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 128,
    vocab: int = 320,
    context_length: int = 2048,
    tied: bool = True,
    bias: bool | None = None,
    rope_theta: float = 10_000.0,
    rope_scaling: dict[str, Any] | None = None,
    dtype: DType = "float32",
    shards: int = 1,
    seed: int = 0,
    marks: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    decoder: str = "LlamaForCausalLM",
    llava: dict[str, Any] | None = None,
) -> Path:
    """Write the model into `directory` (made if missing) and return it.

    `bias` adds a bias to q, k and v: always there for Qwen2, never for Llama, so None is the only other choice.
    `marks` are the vocabulary's last tokens, none of them special: as Qwen 3's </think>.
    `settings` are added to config.json, or replace what is there.
    `shards` > 1 writes `model-0000i-of-0000n.safetensors` and their index.
    `decoder` is the architecture of a LLaVA's text part; `llava` is added to the rest of its config.json.
    """
    sees = architecture == "LlavaForConditionalGeneration"
    qwen = (decoder if sees else architecture) == "Qwen2ForCausalLM"
    bias = qwen if bias is None else bias
    head_dim = hidden // heads if head_dim is None else head_dim
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "vocab_size": vocab,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    if not qwen:
        config |= {"attention_bias": bias, "mlp_bias": False}
    if rope_scaling is not None:
        config["rope_scaling"] = rope_scaling
    if "Gemma" in architecture:
        config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"
    if architecture in ("Phi3ForCausalLM", "SmolLM3ForCausalLM"):
        config["pad_token_id"] = 0  # transformers' own is beyond this vocabulary
    config |= settings or {}
    directory.mkdir(parents=True, exist_ok=True)
    prefix = ""
    if architecture == "Gemma3ForConditionalGeneration":  # it takes images too
        text = {**config, "model_type": "gemma3_text"}
        config = {name: text.pop(name) for name in ("architectures", "bos_token_id", "eos_token_id")}
        config |= {"model_type": "gemma3", "text_config": text, "vision_config": VISION, "mm_tokens_per_image": 4}
        prefix = "language_model."
    if sees:
        text = {**config, "model_type": MODEL_TYPES[decoder], "architectures": [decoder]}
        config = {name: text[name] for name in ("bos_token_id", "eos_token_id", "tie_word_embeddings")}
        config |= {"architectures": [architecture], "model_type": "llava", "text_config": text}
        config |= {"vision_config": CLIP, "image_token_index": IMAGE_TOKEN, **(llava or {})}
        _write_processor(directory, config["vision_config"])
        (directory / "chat_template.jinja").write_text(IMAGE_TEMPLATE, encoding="utf-8")
        marks = ("<image>",)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [0, 2]})
    _write_tokenizer(directory, vocab, marks)
    known = architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM")
    weights = _weights(config, bias, seed) if known else _weights_by_shape(directory, seed)
    weights = {(llava_name(name) if sees else prefix + name): tensor for name, tensor in weights.items()}
    _write_weights(directory, weights, dtype, shards)
    return directory


def llava_name(name: str) -> str:
    """Return the name that a tensor has in LLaVA's published files."""
    if name.startswith("vision_tower."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return name if name.startswith("multi_modal_projector.") else f"language_model.{name}"


def _write_processor(directory: Path, tower: dict[str, Any]) -> None:
    """Write how images are prepared: as CLIP's or SigLIP's processor does, to the size of the tower."""
    side = tower["image_size"]
    square = {"height": side, "width": side}
    processor: dict[str, Any] = {"do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3}
    processor |= {"rescale_factor": 1 / 255, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    if tower["model_type"] == "clip_vision_model":
        processor |= {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}}
        processor |= {"do_center_crop": True, "crop_size": square}
    else:
        processor |= {"image_processor_type": "SiglipImageProcessor", "size": square}
    _write_json(directory / "preprocessor_config.json", processor)


def _weights_by_shape(directory: Path, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random weights for the tensors that the native engine expects, which transformers' answers prove to be right."""
    from services.worker.native.config import read_config  # here: most users of this module need no engine
    from services.worker.native.weights import tensor_shapes

    random, config = np.random.default_rng(seed), read_config(directory)

    def tensor(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if name.endswith("bias"):
            return random.normal(0, 1, shape).astype(np.float32)
        if len(shape) == 1:
            return (random.uniform(0.5, 1.5, shape) - config.norm_offset).astype(np.float32)
        if "embed_tokens" in name:
            return random.normal(0, 1 / config.embedding_scale, shape).astype(np.float32)
        gain = 2 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1
        return random.normal(0, gain / math.sqrt(math.prod(shape[1:])), shape).astype(np.float32)

    return {name: tensor(name, shape) for name, shape in tensor_shapes(config).items()}


def _weights(config: dict[str, Any], bias: bool, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random weights of a size that keeps activations near one, so that no two logits are alike."""
    random = np.random.default_rng(seed)
    hidden: int = config["hidden_size"]
    intermediate, head_dim = config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        drawn = random.standard_normal((rows, columns), np.float32)
        drawn *= gain / math.sqrt(columns)
        return drawn

    def norm() -> NDArray[np.float32]:
        return random.uniform(0.5, 1.5, hidden).astype(np.float32)

    weights = {"model.embed_tokens.weight": random.normal(0, 1, (config["vocab_size"], hidden)).astype(np.float32)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        weights[layer + "input_layernorm.weight"] = norm()
        weights[layer + "self_attn.q_proj.weight"] = matrix(queries, hidden, 2)
        weights[layer + "self_attn.k_proj.weight"] = matrix(keys, hidden, 2)
        weights[layer + "self_attn.v_proj.weight"] = matrix(keys, hidden)
        weights[layer + "self_attn.o_proj.weight"] = matrix(hidden, queries)
        weights[layer + "post_attention_layernorm.weight"] = norm()
        weights[layer + "mlp.gate_proj.weight"] = matrix(intermediate, hidden)
        weights[layer + "mlp.up_proj.weight"] = matrix(intermediate, hidden)
        weights[layer + "mlp.down_proj.weight"] = matrix(hidden, intermediate)
        if bias:
            for name, width in (("q", queries), ("k", keys), ("v", keys)):
                weights[f"{layer}self_attn.{name}_proj.bias"] = random.normal(0, 1, width).astype(np.float32)
            if config["model_type"] == "llama":  # Llama's attention_bias covers the output projection as well
                weights[layer + "self_attn.o_proj.bias"] = random.normal(0, 1, hidden).astype(np.float32)
    weights["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return weights


def _write_weights(directory: Path, weights: dict[str, NDArray[np.float32]], dtype: DType, shards: int) -> None:
    names = list(weights)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
        return
    where = {name: f"model-{1 + at % shards:05}-of-{shards:05}.safetensors" for at, name in enumerate(names)}
    for file in sorted(set(where.values())):
        write_safetensors(directory / file, {name: weights[name] for name in names if where[name] == file}, dtype)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def write_safetensors(path: Path, weights: dict[str, NDArray[np.float32]], dtype: DType) -> None:
    """Write the tensors by hand: `safetensors.numpy` does not know bfloat16."""
    code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    end = 0
    for name, tensor in weights.items():
        chunks.append(_bytes(tensor, dtype))
        start, end = end, end + len(chunks[-1])
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def _bytes(tensor: NDArray[np.float32], dtype: DType) -> bytes:
    if dtype == "float32":
        return tensor.tobytes()
    if dtype == "float16":
        return tensor.astype(np.float16).tobytes()
    bits = tensor.view(np.uint32)  # bfloat16 is float32's upper half, rounded to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _write_tokenizer(directory: Path, vocab: int, marks: Sequence[str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fewest = len(SPECIAL_TOKENS) + len(alphabet) + len(marks)
    assert vocab >= fewest, f"a byte-level vocabulary has at least {fewest} ids"
    merges = list(itertools.islice(_merges(), vocab - fewest))
    ids = {text: number for number, text in enumerate([*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in marks])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[2],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _merges() -> Iterator[tuple[str, str]]:
    """Merges without end in sight: a space and a letter, letter pairs, then triples (18,278 in all)."""
    letters = string.ascii_lowercase
    yield from (("Ġ", letter) for letter in letters)
    yield from itertools.product(letters, letters)
    yield from ((a + b, c) for a, b, c in itertools.product(letters, letters, letters))


def main() -> None:
    """Write a tiny LLaVA, to try images with. Tied to its embeddings, it would only repeat the last token."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiny_model", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="where the model is written")
    write_tiny_model(parser.parse_args().directory, architecture="LlavaForConditionalGeneration", tied=False)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
