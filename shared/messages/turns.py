"""frontend → the process that decides whose turn it is on a device, and people → it: services/worker/turns. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.codec import Codec

TurnStage = Literal[
    "gone",  # no worker has the model
    "asleep",
    "waking",
    "awake",
    "drained",  # an operator has drained its worker
    "falling asleep",
]
"""Where a model is in its turn."""


class WantModel(Struct, frozen=True, tag="want_model"):
    """Requests wait at a frontend for a model that is not awake, or its engine loads. It is repeated meanwhile."""

    frontend: str
    """The frontend, or the worker whose engine loads."""
    model: str
    waiting: int
    """The number of requests that wait there."""
    oldest_s: float
    """The seconds for which the first of them has waited."""
    loads: bool = False
    """Whether a worker's engine loads the model, for which it needs room on the device."""


class ModelTurn(Struct, frozen=True, tag="model_turn"):
    """The turn of one model. It is the answer to WantModel."""

    model: str
    stage: TurnStage
    for_s: float = 0.0
    """The seconds for which it has been in this stage."""
    waiting: int = 0
    """The number of requests that wait for it, at all frontends."""
    oldest_s: float = 0.0
    """The seconds for which the first of them has waited."""
    why: str = ""
    """Why it is not awake yet. Empty if it is, or if nothing waits for it."""
    failed: str = ""
    """Why it could not wake lately: requests need not wait. Empty if that is not so."""


class TurnsState(Struct, frozen=True):
    """The models that take turns on one device."""

    instance: str
    """The process that decides."""
    device: str
    awake: int
    """The most models that may be awake at once."""
    models: list[ModelTurn]


WANT_MODEL: Codec[WantModel] = Codec(WantModel, "wanted model")
MODEL_TURN: Codec[ModelTurn] = Codec(ModelTurn, "turn of a model")
TURNS_STATE: Codec[TurnsState] = Codec(TurnsState, "state of turns")
