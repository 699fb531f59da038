"""Tiny random models of Qwen2-VL's family on vLLM: the models, prompts with pictures, and what vLLM alone answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.messages.generate import Image
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import ON_DEVICE, run_there

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>")
IMAGE_TOKEN = 319
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
LEAST, MOST = 4, 24
"""Tokens of an image."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)

_TEXT: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 320, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
}
_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "in_channels": 3, "spatial_merge_size": 2}
_TOWER |= {"temporal_patch_size": 2}
_SHAPES: dict[str, tuple[int, list[int], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (14, [4, 6, 6], {}, {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        *(14, [4, 6, 6], {}),
        {
            **{"hidden_size": 64, "out_hidden_size": 128, "intermediate_size": 96, "window_size": 56},
            **{"fullatt_block_indexes": [1], "tokens_per_second": 2},
        },
    ),
    "qwen3_vl": (
        *(16, [6, 5, 5], {"head_dim": 32}),
        {
            **{"hidden_size": 64, "out_hidden_size": 128, "intermediate_size": 96, "num_position_embeddings": 64},
            **{"deepstack_visual_indexes": [0], "hidden_act": "gelu_pytorch_tanh"},
        },
    ),
}
"""For each family the pixels of a patch, the parts of the rotation, more of the text part, more of the tower."""

WRITE = """
import json, math, sys, torch
from transformers import AutoConfig, AutoModelForImageTextToText

def main(directory, config):
    model_type = config.pop("model_type")
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **config))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0, 0.1)
            elif tensor.dim() == 1:
                tensor.uniform_(0.5, 1.5)
            elif "embed" in name:
                tensor.normal_(0, 1)
            else:
                gain = 2 if any(part in name for part in ("q_proj", "k_proj", "qkv")) else 1
                tensor.normal_(0, gain / math.sqrt(math.prod(tensor.shape[1:])))
    model.save_pretrained(directory)
    print("[]")
"""
_ALONE = """
import json
import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams

def main(model, prompts, settings):
    llm = LLM(model, dtype="float32", enforce_eager=True, block_size=32, max_num_seqs=4, num_gpu_blocks_override=64,
              limit_mm_per_prompt={"image": 4, "video": 0}, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = []
    for tokens, pictures in prompts:
        images = [Image.fromarray(np.load(picture)) for picture in pictures]
        prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        found = llm.generate(prompt, params, use_tqdm=False)[0]
        answers.append([list(found.outputs[0].token_ids), len(found.prompt_token_ids)])
    print(json.dumps(answers))
"""


def unit_of(family: str) -> int:
    """Return the pixels of a token's side."""
    return 2 * _SHAPES[family][0]


def write_model(directory: Path, family: str) -> Path:
    """Write a model, whose weights transformers has named and shaped."""
    model = write_tiny_model(directory / "tiny", marks=MARKS)
    patch, parts, text, tower = _SHAPES[family]
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": parts, "rope_theta": 10_000.0}
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    config = {
        "model_type": family,
        "text_config": {**_TEXT, **text, "rope_parameters": rope},
        "vision_config": {**_TOWER, "patch_size": patch, **tower},
        **{"image_token_id": IMAGE_TOKEN, "video_token_id": 318, "tie_word_embeddings": False},
        **{"vision_start_token_id": 316, "vision_end_token_id": 317},
    }
    run_there(f"{WRITE}\nmain({str(model)!r}, {config!r})")
    area = unit_of(family) ** 2
    processor: dict[str, Any] = {
        **{"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"},
        **{"size": {"shortest_edge": LEAST * area, "longest_edge": MOST * area}, "resample": 3, "do_resize": True},
        **{"do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "do_convert_rgb": True},
        **{"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "patch_size": patch, "merge_size": 2},
        "temporal_patch_size": 2,
    }
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def picture(family: str, number: int, columns: int, rows: int) -> NDArray[np.uint8]:
    """Return a picture of this many tokens in a row and in a column, which needs no resizing."""
    unit = unit_of(family)
    coarse = np.random.default_rng(number).integers(0, 256, (rows, columns, 3), np.uint8)
    fine = np.random.default_rng(number + 1000).integers(0, 40, (rows * unit, columns * unit, 3), np.uint8)
    return np.asarray(coarse.repeat(unit, 0).repeat(unit, 1) // 2 + fine, np.uint8)


def image(shown: NDArray[np.uint8], start: int, tokens: int) -> Image:
    """Return a prepared image for a worker."""
    pixels = shown.tobytes()
    return Image(hashlib.sha256(pixels).digest(), start, tokens, pixels, shown.shape[1], shown.shape[0])


def answers_alone(model: Path, prompts: Sequence[tuple[list[int], Sequence[NDArray[np.uint8]]]]) -> list[Any]:
    """Return the answer of vLLM alone to each prompt, in which an image is one token, and the prompt's tokens."""
    given: list[tuple[list[int], list[str]]] = []
    for number, (tokens, shown) in enumerate(prompts):
        files = [model.parent / f"picture{number}-{at}.npy" for at in range(len(shown))]
        for file, pixels in zip(files, shown, strict=True):
            np.save(file, pixels)
        given.append((tokens, [str(file) for file in files]))
    call = f"\nif __name__ == '__main__':\n    main({str(model)!r}, {given!r}, {ON_DEVICE!r})"
    found: list[Any] = run_there(_ALONE + call)
    return found
