"""A tiny LLaVA on vLLM: its model, prompts with pictures, and what vLLM alone answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from shared.messages.generate import Image, Sampling
from tests.tiny_model import IMAGE_TOKEN, write_tiny_model
from tests.worker.native.golden.cases import CASES, IMAGE_STARTS, LLAVAS, image_pixels, image_prompt
from tests.worker.vllm.environment import ON_DEVICE, PYTHON, run_there

BLOCK = 32
IMAGE_TOKENS = 16
GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
HAS_TORCHVISION = bool(list(PYTHON.parents[1].glob("lib/python*/site-packages/torchvision")))
"""Whether this vLLM takes models that see."""
_PROMPT = [*image_prompt(16), *image_prompt(16, ())]

_ALONE = """
import json
from PIL import Image
from transformers import AutoImageProcessor, CLIPImageProcessorPil
from vllm import LLM, SamplingParams
import numpy as np, torch
from services.worker.vllm.images import ImagePrompts
from shared.messages.generate import Image as SeenImage

def main(model, prompts, settings):
    llm = LLM(model, dtype="float32", enforce_eager=True, block_size=32, max_num_seqs=4, num_gpu_blocks_override=64,
              **settings)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = []
    for tokens, pictures in prompts:
        images = [Image.fromarray(np.asarray(picture, np.uint8)) for picture in pictures]
        prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        answers.append(list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids))
    made = ImagePrompts.read(llm.llm_engine.vllm_config.model_config, 4)
    values = made.elements(SeenImage(b"", 0, 16, images[-1].tobytes()))["pixel_values"].data
    pillow = CLIPImageProcessorPil.from_pretrained(model)(images[-1], return_tensors="pt")["pixel_values"][0]
    default = AutoImageProcessor.from_pretrained(model)(images[-1], return_tensors="pt")["pixel_values"][0]
    print(json.dumps([answers, torch.equal(values, pillow), float((values - default).abs().max())]))
"""


def image(number: int, start: int) -> Image:
    pixels = image_pixels(28, number).tobytes()
    return Image(hashlib.sha256(pixels).digest(), start, 16, pixels)


def images_of(pictures: Sequence[int]) -> tuple[Image, ...]:
    return tuple(image(number, start) for number, start in zip(pictures, IMAGE_STARTS, strict=False))


def prompt_of(pictures: Sequence[int]) -> list[int]:
    return [*image_prompt(16, IMAGE_STARTS[: len(pictures)]), *_PROMPT[60:]]


def one_token_each(tokens: Sequence[int]) -> list[int]:
    """Return the prompt as a user of vLLM has it, who leaves it to vLLM to give an image its tokens."""
    prompt, at = list[int](), 0
    while at < len(tokens):
        prompt.append(tokens[at])
        at += IMAGE_TOKENS if tokens[at] == IMAGE_TOKEN else 1
    return prompt


def write_model(directory: Path) -> Path:
    """Write the model; vLLM's kernels on a CPU need larger heads than the other tests' models have."""
    return write_tiny_model(directory / "tiny", **{**CASES[LLAVAS[0]], "hidden": 128, "context_length": 1024})


def answers_alone(model: Path, prompts: Sequence[tuple[list[int], Sequence[int]]]) -> list[list[int]]:
    """Return the answers of vLLM alone to prompts, each with the numbers of its pictures, after comparing our pixels
    with those of transformers."""
    given = [
        (one_token_each(tokens), [image_pixels(28, number).tolist() for number in each]) for tokens, each in prompts
    ]
    call = f"\nif __name__ == '__main__':\n    main({str(model)!r}, {given!r}, {ON_DEVICE!r})"
    answers, equal, apart = run_there(_ALONE + call)
    assert equal
    assert apart < 1e-6, "with torchvision, transformers computes in another order"
    return [list(answer) for answer in answers]
