"""The LoRAs that an engine has loaded: has vLLM load and drop them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from services.worker.engine.one_line import CHARACTERS
from services.worker.model.lora_files import CONFIG
from services.worker.vllm.lora_check import check_lora
from shared.errors import ModelError
from shared.model_file import CONFIG_LIMIT_BYTES, read_model_json


class EngineLoras:
    """The LoRAs of one engine, by id."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._loaded: dict[str, LoRARequest] = {}
        self._numbers = 0

    def __contains__(self, lora: str) -> bool:
        return lora in self._loaded

    def find(self, lora: str) -> LoRARequest | None:
        """Return what vLLM takes with a request. None if that LoRA is not loaded."""
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
        most = config.max_cpu_loras - current_platform.is_cpu()  # `settings.spare_slot`
        if len(self._loaded) >= most:
            count = len(self._loaded)
            return f"load_lora: {count} LoRAs are loaded, all that vllm.max_cpu_loras allows; unload one first"
        fault = await asyncio.to_thread(self._check, Path(path))
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

    def _check(self, directory: Path) -> str:
        """Return why the files are not loaded. Empty if nothing speaks against it. Blocks."""
        config = self._llm.vllm_config
        settings = directory / CONFIG
        try:
            given = read_model_json(settings, dict[str, Any], limit_bytes=CONFIG_LIMIT_BYTES)
            helper = PEFTHelper.from_dict(given)
            helper.validate_legal(config.lora_config)
            ranks = {helper.r, *helper.rank_pattern.values()}
        except ModelError as wrong:
            return str(wrong)
        except (ValueError, TypeError, AttributeError) as wrong:  # a value that vLLM does not take, or of another type
            return f"{settings.name}: {' '.join(str(wrong).split())[:CHARACTERS]}"
        model = config.model_config
        return check_lora(directory, Path(model.model), model.get_total_num_hidden_layers(), ranks)

    async def unload(self, lora: str) -> str:
        """Drop a LoRA that no attempt uses. Return why it was not dropped. Raise what vLLM raises."""
        if lora not in self._loaded:
            return f"unload_lora: no LoRA {lora} is loaded"
        await self._llm.remove_lora(self._loaded.pop(lora).lora_int_id)
        return ""
