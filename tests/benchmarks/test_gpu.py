"""Tests of the parts of the GPU's benchmarks that need no GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu import serving, stack, table
from benchmarks.gpu.engine import StepTimes
from benchmarks.gpu.model import LLAMA_8B, TOKENIZER_FILES, write_model
from benchmarks.gpu.moving import EndedBatch, arena, pool, scattered
from benchmarks.gpu.serving import GpuServingRow
from benchmarks.report import ROOT
from services.worker.native.config import read_config
from services.worker.native.weights import Checkpoint
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from tests.gpu.device import missing
from tests.tiny_model import write_tiny_model

AT_LEAST = next(promise for promise in table.PROMISES if promise.least is not None)
AT_MOST = next(promise for promise in table.PROMISES if promise.most is not None)
TOLD = next(promise for promise in table.PROMISES if not promise.bound)


def test_a_figure_on_its_bound_is_met_and_one_beyond_is_not() -> None:
    least, most = AT_LEAST.least or 0, AT_MOST.most or 0
    assert [AT_LEAST.met(value) for value in (least, least - 0.01)] == [True, False]
    assert [AT_MOST.met(value) for value in (most, most + 0.01)] == [True, False]
    assert TOLD.met(1e9) is TOLD.met(None) is None


def test_a_figure_that_was_not_measured_misses_its_goal_and_stands_in_the_table() -> None:
    [goal, *_] = table.goals(AT_LEAST.part, {})
    assert (goal.value, goal.met) == (None, False)
    [_, line, *_] = table.lines((AT_LEAST.part,), {})
    assert AT_LEAST.name in line
    assert "not measured" in line
    assert line.endswith("NOT MET")


def test_the_table_has_a_line_for_each_promise_of_the_parts_asked_for() -> None:
    figures = {part: {p.name: 0.5 for p in table.PROMISES if p.part == part} for part in table.PARTS}
    _, *lines = table.lines(table.PARTS, figures)
    assert [line[: len(p.name)] for line, p in zip(lines, table.PROMISES, strict=True)] == [
        promise.name for promise in table.PROMISES
    ]
    of_memory = [promise for promise in table.PROMISES if promise.part == "memory"]
    assert len(table.lines(("memory",), figures)) == len(of_memory) + 1


def test_names_of_promises_are_unique_and_others_are_noticed() -> None:
    names = [(promise.part, promise.name) for promise in table.PROMISES]
    assert len(set(names)) == len(names)
    assert table.unknown("memory", {"allocate and free, slowest size": 1.0, "alocate": 1.0}) == ["alocate"]


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.0), (75, 3.0), (76, 4.0), (99, 4.0), (100, 4.0)])
def test_a_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    assert table.percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_the_model_that_is_written_is_one_that_the_engine_reads(tmp_path: Path) -> None:
    tokenizer = write_tiny_model(tmp_path / "tokenizer")
    small = msgspec.structs.replace(LLAMA_8B, layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16)
    written = write_model(tmp_path / "model", small, tokenizer)
    config = read_config(written)
    assert msgspec.structs.replace(config, vocab=small.vocab, eos_token_ids=()) == small
    checkpoint = Checkpoint(written, config)
    assert {checkpoint.entry(name).dtype for name in checkpoint.shapes} == {"BF16"}
    assert set(checkpoint.floats("model.norm.weight").tolist()) == {1.0}
    head = checkpoint.floats("lm_head.weight")
    assert len({row.tobytes() for row in head}) == len(head), "no two rows alike"
    assert 0.9 < (head**2).sum(axis=1).mean() < 1.1
    assert all((written / name).exists() for name in TOKENIZER_FILES)


def test_copies_of_a_mover_are_counted_when_they_have_ended(tmp_path: Path) -> None:
    block_bytes, blocks = 4096, 12
    with (
        pool(tmp_path, 1 << 20) as (path, geometry),
        arena(path, geometry, block_bytes) as slots,
        memoryview(bytearray(blocks * block_bytes)) as device,
        closing(TransferMover(HostCopier.over(device, block_bytes), time.monotonic)) as mover,
    ):
        mover.attach(slots)
        asked = EndedBatch(mover)
        copies = scattered(slots, range(blocks))
        assert sorted(copy.device_slot for copy in copies) == list(range(blocks))
        assert len({copy.pool_slot for copy in copies}) == blocks
        asked.move(copies[:8], copies[8:], 3)
        assert asked.moved_bytes == {False: 8 * block_bytes, True: 4 * block_bytes}
        assert asked.paths.total() == blocks
        assert asked.under_way(loads=True) == asked.under_way(loads=False) == 0


def test_an_engine_by_itself_answers_every_request_of_each_load(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "benchmarks.gpu.engine", "--device", "cpu", "--model", str(model), "--together"]
    command += ["--input-tokens", "20", "--output-tokens", "5"]
    ended = subprocess.run(command, cwd=ROOT, input="3 7\n1 2\n", capture_output=True, text=True, check=True)
    ready, *told = ended.stdout.splitlines()
    assert ready == "ready"
    loads = [msgspec.json.decode(line, type=StepTimes) for line in told]
    assert [(spent.requests, spent.failed) for spent in loads] == [(7, 0), (2, 0)]
    for spent in loads:
        assert spent.out_tok_s == pytest.approx(spent.requests * 5 / spent.elapsed_s)
        assert 0 < spent.ttft_p50_ms <= spent.ttft_p99_ms < 1e3 * spent.elapsed_s


def test_engines_at_once_share_a_load_and_one_that_ends_is_named(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    flags = Namespace(device="cpu")
    with serving.engines(flags, model, 2, 0.4) as children:
        row = serving.ask_engines("two", children, 2, 4)
        assert (row.requests, row.failed) == (4, 0)
        children[1].kill()
        with pytest.raises(SystemExit, match="an engine ended"):
            serving.ask_engines("two", children, 2, 4)
    assert all(child.returncode is not None for child in children)


def row(what: str, streams: int, out_tok_s: float, ttft_ms: float, failed: int = 0) -> GpuServingRow:
    return GpuServingRow(what, streams, 8, failed, out_tok_s, ttft_ms, ttft_ms, 1.0, 1.0)


def test_sides_of_the_stack_take_turns_and_a_figure_is_the_median_of_the_rounds_ratios() -> None:
    order: list[str] = []

    def side(what: str, rates: list[float]) -> stack.Side:
        def load(streams: int, _requests: int) -> GpuServingRow:
            order.append(what)
            return row(what, streams, rates.pop(0), 3.0 if what == stack.STACK else 2.0, failed=1)

        return load

    sides = {stack.ENGINE: side(stack.ENGINE, [100, 200, 400]), stack.STACK: side(stack.STACK, [90, 100, 396])}
    rounds = list(stack.in_turn(sides, 3, 1, 8))
    assert order == ["engine", "stack", "stack", "engine", "engine", "stack"]
    drawn = [{kind: row(kind, 64, 100.0 - 10 * number, 1.0) for number, kind in enumerate(stack.SAMPLINGS)}]
    assert stack.figures([rounds], drawn) == pytest.approx(
        {
            "1 stream: output": 0.9,
            "1 stream: first token p50": 1.5,
            "64 streams, the card's sampling: output": 0.9,
            "64 streams, top_p 0.9: output": 0.8,
            "requests that failed": 6.0,
        }
    )


def test_each_load_and_sampling_of_the_stack_has_its_promise() -> None:
    rounds = [
        [{side: row(side, streams, 1.0, 1.0) for side in (stack.ENGINE, stack.STACK)}] for streams, _ in stack.LOADS
    ]
    found = stack.figures(rounds, [{kind: row(kind, 64, 1.0, 1.0) for kind in stack.SAMPLINGS}])
    assert set(found) == {promise.name for promise in table.PROMISES if promise.part == "stack"}


@pytest.mark.skipif(not missing(), reason="there is a GPU")
@pytest.mark.parametrize("module", ["", *(f".{part}" for part in table.PARTS)])
def test_without_a_gpu_each_part_says_so_in_one_line(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu{module}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: this needs an NVIDIA GPU: ")
