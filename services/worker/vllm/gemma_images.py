"""Images of Gemma 3: how many tokens they have, and what stands around them.

    template: <start_of_image>  ─▶  prompt: \\n\\n<start_of_image> the image's tokens <end_of_image>\\n\\n

An image is prepared as a whole, in one size: its processor's other way, to look at crops of a wide one too, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.worker.native.vision_config import FixedSize, read_fixed_size, read_processor
from shared.errors import ModelError
from shared.messages.cards import ImageInput


def read_gemma(directory: Path, config: Any, arguments: Mapping[str, Any]) -> tuple[ImageInput, FixedSize]:
    """Return how images of a model are prepared; `config` is transformers' of the model, `arguments` are vLLM's
    `mm_processor_kwargs`. Raise ModelError naming file and field."""
    tower = config.vision_config
    path, settings = read_processor(directory, "size")
    for where, said in ((path, settings), ("mm_processor_kwargs", arguments)):
        if said.get("do_pan_and_scan"):
            raise ModelError(f"{where}: do_pan_and_scan is {said['do_pan_and_scan']}; only false is supported")
    prepared = read_fixed_size(directory, tower.image_size)
    tokens, patches = config.mm_tokens_per_image, tower.image_size // tower.patch_size
    if not 1 <= tokens <= patches**2 or (patches // (patches // isqrt(tokens))) ** 2 != tokens:
        raise ModelError(
            f"{directory}: mm_tokens_per_image is {tokens}; {patches} by {patches} patches do not give that"
        )
    try:
        known = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as wrong:  # noqa: BLE001 - it raises no narrower one
        raise ModelError(f"{directory / 'tokenizer.json'}: {wrong}") from None
    ids = config.boi_token_index, config.image_token_index, config.eoi_token_index
    begin, token, end = (known.id_to_token(each) if isinstance(each, int) and each >= 0 else None for each in ids)
    if not (begin and token and end):
        why = f"boi_token_index, image_token_index or eoi_token_index of {ids} is no token of the vocabulary"
        raise ModelError(f"{directory}: {why}")
    side, shown = tower.image_size, f"\n\n{begin}{token}{end}\n\n"
    size = tokens, side, side, prepared.resize
    return ImageInput(ids[1], *size, prepared.filter, template_text=begin, prompt_text=shown), prepared
