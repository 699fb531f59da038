"""How much CPU time do embeddings cost the CPU engine, compared with drawing a token for the same prompts?

    mean, last     CPU time of a step that embeds BATCH prompts, as a share of a step that draws a token for each

The kinds of step take turns, so that other programs on the machine slow all of them alike; each share is of one turn.

What could mislead: only the engine's step is measured. In a request for embeddings each input also costs router,
frontend and worker about 0.5 ms. A completion's prompt may be in the prefix cache; a mean's never is. A draw multiplies
one row of each prompt by the vocabulary, which embeddings leave out. In longer prompts that is a smaller part of a
step, and the shares are nearer to 1.

    python -m benchmarks.embeddings [--model DIR] [--threads 1] [--rounds 5] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Goal, report

if TYPE_CHECKING:  # NumPy reads the number of BLAS threads when it is first imported
    from services.worker.contracts.runner import Work
    from services.worker.native.runner import NativeRunner
    from shared.messages.cards import Pooling

MODELS = Path(__file__).resolve().parents[1] / ".headrace" / "models"
BATCH = 8
LENGTHS = (16, 64)
"""Lengths of the prompts, in tokens."""
BLOCK_SIZE = 16
ROUNDS = 5
GOAL = 1.10


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="a directory or a GGUF file; else SmolLM2-135M-Instruct")
    parser.add_argument("--threads", type=int, default=1, help="of BLAS")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(flags.threads)
    runner = _runner(flags.model)
    rows = [row for length in LENGTHS for row in _rows(runner, length, 2 if flags.quick else flags.rounds)]
    runner.close()
    goals = [
        Goal(f"{row['pooling']} of {BATCH} prompts of {row['length']}: CPU, of a token each", share, "share", GOAL, met)
        for row in rows
        if row["pooling"]
        for share, met in ((row["share"], row["share"] <= GOAL),)
    ]
    if flags.json:
        import msgspec

        print(json.dumps(msgspec.to_builtins(report("embeddings", sys.argv[1:], goals, rows))))
        return 0
    for row in rows:
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    for goal in goals:
        print(f"{goal.name}: {goal.value:.3f}, goal {GOAL}")
    return 0


def _rows(runner: NativeRunner, length: int, rounds: int) -> list[dict[str, Any]]:
    """Measure a step that draws, then a step of each pooling."""
    ways: tuple[Pooling, ...] = ("", "mean", "last")
    took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for counted in range(rounds + 1):
        for way in ways:
            one = _step(runner, [_work(sequence, length, way) for sequence in range(BATCH)])
            if counted:
                took[way].append(one)
    tokens = BATCH * length
    rows: list[dict[str, Any]] = []
    for way in ways:
        shares = [cpu_s / drawn_s for (cpu_s, _), (drawn_s, _) in zip(took[way], took[""], strict=True)]
        cpu_s, clock_s = (statistics.median(one) for one in zip(*took[way], strict=True))
        rows.append(
            {
                "pooling": way,
                "length": length,
                "share": statistics.median(shares),
                "least": min(shares),
                "most": max(shares),
                "tokens_per_cpu_s": tokens / cpu_s,
                "tokens_per_s": tokens / clock_s,
            }
        )
    return rows


def _step(runner: NativeRunner, works: list[Work]) -> tuple[float, float]:
    """Run a step; return its seconds of CPU and of the clock."""
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    drawn = runner.step(works)
    took = time.process_time() - cpu_s, time.perf_counter() - begun_s
    assert all(
        one is not None and bool(one.embedding) == (not work.draws) for one, work in zip(drawn, works, strict=True)
    )
    return took


def _work(sequence: int, length: int, pooling: Pooling) -> Work:
    from services.worker.contracts.runner import Work
    from shared.messages.generate import Sampling

    prompt = [(7 * sequence + 11 * position) % 1000 + 100 for position in range(length)]
    each = -(-max(LENGTHS) // BLOCK_SIZE)
    blocks = range(sequence * each, (sequence + 1) * each)
    sampling = Sampling(max_tokens=1, temperature=0.0, pooling=pooling)
    return Work(sequence, prompt, 0, length, blocks, sampling, length)


def _runner(model: Path | None) -> NativeRunner:
    from deploy.local.stack.model import fetch_default
    from services.worker.native.prepare import prepare
    from services.worker.native.runner import NativeRunner

    source = model or fetch_default(MODELS, lambda _what, _share: None)
    directory = prepare(source, MODELS, lambda _loading: None)
    return NativeRunner(directory, capacity_blocks=BATCH * -(-max(LENGTHS) // BLOCK_SIZE), block_size=BLOCK_SIZE)


if __name__ == "__main__":
    sys.exit(main())
