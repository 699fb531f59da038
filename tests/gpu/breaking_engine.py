"""The worker's own engine process, whose device fails in the middle of a step when a prompt begins with FATAL.

It is started as `python -m tests.gpu.breaking_engine …`. On a GPU a kernel runs into a trap. That is a fault of the
device, like an invalid address, and the process's context is lost. A CPU has no such fault; there the step raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from services.worker import engine_main
from services.worker.config import WorkerConfig
from services.worker.contracts.messages import EngineOperation, Loading, MemoryUse, Ready
from services.worker.contracts.mover import Mover
from services.worker.contracts.runner import Drawn, Runner, Work

# The environment may set it.
FATAL = [int(token) for token in os.environ.get("FATAL", "7 77 7 77").split()]


class Breaking:
    """A Runner on a device that fails."""

    def __init__(self, runner: Runner, device: str) -> None:
        self._runner = runner
        self._device = device

    @property
    def facts(self) -> Ready:
        return self._runner.facts

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        if any(list(work.history[: len(FATAL)]) == FATAL for work in works):
            if self._device == "cpu":
                raise RuntimeError("the device has failed")
            import cupy  # pyright: ignore[reportMissingImports]

            cupy.RawKernel('extern "C" __global__ void fail() { asm("trap;"); }', "fail")((1,), (1,), ())
        return self._runner.step(works)

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:
        return self._runner.operate(operation, name, path, level)

    def memory_use(self) -> MemoryUse | None:
        return self._runner.memory_use()

    def mover(self, clock: Callable[[], float]) -> Mover:
        return self._runner.mover(clock)

    def close(self) -> None:
        self._runner.close()


_load = engine_main._load


def _load_breaking(config: WorkerConfig, report: Callable[[Loading], None], *, stands_by: bool = False) -> Runner:
    return Breaking(_load(config, report, stands_by=stands_by), config.device)


if __name__ == "__main__":
    engine_main._load = _load_breaking
    sys.exit(engine_main.main(sys.argv[1:]))
