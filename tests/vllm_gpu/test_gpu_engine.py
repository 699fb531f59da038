"""vLLM engines on a GPU, through their channel: compiled and in 16 bits, as a worker starts one, and with quantised
weights. What every engine does is in tests/worker/engine/test_contract.py, which runs on a GPU too."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from benchmarks.gpu.gptq_model import write_gptq_model
from services.worker.config import WorkerConfig
from services.worker.reports.nvml import NvmlReader
from shared.messages.generate import Sampling
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.vllm.environment import ON_DEVICE, PYTHON, needs_vllm, run_there

BLOCK = 32
KV_BYTES = 8 << 30
"""KV of the compiled engine, which a sleep gives back: far more than other engines of this GPU take meanwhile."""
GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
COMMON: dict[str, Any] = {**ON_DEVICE, "dtype": "bfloat16", "max_model_len": 1024, "max_num_batched_tokens": 2048}
SMALL: dict[str, Any] = {"enforce_eager": True, "num_gpu_blocks_override": 64}
GPTQ = "4 bits of GPTQ"
KINDS: dict[str, dict[str, Any]] = {
    "compiled": {"kv_cache_memory_bytes": KV_BYTES, "enable_lora": True, "max_lora_rank": 8},
    "fp8": {"quantization": "fp8", **SMALL},
    "fp8 weights by Marlin": {"quantization": "fp8", **SMALL},
    GPTQ: SMALL,
}
FP8_KERNELS = ("CutlassFP8ScaledMM", "PerTensorTorchFP8ScaledMM", "ChannelWiseTorchFP8ScaledMM")
"""Without these vLLM takes Marlin's, which the driver compiles for this GPU."""
ALONE = """
import json
from vllm import LLM, SamplingParams
llm = LLM({model!r}, block_size=32, max_num_seqs=4, **{more!r})
out = llm.generate({{"prompt_token_ids": {prompt!r}}}, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
print(json.dumps(list(out[0].outputs[0].token_ids)))
"""
pytestmark = [pytest.mark.gpu, needs_vllm, pytest.mark.asyncio(loop_scope="module")]


def prompt_of(number: int, length: int = 3 * BLOCK + 5) -> list[int]:
    return [5 + (number * 37 + index * (1 + number % 5)) % 250 for index in range(length)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(kind: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DrivenEngine]:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    model = write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=3, dtype="bfloat16")
    if kind == GPTQ:
        model = write_gptq_model(directory.with_name("gptq"), model)
    given = {"model": str(model), "engine": "vllm", "block_size": BLOCK, "max_running": 4, "vllm_python": str(PYTHON)}
    with pytest.MonkeyPatch.context() as variables:
        if "Marlin" in kind:
            variables.setenv("VLLM_DISABLED_KERNELS", ",".join(f"{name}LinearKernel" for name in FP8_KERNELS))
        driven = await DrivenEngine.start(msgspec.convert(given | {"vllm": COMMON | KINDS[kind]}, WorkerConfig))
        yield driven
        await driven.close()


async def test_it_names_its_gpu_and_the_reader_knows_that_name(engine: DrivenEngine) -> None:
    reader = NvmlReader(engine.facts.gpus)
    [gpu] = reader.read().gpus
    assert engine.facts.gpus == (gpu.uuid,)
    assert gpu.memory_used is not None
    assert gpu.memory_used > 1 << 30
    reader.close()


async def test_greedy_tokens_are_those_of_vllm_alone(engine: DrivenEngine, kind: str) -> None:
    more = {name: value for name, value in (COMMON | KINDS[kind]).items() if name != "enable_sleep_mode"}
    found = await engine.answer("alone", prompt_of(1), GREEDY)
    assert found == run_there(ALONE.format(model=engine.facts.path, prompt=prompt_of(1), more=more))


async def test_the_index_is_what_the_engine_holds_after_evictions_a_reset_and_a_sleep(engine: DrivenEngine) -> None:
    for round_, operations in enumerate(((), ("clear",), ("sleep", "wake"))):
        for operation in operations:
            assert await engine.operate(operation) == ""  # type: ignore[arg-type]
        assert not operations or (engine.published, engine.digest) == (set(), 0)
        for number in range(20):  # more than fits into 64 blocks
            engine.submit(f"{round_}-{number}", prompt_of(100 + number, 5 * BLOCK), GREEDY)
        for number in range(20):
            await engine.ended(f"{round_}-{number}")
        await engine.until(lambda: engine.digest == reduce(xor, engine.published, 0) and engine.load.running == 0)
        assert {block.hash for block in (await engine.snapshot()).blocks} == engine.published != set()


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_gives_the_gpus_memory_back_and_a_wake_takes_it_again(
    engine: DrivenEngine, kind: str, level: int
) -> None:
    if kind != "compiled":
        pytest.skip("the others have little KV")
    runtime = importlib.import_module("cupy").cuda.runtime

    def free_bytes() -> int:
        return int(runtime.memGetInfo()[0])

    whole = await engine.answer(f"awake-{level}", prompt_of(2), GREEDY)
    awake = free_bytes()
    assert await engine.operate("sleep", level=level) == ""
    assert free_bytes() - awake > KV_BYTES // 2
    asleep = free_bytes()
    assert await engine.operate("wake") == ""
    assert asleep - free_bytes() > KV_BYTES // 2
    assert await engine.answer(f"again-{level}", prompt_of(2), GREEDY) == whole
    assert engine.parts[f"again-{level}"][0].cached_tokens == 0


async def test_a_lora_changes_the_answers_that_name_it_in_a_graph_too(
    engine: DrivenEngine, kind: str, tmp_path: Path
) -> None:
    if kind != "compiled":
        pytest.skip("the others run without LoRAs")
    plain = await engine.answer("plain", prompt_of(3), GREEDY)
    lora = write_lora(tmp_path / "lora", Path(engine.facts.path), dtype="bfloat16")
    assert await engine.operate("load_lora", name="poet@1", path=str(lora)) == ""
    assert await engine.answer("poet", prompt_of(3), GREEDY, lora="poet@1") != plain
    assert await engine.operate("unload_lora", name="poet@1") == ""
    assert await engine.answer("plain again", prompt_of(3), GREEDY) == plain


async def test_log_probabilities_belong_to_the_greedy_tokens(engine: DrivenEngine) -> None:
    answer = await engine.answer("logprobs", prompt_of(4), msgspec.structs.replace(GREEDY, logprobs=3))
    entries = [entry for part in engine.parts["logprobs"] for entry in part.logprobs or ()]
    assert len(entries) == len(answer) == 40
    for entry in entries:
        assert max(entry.top_logprobs) == pytest.approx(entry.logprob, abs=1e-6)


async def test_requests_that_are_cancelled_hold_no_block(engine: DrivenEngine) -> None:
    for number in range(4):
        engine.submit(f"long-{number}", prompt_of(20 + number), msgspec.structs.replace(GREEDY, max_tokens=900))
    await engine.until(lambda: all(engine.tokens(f"long-{number}") for number in range(4)))
    for number in range(4):
        engine.cancel(f"long-{number}")
        assert (await engine.ended(f"long-{number}")).finish == "cancelled"
    await engine.until(lambda: engine.load.held_blocks == 0 and engine.load.running == 0)
