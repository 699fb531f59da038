"""Tests of the complete native runner: SmolLM2 against transformers, and its facts."""

from __future__ import annotations

import json
import math
import select
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import Struct
from tokenizers import Tokenizer

from services.worker.config import Dtype, WorkerConfig
from services.worker.contracts.messages import Loading, Submit
from services.worker.contracts.mover import Copied, Copy, Mover
from services.worker.contracts.runner import Runner
from services.worker.limits import SchedulerLimits
from services.worker.native.config import read_config
from services.worker.native.parallel.group import GroupTerms
from services.worker.native.prepare import prepare
from services.worker.native.runner import NativeRunner, load_native
from services.worker.native.tensor_file import write_tensors
from services.worker.native.weights import Checkpoint, weights_digest
from services.worker.scheduler.device_probe import MOST_NOT_FINITE
from services.worker.scheduler.scheduler import Scheduler
from shared.errors import ModelError
from shared.hashing import pack_tokens
from shared.messages.cards import KvLayout
from shared.messages.frames import NOT_FINITE, Part
from shared.messages.generate import Sampling
from shared.pool.map import PoolMap
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import GOLDEN
from tests.worker.native.works import GREEDY, work
from tests.worker.pool_file import make_pool


class RunnerAnswer(Struct):
    """An answer of transformers, which `make_golden.py` wrote."""

    text: str
    prompt: list[int]
    output: list[int]
    answer: str
    first_logits: list[float]
    prompt_logprobs: list[float]


ANSWERS = msgspec.json.decode((GOLDEN / "smollm2.json").read_bytes(), type=list[RunnerAnswer])


@pytest.fixture
def tiny(tmp_path: Path) -> NativeRunner:
    return NativeRunner(write_tiny_model(tmp_path / "model"), capacity_blocks=32)


def ended(mover: Mover) -> Copied:
    """Wait for the next batch that ends."""
    assert select.select([mover], [], [], 20)[0]
    [copied] = mover.ended()
    return copied


@pytest.mark.parametrize("ranks", [1, 2])
def test_smollm2_answers_as_with_transformers_all_prompts_at_once_in_one_process_and_in_two(
    smollm2: Path, ranks: int
) -> None:
    group = None if ranks == 1 else GroupTerms(ranks, limit_s=240.0, start_limit_s=240.0, weights_file=None)
    with closing(NativeRunner(smollm2, capacity_blocks=64, group=group)) as runner:
        histories = continued(runner)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for history, answer in zip(histories, ANSWERS, strict=True):
        output = history[len(answer.prompt) :]
        assert tokenizer.decode(output, skip_special_tokens=False) == answer.answer
        assert output == answer.output


def continued(runner: NativeRunner) -> list[list[int]]:
    """Return the prompts of all answers, each with as many tokens as its answer has."""
    histories = [list(answer.prompt) for answer in ANSWERS]
    blocks = [list(range(16 * number, 16 * number + 16)) for number in range(len(ANSWERS))]
    starts = [0] * len(ANSWERS)
    for _ in ANSWERS[0].output:
        works = [
            work(history, slots, start=start, prompt_tokens=len(answer.prompt), sequence=number)
            for number, (history, slots, start, answer) in enumerate(
                zip(histories, blocks, starts, ANSWERS, strict=True)
            )
        ]
        starts = [len(history) for history in histories]
        for history, drawn in zip(histories, runner.step(works), strict=True):
            assert drawn is not None
            history.append(drawn.token)
    return histories


def test_smollm2_alone_computes_the_logits_of_transformers(smollm2: Path) -> None:
    runner = NativeRunner(smollm2, capacity_blocks=16)
    answer = ANSWERS[0]
    sampling = msgspec.structs.replace(GREEDY, logprobs=20)
    [drawn] = runner.step([work(answer.prompt, range(16), sampling=sampling)])
    assert drawn is not None
    assert drawn.logprob is not None
    assert drawn.token == answer.output[0]
    [logits] = runner._decoder.step([work(answer.prompt, range(16))])
    np.testing.assert_allclose(logits[: len(answer.first_logits)], answer.first_logits, rtol=0, atol=1e-3)


