"""The settings of the process that decides whose turn it is."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.config import ServiceConfig
from shared.subjects import is_id

Seconds = Annotated[float, Meta(ge=0, le=3600)]


class TurnsConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The turns of the models on one device."""

    device: str = "cpu"
    """Name of the device; its workers have it as their setting `turns`. One process decides for a device."""
    awake: Annotated[int, Meta(ge=1, le=64)] = 1
    """Most models that are awake at once."""
    turn_s: Seconds = 30.0
    """Seconds after which a model that is in use goes to sleep if requests wait for another one. A model that is not in
    use goes at once."""
    least_awake_s: Seconds = 1.0
    """Least seconds for which a model that has woken stays awake, so that it answers what it was woken for. One whose
    wake took longer stays as long as that, up to `turn_s`."""
    drain_s: Seconds = 60.0
    """Seconds that answers may go on when their model's turn is over. Then they wait for its next turn, and go on
    there."""
    change_s: Annotated[float, Meta(gt=0, le=300)] = 60.0
    """Seconds that an engine may take to wake or to fall asleep, its answers not counted. After that it is ended, and
    the device goes to the next model."""
    level: Literal[1, 2] = 2
    """Level of the sleep: 1 keeps the weights where they are, 2 drops them; both free the KV."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for settings that contradict each other."""
        if not is_id(self.device):
            raise ValueError(f"device: {self.device!r} must be 1 to 64 letters, digits, - and _")
        if self.least_awake_s > self.turn_s:
            raise ValueError(f"least_awake_s of {self.least_awake_s:g} is more than turn_s of {self.turn_s:g}")
