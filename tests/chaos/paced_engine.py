"""The worker's own engine process, whose steps take at least STEP_S: `python -m tests.chaos.paced_engine …`.

The tests' tiny model makes a step in a third of a millisecond. At that speed an answer is over before anything can go
wrong with it; slowed down, many are under way at each fault, and the machine has nothing to do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from services.worker import engine_main
from services.worker.config import WorkerConfig
from services.worker.contracts.messages import EngineOperation, Loading, MemoryUse, Ready
from services.worker.contracts.mover import Mover
from services.worker.contracts.runner import Drawn, Runner, Work
from services.worker.sharing.memory import HasSharableMemory, SharableMemory

STEP_S = 0.012


class Paced:
    """A Runner that takes its time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def facts(self) -> Ready:
        return self._runner.facts

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        ends_s = time.monotonic() + STEP_S
        drawn = self._runner.step(works)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        return drawn

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:
        return self._runner.operate(operation, name, path, level)

    def sharable_memory(self) -> SharableMemory:
        assert isinstance(self._runner, HasSharableMemory)
        return self._runner.sharable_memory()

    def memory_use(self) -> MemoryUse | None:
        return self._runner.memory_use()

    def mover(self, clock: Callable[[], float]) -> Mover:
        return self._runner.mover(clock)

    def close(self) -> None:
        self._runner.close()


_load = engine_main._load


def _load_paced(config: WorkerConfig, report: Callable[[Loading], None], *, stands_by: bool = False) -> Runner:
    return Paced(_load(config, report, stands_by=stands_by))


if __name__ == "__main__":
    engine_main._load = _load_paced
    sys.exit(engine_main.main(sys.argv[1:]))
