"""The typed view of discovery: which instances and model cards are there, and which were refused and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from shared.discovery import Discovery
from shared.messages import Instance, ModelCard
from shared.messaging import Bus


class InstanceUp(Struct, frozen=True):
    """An instance came, or came anew with another epoch or address."""

    instance: Instance


class InstanceDown(Struct, frozen=True):
    """An instance is gone."""

    instance: Instance


class CardUp(Struct, frozen=True):
    """A compatible model card came or changed."""

    card: ModelCard


class CardDown(Struct, frozen=True):
    """A model card is gone."""

    card: ModelCard


class CardRefused(Struct, frozen=True):
    """A card that contradicts this program or the model's other cards; it is not served."""

    card: ModelCard
    reason: str


DirectoryChange = InstanceUp | InstanceDown | CardUp | CardDown | CardRefused


class Directory:
    """Follows `/headrace/{ns}/instances/` and `/headrace/{ns}/models/`.

    Keys whose value does not parse are logged, counted and left out. A key missing after an outage is kept while the
    instance still answers Ping on its `control` subject.
    """

    instances: Mapping[str, Instance]
    """By instance id."""
    cards: Mapping[tuple[str, str], ModelCard]
    """(model, instance) → card, the compatible ones only."""
    refused: Mapping[tuple[str, str], str]
    """(model, instance) → why its card was refused."""

    def __init__(self, discovery: Discovery, bus: Bus, namespace: str) -> None:
        raise NotImplementedError

    def subscribe(self, changed: Callable[[DirectoryChange], None]) -> None:
        """`changed` hears what is already known at once, then every change, in the event loop."""
        raise NotImplementedError

    async def synced(self) -> None:
        """Returns once the first listing is complete."""
        raise NotImplementedError

    async def run(self) -> None:
        """Follows until cancelled."""
        raise NotImplementedError
