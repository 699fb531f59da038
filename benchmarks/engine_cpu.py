"""How near does the native engine come to what the CPU can do?

    decode, batch 1        bytes of weights ÷ step time, against the fastest we can read the same bytes
    decode, batch 4, 16    the same step's matrix products alone ÷ step time
    prefill                FLOP of the products ÷ time, against NumPy's rate for large square matrices

Every figure is a ratio of things measured in the same rounds, one after the other, so that other programs on the
machine slow both. The goals are for one BLAS thread: `up` gives each worker cores ÷ workers threads.

What could mislead: attention reads the KV cache as well, which the yardsticks do not count, so longer histories lower
the ratios (CONTEXT_TOKENS is a short chat's); "products alone" uses the engine's own way to multiply, which for few
rows is faster than NumPy's `x @ W.T` (a row shows that one too); weights are read through a warm page cache.

    python -m benchmarks.engine_cpu [--model DIRECTORY_OR_GGUF] [--threads 1] [--rounds 9] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # NumPy reads the number of BLAS threads when it is first imported
    from services.worker.native.runner import NativeRunner

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / ".headrace" / "models"
CONTEXT_TOKENS = 64
PREFILL_TOKENS = 128
BLOCK_SIZE = 16
BATCHES = (1, 4, 16)
REPEATS = 3
"""Repeats of each measurement in a round: a service decodes step after step, with warm code."""
GOALS = {"decode, batch 1": 0.6, "decode, batch 4": 0.8, "decode, batch 16": 0.8, "prefill": 0.5}

Rounds = dict[str, list[float]]
"""The seconds of each round, by what was timed."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="default: the model that `up` serves")
    parser.add_argument("--threads", type=int, default=1, help="of BLAS")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(flags.threads)
    runner = _runner(flags.model)
    rounds = _measure(runner, 3 if flags.quick else flags.rounds)
    report = _report(runner, rounds, flags.threads)
    if flags.json:
        print(json.dumps(report, indent=2))
        return 0
    for row in report["rows"]:
        print(f"{row['what']:<34} {row['median_ms']:9.2f} ms  ({row['least_ms']:.2f} … {row['most_ms']:.2f})")
    for goal in report["goals"]:
        print(f"{goal['name']:<34} {goal['value']:9.2f} {goal['unit']}, goal {goal['goal']}")
    for name, value in report["figures"].items():
        print(f"{name:<34} {value:9.1f}")
    return 0


