"""RankReports: what each data-parallel rank of an engine reported last, and the load of all together. Pure.

Stepped of rank 0 ──┐                    ┌──▶ LoadReport: sums, and the load of each rank
Stepped of rank 1 ──┴──▶ the last of each ┴──▶ KvState of each rank: all share the epoch and the sequence
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.worker.contracts.messages import EngineLoad, Stepped
from shared.messages.load import EncoderState, KvState, RankLoad

_SPEEDS = ("prefill_tokens_per_s", "step_s", "image_s")
_COUNTS = tuple(name for name in EngineLoad.__struct_fields__ if name not in _SPEEDS)


class RankReports:
    """The last report of each rank of one engine; it begins empty with each engine."""

    def __init__(self) -> None:
        self._last: dict[int, Stepped] = {}
        self.progress = 0
        """Steps of all ranks so far."""
        self._event_sequence = -1

    def record_step(self, step: Stepped) -> None:
        """Take up a report. Reports come in the engine's order."""
        self._last[step.rank] = step
        self.progress = step.progress
        self._event_sequence = step.event_sequence

    @property
    def loads(self) -> dict[int, EngineLoad]:
        """The load of each rank that has reported."""
        return {rank: step.load for rank, step in sorted(self._last.items())}

    @property
    def load(self) -> EngineLoad:
        """The load of all ranks: sums of counts, and means of the speeds that were measured."""
        loads = [step.load for step in self._last.values()]
        if len(loads) == 1:
            return loads[0]
        counts = {name: sum(getattr(load, name) for load in loads) for name in _COUNTS}
        speeds: dict[str, Any] = {name: _mean(getattr(load, name) for load in loads) for name in _SPEEDS}
        return EngineLoad(**counts, **speeds)

    @property
    def encoder(self) -> EncoderState | None:
        """The encoder cache of all ranks. None if no image has come."""
        load = self.load
        counts = load.encoder_hits, load.encoded_images, load.fetched_images
        if not any(counts):
            return None
        return EncoderState(load.encoder_entries, load.encoder_bytes, *counts, image_s=load.image_s)

    @property
    def rank_loads(self) -> list[RankLoad]:
        """The load of each rank; empty if there is one only, as the sums say it all."""
        if len(self._last) < 2:
            return []
        return [
            RankLoad(
                rank, step.load.waiting, step.load.running, step.load.waiting_tokens, held_blocks=step.load.held_blocks
            )
            for rank, step in sorted(self._last.items())
        ]

    def kv_states(self, epoch: int, ranks: int) -> list[KvState]:
        """Return where each rank's KV events are. A rank without a report has cached nothing."""
        return [
            KvState(rank, epoch, self._event_sequence, self._last[rank].digest if rank in self._last else 0)
            for rank in range(ranks)
        ]


def _mean(speeds: Iterable[float]) -> float:
    measured = [speed for speed in speeds if speed]
    return sum(measured) / len(measured) if measured else 0.0
