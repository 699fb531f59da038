"""The metrics of the process that decides whose turn it is."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shared.messages.turns import ModelTurn
from shared.metrics import REQUEST_SECONDS, counter, distribution, gauge, register_metrics


class TurnsMetrics:
    """The metrics of one device's turns."""

    # fmt: off
    _waiting = gauge("headrace_turn_waiting_requests", "model",
        "Requests that wait at frontends until a model is awake",
        "More models are asked for than may be awake: raise `turns.awake`, or shorten `turns.turn_s`.")
    _oldest_s = gauge("headrace_turn_oldest_wait_seconds", "model",
        "Time for which the first of these requests has waited", "As above; frontends give up after `limits.asleep_s`.")
    _operations = counter("headrace_turn_operations", "operation outcome",
        "Models that were woken or put to sleep, by outcome: done, failed, or busy (the worker did something else)",
        "`failed`: the log says why; a wake that fails most often lacks memory ([model_turns.md](model_turns.md)).")
    _operation_s = distribution("headrace_turn_operation_seconds", "operation", REQUEST_SECONDS,
        "Time that a wake or a sleep took, its drain included",
        "`sleep`: answers are long (`turns.drain_s`). `wake`: weights are read from the disk.")
    # fmt: on

    def __init__(self, registry: CollectorRegistry) -> None:
        register_metrics(self, registry)

    def show(self, turn: ModelTurn) -> None:
        """Show the turn of one model."""
        self._waiting.labels(turn.model).set(turn.waiting)
        self._oldest_s.labels(turn.model).set(turn.oldest_s)

    def count(self, operation: str, outcome: str, seconds: float) -> None:
        """Count an operation that has ended."""
        self._operations.labels(operation, outcome).inc()
        if outcome == "done":
            self._operation_s.labels(operation).observe(seconds)
