"""SimulatedRunner: a simulated model in the engine process, which sleeps as long as a step would take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from services.worker.config import SimulatedConfig
from services.worker.messages import Ready
from services.worker.runner import Drawn, Work
from services.worker.simulated.model import SimulatedModel
from services.worker.simulated.mover import SimulatedMover
from services.worker.simulated.timing import Table, Timing
from shared.errors import ConfigError


class SimulatedRunner:
    """A Runner."""

    def __init__(self, model: SimulatedModel) -> None:
        self.facts = model.facts
        self._model = model

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        ends_s = time.monotonic() + self._model.step_s(works)
        drawn = self._model.draw(works)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        return drawn

    def mover(self, clock: Callable[[], float]) -> SimulatedMover:
        return self._model.mover(clock)

    def close(self) -> None:
        pass


def simulated_model(facts: Ready, config: SimulatedConfig) -> SimulatedModel:
    """Reads the table of times, if there is one. Raises ConfigError."""
    table = read_times(config)
    if config.context_length:
        facts = msgspec.structs.replace(facts, context_length=config.context_length)
    return SimulatedModel(facts, Timing(config, table), output_tokens=config.output_tokens)


def read_times(config: SimulatedConfig) -> Table | None:
    """None: the formula gives them. Raises ConfigError."""
    if not config.table:
        return None
    try:
        content = Path(config.table).read_bytes()
    except OSError as wrong:
        raise ConfigError(f"{config.table}: {wrong.strerror}") from None
    return Table.parse(content, config.table)