def test_smollm2_gives_prompts_the_log_probabilities_of_transformers(smollm2: Path) -> None:
    runner = NativeRunner(smollm2, capacity_blocks=64)
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=1)
    works = [
        work(answer.prompt, range(16 * number, 16 * number + 16), sampling=sampling, sequence=number)
        for number, answer in enumerate(ANSWERS)
    ]
    for answer, drawn in zip(ANSWERS, runner.step(works), strict=True):
        assert drawn is not None
        assert drawn.prompt_logprobs is not None
        found = np.frombuffer(drawn.prompt_logprobs.logprobs, "<f4")
        np.testing.assert_allclose(found, answer.prompt_logprobs, rtol=0, atol=1e-4)


def test_smollm2_reads_text_as_its_own_tokenizer_does(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for answer in ANSWERS:
        assert tokenizer.encode(answer.text).ids == answer.prompt
    assert tokenizer.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]


def test_the_facts_are_those_of_the_directory(tiny: NativeRunner) -> None:
    facts = tiny.facts
    assert facts.kv_layout == KvLayout("float32", 2, 2, 16, 16)
    assert (facts.capacity_blocks, facts.block_size, facts.vocab_size) == (32, 16, 320)
    assert facts.eos_token_ids == (2, 0)
    assert facts.grammars
    assert facts.biases
    assert facts.min_tokens
    assert facts.prompt_logprobs
    assert facts.context_length == 32 * 16  # the model allows 2048; the cache does not
    assert (Path(facts.path) / "tokenizer.json").exists()
    assert facts.weights == weights_digest(Path(facts.path), read_config(Path(facts.path)))