def _runner(model: Path | None) -> NativeRunner:
    from deploy.local.stack.model import fetch_default
    from services.worker.native.prepare import prepare
    from services.worker.native.runner import NativeRunner

    source = model or fetch_default(MODELS, lambda _what, _share: None)
    directory = prepare(source, MODELS, lambda _loading: None)
    blocks = -(-(CONTEXT_TOKENS + PREFILL_TOKENS) // BLOCK_SIZE)
    return NativeRunner(directory, capacity_blocks=max(BATCHES) * blocks, block_size=BLOCK_SIZE)


def _measure(runner: NativeRunner, rounds: int) -> Rounds:
    """Measure everything once in each round, after one round that is not counted."""
    import numpy as np

    decoder, weights = runner._decoder, runner._decoder._weights
    matrices = [
        matrix
        for layer in weights.layers
        for matrix in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    ]
    square = np.ones((1024, 1024), np.float32)
    timed: dict[str, Callable[[], object]] = {
        # A dot product of each matrix with itself: BLAS's fastest way to look at every byte once.
        "read the weights": lambda: [np.dot(matrix.ravel(), matrix.ravel()) for matrix in (*matrices, weights.head)],
        "square product": lambda: square @ square,
        "prefill": lambda: runner.step([_work(0, CONTEXT_TOKENS, PREFILL_TOKENS)]),
    }
    for batch in BATCHES:
        inputs = {width: np.ones((batch, width), np.float32) for width in {matrix.shape[1] for matrix in matrices}}

        def products(inputs: dict[int, Any] = inputs) -> None:
            for matrix in (*matrices, weights.head):
                decoder._linear(inputs[matrix.shape[1]], matrix)

        def plain(inputs: dict[int, Any] = inputs) -> None:
            for matrix in (*matrices, weights.head):
                np.matmul(inputs[matrix.shape[1]], matrix.T)

        works = [_work(sequence, CONTEXT_TOKENS, 1) for sequence in range(batch)]
        timed[f"decode, batch {batch}"] = lambda works=works: runner.step(works)  # type: ignore[misc]
        timed[f"products alone, batch {batch}"] = products
        timed[f"x @ W.T alone, batch {batch}"] = plain
    for sequence in range(max(BATCHES)):
        runner.step([_work(sequence, 0, CONTEXT_TOKENS)])
    seconds: Rounds = {name: [] for name in timed}
    for counted in range(rounds + 1):
        for name, run in timed.items():
            start = time.perf_counter()
            for _ in range(REPEATS):
                run()
            if counted:
                seconds[name].append((time.perf_counter() - start) / REPEATS)
    return seconds


def _work(sequence: int, start: int, count: int) -> Any:
    from services.worker.contracts.runner import Work
    from shared.messages.generate import Sampling

    blocks = -(-(CONTEXT_TOKENS + PREFILL_TOKENS) // BLOCK_SIZE)
    return Work(
        sequence=sequence,
        history=[(7 * position) % 1000 for position in range(start + count)],
        start=start,
        end=start + count,
        blocks=range(sequence * blocks, (sequence + 1) * blocks),
        sampling=Sampling(max_tokens=1, temperature=0.0),
        prompt_tokens=start + count,
    )


def _report(runner: NativeRunner, rounds: Rounds, threads: int) -> dict[str, Any]:
    weights = runner._decoder._weights
    layers_bytes = sum(
        matrix.nbytes
        for layer in weights.layers
        for matrix in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    )
    weights_bytes = layers_bytes + weights.head.nbytes
    prefill_flop = 2 * (layers_bytes // 4 * PREFILL_TOKENS + weights.head.size)
    square_flop = 2 * 1024**3
    ratios = {
        "decode, batch 1": _ratio(rounds["read the weights"], rounds["decode, batch 1"]),
        "decode, batch 4": _ratio(rounds["products alone, batch 4"], rounds["decode, batch 4"]),
        "decode, batch 16": _ratio(rounds["products alone, batch 16"], rounds["decode, batch 16"]),
        "prefill": _ratio(rounds["square product"], rounds["prefill"]) * prefill_flop / square_flop,
    }
    units = {"decode, batch 1": "of read bandwidth", "prefill": "of NumPy's rate"}
    medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "benchmark": "engine_cpu",
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {platform.platform()}",
        "commit": commit.strip(),
        "command": " ".join(["python -m benchmarks.engine_cpu", *sys.argv[1:]]),
        "model": Path(runner.facts.path).name,
        "threads": threads,
        "dot_rows": runner._decoder._linear.dot_rows,
        "goals": [
            {
                "name": name,
                "value": round(value, 3),
                "unit": units.get(name, "of the products alone"),
                "goal": GOALS[name],
                "met": value >= GOALS[name],
            }
            for name, value in ratios.items()
        ],
        "figures": {
            "read GB/s": weights_bytes / medians["read the weights"] / 1e9,
            "decode GB/s, batch 1": weights_bytes / medians["decode, batch 1"] / 1e9,
            "NumPy GFLOP/s": square_flop / medians["square product"] / 1e9,
            "prefill GFLOP/s": prefill_flop / medians["prefill"] / 1e9,
            "prefill tokens/s": PREFILL_TOKENS / medians["prefill"],
            **{f"decode tokens/s, batch {batch}": batch / medians[f"decode, batch {batch}"] for batch in BATCHES},
        },
        "rows": [
            {
                "what": name,
                "median_ms": 1e3 * medians[name],
                "least_ms": 1e3 * min(seconds),
                "most_ms": 1e3 * max(seconds),
            }
            for name, seconds in rounds.items()
        ],
    }


def _cpu() -> str:
    """Return the CPU's name, or the architecture if Linux does not name the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _ratio(yardstick: Sequence[float], measured: Sequence[float]) -> float:
    """Return the median of yardstick ÷ measured over the rounds; each pair is of one round."""
    return statistics.median(a / b for a, b in zip(yardstick, measured, strict=True))


if __name__ == "__main__":
    sys.exit(main())
