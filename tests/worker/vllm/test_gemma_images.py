"""services/worker/vllm/gemma_images.py: what a model's files say of images is read or refused by name, and a tiny
Gemma 3 on a real vLLM answers as vLLM does alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from services.worker.vllm.gemma_images import read_gemma
from shared.errors import ModelError
from shared.messages.cards import ImageInput
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import ON_DEVICE, needs_vllm, run_there
from tests.worker.vllm.tiny_gemma import BEGIN, END, IMAGE_TOKEN, IMAGE_TOKENS, MARKS, NEWLINES, SIDE, write_model
from tests.worker.vllm.tiny_llava import HAS_TORCHVISION

AROUND = f"\n\n{MARKS[0]}{MARKS[2]}{MARKS[1]}\n\n"
TAKES = ImageInput(IMAGE_TOKEN, IMAGE_TOKENS, SIDE, SIDE, 0, "BILINEAR", template_text=MARKS[0], prompt_text=AROUND)
SHOWN = ([0], [0, 1], [2, 1], [1, 0])
"""The numbers of the pictures of each prompt."""
TWO = 313 + NEWLINES.index("\n\n")
"""The token of two newlines."""


def read(directory: Path, *, arguments: dict[str, Any] | None = None, tower: int = 7, **said: Any) -> ImageInput:
    write_tiny_model(directory, marks=(*NEWLINES, *MARKS))
    processor = {
        "size": {"height": SIDE, "width": SIDE},
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor | said.pop("processor", {})))
    ids = {"boi_token_index": BEGIN, "eoi_token_index": END, "image_token_index": IMAGE_TOKEN}
    sees = SimpleNamespace(image_size=SIDE, patch_size=tower)
    config = SimpleNamespace(**{"vision_config": sees, "mm_tokens_per_image": IMAGE_TOKENS, **ids, **said})
    return read_gemma(directory, config, arguments or {})[0]


def test_a_models_files_say_how_many_tokens_an_image_has_and_what_stands_around_them(tmp_path: Path) -> None:
    assert read(tmp_path, processor={"do_pan_and_scan": None}) == TAKES


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"processor": {"do_pan_and_scan": True}}, "preprocessor_config.json: do_pan_and_scan is True; only false"),
        ({"arguments": {"do_pan_and_scan": True}}, "mm_processor_kwargs: do_pan_and_scan is True; only false"),
        ({"processor": {"size": {"height": 30, "width": 30}}}, "the vision tower takes 56 by 56"),
        ({"mm_tokens_per_image": 15}, "mm_tokens_per_image is 15; 8 by 8 patches do not give that"),
        ({"mm_tokens_per_image": 0}, "mm_tokens_per_image is 0; 8 by 8 patches do not give that"),
        ({"tower": 60}, "mm_tokens_per_image is 16; 0 by 0 patches do not give that"),
        ({"eoi_token_index": 320}, "eoi_token_index of (317, 319, 320) is no token of the vocabulary"),
        ({"boi_token_index": None}, "eoi_token_index of (None, 319, 318) is no token of the vocabulary"),
    ],
)
def test_files_that_make_no_sense_are_refused_by_field(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=re.escape(why)):
        read(tmp_path, **said)


_BOTH = """
import hashlib, json, msgspec
import numpy as np
from PIL import Image
from services.worker.contracts.messages import Submit
from services.worker.vllm.images import ImagePrompts
from shared.hashing import pack_tokens
from shared.messages.generate import Image as SeenImage
from shared.messages.generate import Sampling
from vllm import LLM, SamplingParams

def main(model, prompts, settings):
    llm = LLM(model, dtype="float32", enforce_eager=True, block_size=32, max_num_seqs=4, num_gpu_blocks_override=64,
              limit_mm_per_prompt={"image": 4}, **settings)
    engine, takes = llm.llm_engine, ImagePrompts.read(llm.llm_engine.vllm_config.model_config, 4)
    params, answers = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), []
    for short, whole, starts, files in prompts:
        shown = [np.load(file) for file in files]
        given = {"prompt_token_ids": short, "multi_modal_data": {"image": [Image.fromarray(each) for each in shown]}}
        alone = llm.generate(given, params, use_tqdm=False)[0]
        pixels = [each.tobytes() for each in shown]
        sizes = [each.shape[1::-1] for each in shown]
        images = tuple(
            SeenImage(hashlib.sha256(each).digest(), start, takes.input.tokens, each, *size)
            for each, start, size in zip(pixels, starts, sizes, strict=True)
        )
        asked = Submit("r", 1, "f", pack_tokens(whole), len(whole), Sampling(16), 60.0, salt="ours", images=images)
        engine.add_request(f"ours-{len(answers)}", takes.prompt(asked), params)
        ended = []
        while engine.has_unfinished_requests():
            ended += [each for each in engine.step() if each.finished]
        found = [list(each.outputs[0].token_ids) for each in (alone, *ended)]
        answers.append([*found, list(alone.prompt_token_ids) == whole])
    print(json.dumps([answers, msgspec.to_builtins(takes.input)]))
"""


@needs_vllm
@pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM has no torchvision")
def test_answers_about_prepared_images_are_those_of_vllm_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    for number in range(3):
        coarse = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        np.save(tmp_path / f"{number}.npy", coarse.repeat(7, 0).repeat(7, 1))
    prompts: list[tuple[list[int], list[int], list[int], list[str]]] = []
    for shown in SHOWN:
        short, whole, starts = [*range(40, 60)], [*range(40, 60)], list[int]()
        for number in shown:
            starts.append(len(whole) + 2)
            short += [BEGIN, 50 + number]
            whole += [TWO, BEGIN, *[IMAGE_TOKEN] * IMAGE_TOKENS, END, TWO, 50 + number]
        files = [str(tmp_path / f"{number}.npy") for number in shown]
        prompts.append(([*short, *range(100, 170)], [*whole, *range(100, 170)], starts, files))
    call = f"\nif __name__ == '__main__':\n    main({str(model)!r}, {prompts!r}, {ON_DEVICE!r})"
    answers, takes = run_there(_BOTH + call)
    assert msgspec.convert(takes, ImageInput) == TAKES
    assert [(ours == alone, same) for alone, ours, same in answers] == [(True, True)] * len(SHOWN)
    assert len({tuple(alone) for alone, _, _ in answers}) > 2, "the pictures make no difference"
