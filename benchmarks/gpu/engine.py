"""Runs one engine by itself in a closed loop: its core and its runner in this process, without a network or a kvbm.

    python -m benchmarks.gpu.engine --model DIRECTORY [--streams 64] [--requests 512] [--memory-share 0.9] [--together]

It prints one JSON object. With --together it prints `ready` once the model is loaded, and runs a load for each line on
stdin, which has the numbers of streams and of requests: several engines can begin at once, or take turns with others.
Each load begins with an empty cache. What could mislead: requests are submitted in the engine's thread, between steps,
which costs it some microseconds a request. A token's time is that of the core's report.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import get_args

import msgspec
from msgspec import Struct

from benchmarks.gpu.table import percentile
from services.worker.config import CudaConfig, Device, EngineConfig, WorkerConfig
from services.worker.contracts.messages import Stepped, Submit
from services.worker.contracts.runner import Runner
from services.worker.engine.core import EngineCore
from services.worker.engine_main import _load
from shared.hashing import pack_tokens
from shared.messages.generate import Sampling

INPUT_TOKENS, OUTPUT_TOKENS = 512, 128
FRONTEND = "f"
LIMIT_S = 600.0


class StepTimes(Struct, frozen=True):
    """The times of one run."""

    requests: int
    failed: int
    elapsed_s: float
    out_tok_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


class PromptSource:
    """A closed loop: each answer is followed by the next request, until all were sent."""

    def __init__(
        self, core: EngineCore, vocabulary: int, requests: int, *, input_tokens: int, output_tokens: int
    ) -> None:
        self._core = core
        self._vocabulary = vocabulary
        self._left = requests
        self._input_tokens = input_tokens
        self._sampling = Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        self._draw = Random(os.getpid())
        self._asked_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        """When each running stream got its latest token."""
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.ended = self.failed = 0

    def ask(self) -> None:
        """Submit one more request, if there is one left."""
        if self._left:
            number = self._left
            self._left -= 1
            self._asked_s[number] = now_s = time.perf_counter()
            tokens = pack_tokens([self._draw.randrange(self._vocabulary) for _ in range(self._input_tokens)])
            asked = Submit(str(number), 1, FRONTEND, tokens, self._input_tokens, self._sampling, LIMIT_S, number=number)
            self._core.handle(asked, now_s)

    def hear(self, stepped: Stepped) -> None:
        """Take in the core's report of a step."""
        now_s = time.perf_counter()
        for number in (
            *stepped.one_token_attempts,
            *(int(part.request) for part in stepped.boundary_parts if part.tokens),
        ):
            if number in self._last_s:
                self.gaps_s.append(now_s - self._last_s[number])
            else:
                self.first_s.append(now_s - self._asked_s[number])
            self._last_s[number] = now_s
        for part in stepped.boundary_parts:
            if part.finish is not None:
                self.ended += 1
                self.failed += part.finish != "length"
                self._last_s.pop(int(part.request), None)
                self.ask()


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=get_args(Device), default="cuda")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--input-tokens", type=int, default=INPUT_TOKENS)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS)
    parser.add_argument("--memory-share", type=float, default=0.9)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--together", action="store_true", help="say `ready`, and run the load of each line of stdin")
    flags = parser.parse_args()
    worker = WorkerConfig(
        model=str(flags.model),
        device=flags.device,
        cuda=CudaConfig(memory_share=flags.memory_share),
        max_running=flags.max_running,
    )
    config = EngineConfig.of(worker, "model", "engine", parent_pid=os.getppid())
    with closing(_load(worker, lambda _loading: None)) as runner:
        _run(config, runner, min(2, flags.streams), 2, flags)  # what is made at a first step is not measured
        loads: Iterable[str] = (f"{flags.streams} {flags.requests}",)
        if flags.together:
            print("ready", flush=True)
            loads = sys.stdin
        for line in loads:
            streams, requests = map(int, line.split())
            print(msgspec.json.encode(_run(config, runner, streams, requests, flags)).decode(), flush=True)
    return 0


def _run(config: EngineConfig, runner: Runner, streams: int, requests: int, flags: argparse.Namespace) -> StepTimes:
    core = EngineCore.of(config, runner.facts)
    asking = PromptSource(
        core,
        runner.facts.vocab_size,
        requests,
        input_tokens=flags.input_tokens,
        output_tokens=flags.output_tokens,
    )
    core.opening()
    begun_s = time.perf_counter()
    for _ in range(streams):
        asking.ask()
    while asking.ended < requests:
        told, works = core.begin(time.perf_counter())
        for stepped in told:
            asking.hear(stepped)
        if works is None:
            assert asking.ended == requests, "nothing to do, and not all are answered"
            break
        step_s = time.perf_counter()
        drawn = runner.step(works) if works else []
        for stepped in core.finish(drawn, time.perf_counter() - step_s):
            asking.hear(stepped)
    elapsed_s = time.perf_counter() - begun_s
    return StepTimes(
        requests=requests,
        failed=asking.failed,
        elapsed_s=elapsed_s,
        out_tok_s=(requests - asking.failed) * flags.output_tokens / elapsed_s,
        ttft_p50_ms=1e3 * percentile(asking.first_s, 50),
        ttft_p99_ms=1e3 * percentile(asking.first_s, 99),
        gap_p50_ms=1e3 * percentile(asking.gaps_s, 50),
        gap_p99_ms=1e3 * percentile(asking.gaps_s, 99),
    )


if __name__ == "__main__":
    sys.exit(main())
