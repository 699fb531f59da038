"""LoRAs in a real vLLM engine: answers, blocks, files that change under a name, and files that are bad."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from services.worker.config import WorkerConfig
from shared.messages.generate import Sampling
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.engine.driven_engine import DrivenEngine
from tests.worker.vllm.environment import PYTHON, needs_vllm, run_there

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_vllm]
BLOCK = 32
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
RANK = 8
ALONE = """
import json
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
llm = LLM({model!r}, enforce_eager=True, dtype="float32", block_size=32, num_gpu_blocks_override=64, max_model_len=1024,
          enable_lora=True, max_loras=2, max_lora_rank=8)
params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
found = [llm.generate({{"prompt_token_ids": {prompt!r}}}, params, lora_request=one)[0].outputs[0].token_ids
         for one in (None, LoRARequest("a", 1, {lora!r}))]
print(json.dumps([list(one) for one in found]))
"""


def prompt_of(number: int) -> list[int]:
    """Return a prompt of three blocks and a bit, which shares none with that of another number."""
    return [5 + (number * 37 + index * (1 + number % 5)) % 250 for index in range(3 * BLOCK + 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=3)


def config_of(model: Path, **arguments: object) -> WorkerConfig:
    own = {"num_gpu_blocks_override": 64, "enforce_eager": True, "dtype": "float32"} | arguments
    fields = {"model": str(model), "engine": "vllm", "block_size": BLOCK, "max_running": 4, "threads": 1}
    return msgspec.convert({**fields, "vllm": own, "vllm_python": str(PYTHON)}, WorkerConfig)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(model: Path) -> AsyncIterator[DrivenEngine]:
    arguments = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": RANK}
    driven = await DrivenEngine.start(config_of(model, **arguments))
    yield driven
    await driven.close()


async def test_its_tokens_are_those_of_vllm_alone(engine: DrivenEngine, model: Path, tmp_path: Path) -> None:
    assert {"load_lora", "unload_lora"} <= set(engine.facts.operations)
    lora = write_lora(tmp_path / "lora", model, rank=RANK)
    assert await engine.operate("load_lora", name="a@1", path=str(lora)) == ""
    base = await engine.answer("base", prompt_of(1), GREEDY)
    changed = await engine.answer("changed", prompt_of(1), GREEDY, lora="a@1")
    assert base != changed
    assert [base, changed] == run_there(ALONE.format(model=str(model), prompt=prompt_of(1), lora=str(lora)))
    assert await engine.operate("unload_lora", name="a@1") == ""


async def test_its_blocks_are_its_own_and_carry_the_id(engine: DrivenEngine, model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", model, rank=RANK)
    assert await engine.operate("load_lora", name="b@1", path=str(lora)) == ""
    for salt in ("", "tenant"):
        await engine.answer(f"plain {salt}", prompt_of(2), GREEDY, salt=salt)
        for request, cached in ((f"cold {salt}", 0), (f"warm {salt}", 3 * BLOCK)):
            await engine.answer(request, prompt_of(2), GREEDY, lora="b@1", salt=salt)
            assert engine.parts[request][0].cached_tokens == cached
    seen = {(block.lora, block.salt) for block in (await engine.snapshot()).blocks if block.parent is None}
    assert {("", ""), ("", "tenant"), ("b@1", ""), ("b@1", "tenant")} <= seen
    assert await engine.operate("unload_lora", name="b@1") == ""


async def test_changed_files_find_no_blocks_of_the_old_ones_and_answer_as_their_own(
    engine: DrivenEngine, model: Path, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "lora", model, rank=RANK, seed=1)
    assert await engine.operate("load_lora", name="c@1", path=str(lora)) == ""
    first = await engine.answer("first", prompt_of(3), GREEDY, lora="c@1")
    assert await engine.operate("unload_lora", name="c@1") == ""
    write_lora(lora, model, rank=RANK, seed=2)
    assert await engine.operate("load_lora", name="c@2", path=str(lora)) == ""
    second = await engine.answer("second", prompt_of(3), GREEDY, lora="c@2")
    assert engine.parts["second"][0].cached_tokens == 0
    assert second != first
    other = write_lora(tmp_path / "other", model, rank=RANK, seed=1)
    assert await engine.operate("load_lora", name="c@1", path=str(other)) == ""
    assert await engine.answer("first again", prompt_of(3), GREEDY, lora="c@1") == first
    for name in ("c@1", "c@2"):
        assert await engine.operate("unload_lora", name=name) == ""


async def test_more_loras_than_a_batch_takes_wait_for_one_another(
    engine: DrivenEngine, model: Path, tmp_path: Path
) -> None:
    alone = {}
    for number in range(3):
        lora = write_lora(tmp_path / str(number), model, rank=RANK, seed=10 + number)
        assert await engine.operate("load_lora", name=f"d{number}@1", path=str(lora)) == ""
        shutil.rmtree(lora)  # it is not read again
        alone[number] = await engine.answer(f"alone {number}", prompt_of(4), GREEDY, lora=f"d{number}@1")
    one_more = write_lora(tmp_path / "one more", model, rank=RANK)
    refused = await engine.operate("load_lora", name="d3@1", path=str(one_more))
    assert refused == "load_lora: 3 LoRAs are loaded, all that vllm.max_cpu_loras allows; unload one first"
    for number in range(6):
        engine.submit(f"together {number}", prompt_of(4), GREEDY, lora=f"d{number % 3}@1")
    for number in range(6):
        await engine.ended(f"together {number}")
        assert engine.tokens(f"together {number}") == alone[number % 3]
    for number in range(3):
        assert await engine.operate("unload_lora", name=f"d{number}@1") == ""


async def test_bad_files_are_refused_with_one_line_and_leave_nothing_behind(
    engine: DrivenEngine, model: Path, tmp_path: Path
) -> None:
    base = await engine.answer("before the bad ones", prompt_of(5), GREEDY)
    good = write_lora(tmp_path / "good", model, rank=RANK)
    wide = write_tiny_model(tmp_path / "wide", hidden=192, heads=2, context_length=1024, tied=False)
    narrow = write_tiny_model(tmp_path / "narrow", hidden=64, heads=2, context_length=1024, tied=False)
    deep = write_tiny_model(tmp_path / "deep", layers=3, hidden=128, heads=2, context_length=1024, tied=False)
    torn = write_lora(tmp_path / "torn", model, rank=RANK)
    file = torn / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    no_json = Path(shutil.copytree(good, tmp_path / "no json"))
    (no_json / "adapter_config.json").write_text("{")
    no_rank = Path(shutil.copytree(good, tmp_path / "no rank"))
    settings = json.loads((good / "adapter_config.json").read_text())
    del settings["r"]
    (no_rank / "adapter_config.json").write_text(json.dumps(settings))
    for path, why in (
        (write_lora(tmp_path / "high", model, rank=4 * RANK), "json: LoRA rank 32 is greater than max_lora_rank 8"),
        (write_lora(tmp_path / "of wide", wide, rank=RANK), "of another model"),
        (write_lora(tmp_path / "of narrow", narrow, rank=RANK), "of another model"),
        (write_lora(tmp_path / "of deep", deep, rank=RANK), "this model has 2 layers"),
        (write_lora(tmp_path / "dora", model, rank=RANK, settings={"use_dora": True}), "not yet support DoRA"),
        (write_lora(tmp_path / "text", model, rank=RANK, settings={"r": "8"}), "adapter_config.json: "),
        (torn, "adapter_model.safetensors"),
        (no_json, "adapter_config.json"),
        (no_rank, "adapter_config.json: Missing required configuration fields"),
        (tmp_path / "nowhere", "nowhere"),
    ):
        refused = await engine.operate("load_lora", name="bad@1", path=str(path))
        assert refused.startswith("load_lora: "), path
        assert why in refused
        assert "\n" not in refused
    for name in ("e1@1", "e2@1", "e3@1"):  # all places are free
        assert await engine.operate("load_lora", name=name, path=str(good)) == ""
    assert "loaded already" in await engine.operate("load_lora", name="e1@1", path=str(good))
    await engine.answer("not loaded", prompt_of(5), GREEDY, lora="bad@1")
    assert "no LoRA bad@1 is loaded" in engine.parts["not loaded"][-1].error
    for name in ("e1@1", "e2@1", "e3@1"):
        assert await engine.operate("unload_lora", name=name) == ""
    assert "no LoRA e1@1" in await engine.operate("unload_lora", name="e1@1")
    assert await engine.answer("after the bad ones", prompt_of(5), GREEDY) == base


async def test_an_engine_without_loras_names_the_setting(model: Path, tmp_path: Path) -> None:
    engine = await DrivenEngine.start(config_of(model))
    try:
        assert not {"load_lora", "unload_lora"} & set(engine.facts.operations)
        lora = write_lora(tmp_path / "lora", model, rank=RANK)
        refused = await engine.operate("load_lora", name="a@1", path=str(lora))
        assert refused == "load_lora: this engine was started without LoRAs; set vllm.enable_lora to true"
    finally:
        await engine.close()