def test_a_narrow_cache_holds_twice_as_many_blocks_of_a_layout_of_its_own(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    wide = NativeRunner(directory, capacity_bytes=1 << 20).facts
    narrow = NativeRunner(directory, capacity_bytes=1 << 20, kv_dtype="bfloat16").facts
    assert (wide.kv_layout.dtype, narrow.kv_layout.dtype) == ("float32", "bfloat16")
    assert narrow.capacity_blocks == 2 * wide.capacity_blocks
    assert narrow.weights == wide.weights


def test_the_cache_may_be_given_in_bytes(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    block_bytes = KvLayout("float32", 2, 2, 16, 8).block_bytes
    runner = NativeRunner(directory, capacity_bytes=5 * block_bytes + 1, block_size=8)
    assert (runner.facts.capacity_blocks, runner.facts.context_length) == (5, 40)
    with pytest.raises(ModelError, match="holds no block"):
        NativeRunner(directory, capacity_bytes=block_bytes - 1, block_size=8)


@pytest.mark.parametrize("level", [1, 2])
def test_a_runner_that_slept_computes_the_same(tiny: NativeRunner, level: int) -> None:
    asked = work(list(range(3, 40)), range(3), sampling=msgspec.structs.replace(GREEDY, logprobs=5))
    expected = tiny.step([asked])
    assert tiny.operate("sleep", "", "", level) == ""
    assert not tiny._cache.pages.any()
    assert tiny.operate("wake", "", "", 1) == ""
    assert tiny.step([asked]) == expected


def test_a_runner_does_not_wake_with_other_weights(tiny: NativeRunner) -> None:
    weights = Path(tiny.facts.path) / "model.safetensors"
    assert tiny.operate("sleep", "", "", 2) == ""
    stored = weights.read_bytes()
    weights.write_bytes(stored[:-400] + bytes(400))
    assert "the weights have changed since the worker started" in tiny.operate("wake", "", "", 1)
    weights.unlink()
    assert tiny.operate("wake", "", "", 1).startswith(f"wake: {weights}: ")
    weights.write_bytes(stored)
    assert tiny.operate("wake", "", "", 1) == ""
    assert tiny.step([work([3, 4, 5], [0])])[0] is not None


@pytest.mark.parametrize(
    ("room", "said"),
    [(0, "Cannot allocate memory"), (1, "no memory is left for the weights")],
    ids=["to map the file", "to convert it"],
)
def test_a_runner_without_memory_to_wake_stays_asleep_until_there_is_some(room: int, said: str, tmp_path: Path) -> None:
    """In a process of its own, because the limit is one of all its threads."""
    directory = write_tiny_model(tmp_path / "model", hidden=512, heads=8, intermediate=2048, dtype="bfloat16")
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from services.worker.native.runner import NativeRunner\n"
        "directory, room = Path(sys.argv[1]), int(sys.argv[2])\n"
        "weights = directory / 'model.safetensors'\n"
        "runner = NativeRunner(directory, capacity_blocks=8)\n"
        "assert runner.operate('sleep', '', '', 2) == ''\n"
        "used_bytes = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "_, most = limits = resource.getrlimit(resource.RLIMIT_AS)\n"
        "left_bytes = room * weights.stat().st_size + (2 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used_bytes + left_bytes, most))\n"
        "said = [runner.operate('wake', '', '', 1) for _ in range(2)]\n"
        "resource.setrlimit(resource.RLIMIT_AS, limits)\n"
        "assert str(weights) not in Path('/proc/self/maps').read_text()\n"
        "print(*said, runner.operate('wake', '', '', 1), sep='\\n', end='')\n"
        "runner.close()\n"
    )
    command = [sys.executable, "-c", program, str(directory), str(room)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (ran.stdout, ran.stderr) == (2 * f"wake: {directory}: {said}\n", "")


def test_blocks_that_went_through_a_pool_give_the_same_tokens(tiny: NativeRunner, tmp_path: Path) -> None:
    geometry = make_pool(tmp_path / "pool", 1 << 20)
    pool = PoolMap(tmp_path / "pool")
    mover: Mover = tiny.mover(time.monotonic)
    mover.attach(pool.arena(geometry.arena(0, 1, tiny.facts.kv_layout.block_bytes)))
    tiny.step([work(range(40), [0, 1, 2], draws=False)])
    mover.save(1, [Copy(9, 0), Copy(4, 1)], math.inf)
    assert ended(mover).good == [True, True]
    mover.load(2, [Copy(9, 20), Copy(4, 30)])
    assert ended(mover).good == [True, True]
    mover.close()
    sampling = msgspec.structs.replace(GREEDY, logprobs=3)
    own, given = ([work(range(40), slots, start=32, sampling=sampling)] for slots in ([0, 1, 2], [20, 30, 3]))
    assert tiny.step(own) == tiny.step(given)


def test_a_step_answers_each_work_in_order_and_only_those_that_draw(tiny: NativeRunner) -> None:
    drawn = tiny.step([work([1, 2], [0], draws=False), work([3], [1]), work([4, 5, 6], [2])])
    assert drawn[0] is None
    assert drawn[1] == tiny.step([work([3], [1])])[0]
    assert drawn[2] == tiny.step([work([4, 5, 6], [2])])[0]
    assert tiny.step([work([1, 2], [0], draws=False)]) == [None]


def test_sampled_tokens_do_not_depend_on_other_rows(tiny: NativeRunner) -> None:
    sampling = Sampling(max_tokens=9, temperature=1.0, seed=7, top_p=0.9, logprobs=2)
    alone = tiny.step([work([9, 8, 7], [0], sampling=sampling)])[0]
    beside = tiny.step([work([1], [1]), work([9, 8, 7], [0], sampling=sampling), work([5, 5], [2])])[1]
    assert alone is not None
    assert beside is not None
    assert alone.token == beside.token


def test_loading_converts_and_reports_its_progress(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="float16")
    told: list[Loading] = []
    config = WorkerConfig(model=str(source), cache=str(tmp_path / "cache"), capacity_blocks=4)
    runner: Runner = load_native(config, told.append)
    assert {line.what for line in told} == {"converting model to float32", "mapping weights"}
    assert Path(runner.facts.path) == prepare(source, tmp_path / "cache", told.append)
    runner.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_a_block_that_is_not_finite_fails_those_that_read_it_and_nothing_that_uses_its_slot_later(
    tmp_path: Path, kv_dtype: Dtype
) -> None:
    runner = NativeRunner(write_tiny_model(tmp_path), capacity_blocks=6, block_size=4, kv_dtype=kv_dtype)
    history = [1, 2, 3, 4, 5, 6]
    alone = runner.step([work(history, [0, 1])])
    longer = [*history, *range(7, 12)]
    runner.step([work(longer[:10], [4, 5, 3])])
    beside = runner.step([work(longer, [4, 5, 3], start=10)])
    runner._cache.pages[0] = np.nan if kv_dtype == "float32" else 0x7FC0
    read, other = runner.step([work(history, [0, 1], start=5), work(longer, [4, 5, 3], start=10)])
    assert read is not None
    assert read.suspect
    assert [other] == beside
    runner._cache.pages[:3] = np.nan if kv_dtype == "float32" else 0x7FC0
    # Both decode in one group, so that the shorter one's last block is read beyond its end.
    assert runner.step([work(history[:5], [1, 0])]) == runner.step([work(history[:5], [2, 1])])
    again, _ = runner.step([work(history, [1, 0], start=5), work(longer, [4, 5, 3], start=10)])
    assert again is not None
    assert alone[0] is not None
    assert (again.token, again.suspect) == (alone[0].token, False)
    runner.close()


def test_weights_that_are_not_numbers_are_an_error(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path)
    checkpoint = Checkpoint(directory, read_config(directory))
    tensors = {name: checkpoint.floats(name).copy() for name in checkpoint.shapes}
    tensors["model.norm.weight"][3] = np.nan
    write_tensors(directory / "model.safetensors", checkpoint.shapes, tensors.__getitem__, lambda share: None)
    (drawn,) = NativeRunner(directory, capacity_blocks=4).step([work([1, 2, 3], [0])])
    assert drawn is not None
    assert drawn.suspect
    assert "not finite" in drawn.error


def test_an_overflowing_prompt_does_not_end_the_engine_but_nan_weights_do(tmp_path: Path) -> None:
    overflows, directory = 5, write_tiny_model(tmp_path, tied=False)

    def served(broken: str, prompts: list[list[int]]) -> list[Part]:
        """Run these requests one after another with a NaN in one tensor; return their ends."""
        checkpoint = Checkpoint(directory, read_config(directory))
        tensors = {name: checkpoint.floats(name).copy() for name in checkpoint.shapes}
        tensors[broken][overflows] = np.nan
        write_tensors(tmp_path / "model.safetensors", checkpoint.shapes, tensors.__getitem__, lambda share: None)
        runner = NativeRunner(directory, capacity_blocks=4)
        facts = runner.facts
        limits = SchedulerLimits(
            model="model",
            context_length=facts.context_length,
            eos_token_ids=frozenset(),
            block_size=facts.block_size,
            capacity_blocks=facts.capacity_blocks,
            max_waiting=512,
        )
        scheduler, ends = Scheduler(limits), list[Part]()
        for number, prompt in enumerate(prompts):
            submit = Submit(f"r{number}", 1, "f", pack_tokens(prompt), len(prompt), Sampling(max_tokens=1), 60.0)
            scheduler.submit(submit, 0.0)
            while scheduler.busy:
                ends += scheduler.advance(runner.step(scheduler.schedule(0.0)), 0.001).boundary_parts
        runner.close()
        return ends

    *failed, answered = served("model.embed_tokens.weight", [*[[overflows]] * (2 * MOST_NOT_FINITE + 1), [1, 2, 3]])
    assert all(part.error.startswith(NOT_FINITE) for part in failed)
    assert (len(failed), answered.finish) == (2 * MOST_NOT_FINITE + 1, "length")
    with pytest.raises(ModelError, match="a single token after them"):
        served("model.norm.weight", [[overflows]] * MOST_NOT_FINITE)


def test_golden_files_stay_small() -> None:
    assert sum(file.stat().st_size for file in GOLDEN.iterdir() if file.is_file()) < 1_000_000
    assert json.loads((GOLDEN / "smollm2.json").read_text())[0]["answer"].startswith("The capital of France is Paris.")
