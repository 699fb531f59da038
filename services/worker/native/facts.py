"""Says what a native engine serves, on whatever device."""

from __future__ import annotations

from typing import Any

from services.worker.contracts.messages import Ready
from services.worker.native.config import ModelConfig
from services.worker.native.image_encoder import image_cost
from services.worker.native.lora import LORA_OPERATIONS
from shared.errors import ModelError
from shared.messages.cards import KvLayout


def engine_facts(
    config: ModelConfig, layout: KvLayout, capacity_blocks: int, *, most_images: int, lora_bytes: int, **facts: Any
) -> Ready:
    """Return what an engine serves. Its context is no longer than its cache. Raise ModelError if that holds nothing.

    With `most_images` 0 it takes no images, with `lora_bytes` 0 no LoRAs. `facts` are those that its device decides.
    """
    if capacity_blocks < 1:
        raise ModelError(f"a KV cache of {capacity_blocks} blocks holds nothing; it needs at least one")
    vision = config.vision if most_images else None
    return Ready(
        context_length=min(config.context_length, capacity_blocks * layout.block_size),
        vocab_size=config.vocab,
        eos_token_ids=config.eos_token_ids,
        block_size=layout.block_size,
        capacity_blocks=capacity_blocks,
        kv_layout=layout,
        biases=True,
        min_tokens=True,
        prompt_logprobs=True,
        allowed_tokens=True,
        embedding_size=config.hidden,
        images=None if vision is None else vision.input,
        most_images=0 if vision is None else most_images,
        image_cost=0 if vision is None else image_cost(config),
        operations=("clear", "sleep", "wake", *(LORA_OPERATIONS if lora_bytes else ())),
        **facts,
    )
