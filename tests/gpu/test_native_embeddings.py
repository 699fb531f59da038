"""Embeddings on the device: those of a plain decoder in float64, of the CPU engine, and of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.config import CudaConfig
from services.worker.contracts.runner import Drawn, Runner, Work
from services.worker.native.runner import NativeRunner
from shared.messages.cards import Pooling
from shared.messages.generate import Sampling
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import GOLDEN
from tests.worker.native.reference import embedding, last_hidden_states
from tests.worker.native.works import work

pytestmark = pytest.mark.gpu
cupy_on_a_device()

from tests.gpu.models import cuda_runner  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "fast attention": {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 512, "layers": 3},
    "any attention, odd widths": {"hidden": 18, "heads": 2, "kv_heads": 1, "head_dim": 10, "intermediate": 30},
}
BOUNDS = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2.5e-2}
"""Bounds of the difference of two vectors of length 1: some roundings of each type."""
POOLINGS = [pooling for pooling in get_args(Pooling) if pooling]
TOKENS: list[int] = np.random.default_rng(3).integers(0, 320, 300).tolist()
SLOTS: list[int] = np.random.default_rng(4).permutation(64).tolist()


def asked(pooling: Pooling) -> Sampling:
    return Sampling(max_tokens=1, pooling=pooling)


def vector(drawn: Drawn | None) -> NDArray[np.float32]:
    assert drawn is not None
    return np.frombuffer(drawn.embedding, "<f4")


def apart(one: Drawn | None, other: Drawn | NDArray[Any] | None) -> float:
    """Return the length of the difference of two embeddings."""
    right = other if isinstance(other, np.ndarray) else vector(other)
    return float(np.linalg.norm(vector(one) - right))


@pytest.mark.parametrize("element_type", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_vectors_are_a_plain_decoders_in_one_piece_or_in_chunks_among_others(
    tmp_path: Path, shape: str, element_type: Any
) -> None:
    directory = write_tiny_model(tmp_path, dtype=element_type, **SHAPES[shape])
    states = last_hidden_states(directory, TOKENS)
    runner = cuda_runner(directory, CudaConfig(dtype=element_type, graph_upper_bound=4), capacity_blocks=64)
    for pooling in POOLINGS:
        expected = embedding(states, pooling)
        [whole] = runner.step([work(TOKENS, SLOTS[:19], sampling=asked(pooling))])
        ours = Work(7, TOKENS, 0, 0, SLOTS[20:39], asked(pooling), len(TOKENS))
        drawn = None
        for end in (1, 40, 41, 290, len(TOKENS)):  # 1: nothing is drawn, and no graph is taken
            ours.start, ours.end = ours.end, end
            beside = work(TOKENS[:35], SLOTS[40:43], sampling=asked("mean"), sequence=8)
            token, drawn, other = runner.step([work(TOKENS[:9], SLOTS[43:44]), ours, beside])
            assert token is not None
            assert not token.embedding
            assert apart(other, embedding(states[:35], "mean")) < BOUNDS[element_type]
            assert (drawn is None) == (end < len(TOKENS))
        print(f"{shape} {element_type} {pooling}: {apart(whole, expected):.1e}, in chunks {apart(drawn, expected):.1e}")
        assert max(apart(whole, expected), apart(drawn, expected)) < BOUNDS[element_type]
    assert runner.facts.embedding_size == states.shape[1]
    runner.close()


def test_tokens_and_vectors_of_one_step_are_those_that_each_has_alone(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, **SHAPES["fast attention"])
    runner = cuda_runner(directory, CudaConfig(dtype="float32", graph_upper_bound=8), capacity_blocks=64)
    runner.step([work(TOKENS[:64], SLOTS[:4], draws=False)])
    works = [
        work(TOKENS[:40], SLOTS[4:7], sampling=asked("mean")),
        work(TOKENS[:17], SLOTS[7:9]),
        work(TOKENS[:1], SLOTS[9:10], sampling=asked("last")),
        work(TOKENS[:100], SLOTS[:4] + SLOTS[10:13], start=64, sampling=asked("last")),
        work(TOKENS[5:9], SLOTS[13:14], draws=False),
        work(TOKENS[:1], SLOTS[14:15], sampling=asked("mean")),
        work(TOKENS[:20], SLOTS[15:17], sampling=Sampling(max_tokens=9, temperature=0.8, seed=3, top_k=40)),
    ]
    for number, one in enumerate(works):
        one.sequence = number
    together = runner.step(works)
    for one, drawn in zip(works, together, strict=True):
        [alone] = runner.step([one])
        if one.sampling.pooling:
            assert apart(drawn, alone) < 1e-6
        else:
            assert drawn == alone
    states = last_hidden_states(directory, TOKENS[:100])
    assert apart(together[3], embedding(states, "last")) < BOUNDS["float32"]
    runner.close()


class Rights(NamedTuple):
    """What SmolLM2's vectors are compared with."""

    prompts: list[list[int]]
    states: list[NDArray[np.float64]]
    """Transformers' last hidden states of each prompt, in float64."""
    of_cpu: dict[Pooling, list[Drawn | None]]
    """The CPU engine's vectors."""


@pytest.fixture(scope="module")
def rights(smollm2: Path) -> Rights:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    answers = msgspec.json.decode((GOLDEN / "smollm2.json").read_bytes())
    prompts: list[list[int]] = [[*answer["prompt"], *answer["output"]] for answer in answers]
    model = transformers.AutoModel.from_pretrained(smollm2, dtype=torch.float64).to("cuda").eval()
    with torch.no_grad():
        states = [model(torch.tensor([prompt], device="cuda")).last_hidden_state[0].cpu().numpy() for prompt in prompts]
    cpu = NativeRunner(smollm2, capacity_blocks=64)
    of_cpu = {pooling: vectors(cpu, prompts, pooling) for pooling in POOLINGS}
    cpu.close()
    return Rights(prompts, states, of_cpu)


@pytest.mark.parametrize("element_type", BOUNDS)
def test_smollm2_has_the_vectors_of_transformers_and_of_the_cpu_engine(
    smollm2: Path, rights: Rights, element_type: Any
) -> None:
    runner = cuda_runner(smollm2, CudaConfig(dtype=element_type), capacity_blocks=64)
    for pooling in POOLINGS:
        own = vectors(runner, rights.prompts, pooling)
        for states, one, other in zip(rights.states, own, rights.of_cpu[pooling], strict=True):
            right = embedding(states, pooling)
            print(
                f"{element_type} {pooling}, {len(states)} tokens: {apart(one, right):.1e} from transformers in float64,"
                f" {apart(one, other):.1e} from the CPU engine, which is {apart(other, right):.1e} from it"
            )
            assert apart(one, right) < BOUNDS[element_type]
    runner.close()


def vectors(runner: Runner, prompts: list[list[int]], pooling: Pooling) -> list[Drawn | None]:
    """Embed all prompts in one step."""
    works = [
        work(prompt, SLOTS[16 * number : 16 * (number + 1)], sampling=asked(pooling), sequence=number)
        for number, prompt in enumerate(prompts)
    ]
    return runner.step(works)
