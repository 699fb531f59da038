"""The checked options of `headrace bench`."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.local.bench.plan import Point
from deploy.local.bench.rows import RowKey
from deploy.local.bench.terms import Terms
from deploy.local.bench.variants import Variant
from deploy.local.size.flags import TARGETS
from deploy.local.size.traffic import Traffic
from deploy.local.usage import BenchFlags


class BenchOptions(BenchFlags, frozen=True, kw_only=True):
    """Flags of `bench` that were checked, and what follows from them. `url` ends with /v1."""

    points: list[Point]
    command: str
    fleets: Sequence[Variant] = ()
    """The fleets to start and measure in place of the endpoint at `url`."""
    traffic: Traffic | None = None
    """The requests of the trace."""
    given: Sequence[str] = ()
    """Prompts to send instead of generated ones."""
    key: str = ""
    """The API key; empty if there is none."""

    def key_of(self, variant: str, number: int) -> RowKey:
        """Return what rows of a fleet in a round have in common."""
        targets = {name: limit for name in TARGETS if (limit := getattr(self, name))}
        return RowKey(variant, number, self.may_stop, Terms(targets, self.gpus, self.price, self.watts_per_gpu))
