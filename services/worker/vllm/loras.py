"""The LoRAs that an engine has loaded: has vLLM load and drop them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from services.worker.vllm.lora_check import check_lora


class EngineLoras:
    """The LoRAs of one engine, by id."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._loaded: dict[str, LoRARequest] = {}
        self._numbers = 0

    def __contains__(self, lora: str) -> bool:
        return lora in self._loaded

    def find(self, lora: str) -> LoRARequest | None:
        """Return what vLLM takes with a request; None: that LoRA is not loaded."""
        return self._loaded.get(lora)

    async def load(self, lora: str, path: str) -> str:
        """Load the files in the directory `path` under an id. Return why they were not loaded. Raise what vLLM
        raises; then nothing of them is loaded."""
        config = self._llm.vllm_config.lora_config
        if config is None:
            return "load_lora: this engine was started without LoRAs; set vllm.enable_lora to true"
        if lora in self._loaded:
            return f"load_lora: {lora} is loaded already"
        # vLLM drops the one beyond this number that was used least lately, and reads its files again for a request.
        if len(self._loaded) >= config.max_cpu_loras:
            count = len(self._loaded)
            return f"load_lora: {count} LoRAs are loaded, all that vllm.max_cpu_loras allows; unload one first"
        model = self._llm.vllm_config.model_config
        layers = model.get_total_num_hidden_layers()
        fault = await asyncio.to_thread(check_lora, Path(path), Path(model.model), layers)
        if fault:
            return f"load_lora: {path}: {fault}"
        # vLLM caches blocks by name and path, and an id is the name of one content. It finds weights by the number.
        self._numbers += 1
        request = LoRARequest(lora, self._numbers, path)
        try:
            if not await self._llm.add_lora(request):
                return f"load_lora: vLLM did not load {path}"
        except Exception:
            await self._llm.remove_lora(request.lora_int_id)  # it may be there in part
            raise
        self._loaded[lora] = request
        return ""

    async def unload(self, lora: str) -> str:
        """Drop a LoRA that no attempt uses. Return why it was not dropped. Raise what vLLM raises."""
        if lora not in self._loaded:
            return f"unload_lora: no LoRA {lora} is loaded"
        await self._llm.remove_lora(self._loaded.pop(lora).lora_int_id)
        return ""
