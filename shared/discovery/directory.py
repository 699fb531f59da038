"""The typed view of discovery: the instances and model cards, and the refused cards with the reasons.

`shared/discovery/catalogue.py` decides. This module follows the watch, asks the owners of missing keys, logs, counts
and notifies subscribers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import assert_never

from prometheus_client import CollectorRegistry

from shared import subjects
from shared.bus.contract import Bus
from shared.discovery.catalogue import CardDown as CardDown
from shared.discovery.catalogue import CardRefused as CardRefused
from shared.discovery.catalogue import CardUp as CardUp
from shared.discovery.catalogue import Catalogue, read_entry
from shared.discovery.catalogue import DirectoryChange as DirectoryChange
from shared.discovery.catalogue import InstanceDown as InstanceDown
from shared.discovery.catalogue import InstanceUp as InstanceUp
from shared.discovery.contract import Discovery, KeyAdded, KeyRemoved, LeftOut, OwnerAnswer, Synced
from shared.errors import BusDown, NoResponders, ProtocolError, RequestTimeout
from shared.messages.cards import Instance, ModelCard, ServiceName
from shared.messages.control import PING, PONG, Ping
from shared.metrics import counter, register_metrics
from shared.rate_limited_log import RateLimitedLog

PING_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


class Directory:
    """Follows `/headrace/{ns}/instances/` and `/headrace/{ns}/models/`, or the instances of one service.

    A key whose value does not parse, or names an id that another key has, is counted, logged at most once a minute, and
    left out. A missing key stays while its owner's Pong says that it publishes the key, and for one TTL if its owner is
    silent. After an outage it also stays while the owner answers anything, or cannot be asked.
    """

    # fmt: off
    _refusals = counter("headrace_directory_refused_cards", "field",
        "Model cards refused, by the field that is wrong", "The log says which field of which worker's card is wrong.")
    _unreadable = counter("headrace_directory_unreadable_values", "",
        "Values in discovery that did not parse, or were left out at a limit. Each listing counts them again.",
        "A process of another version, or a stranger in etcd.")
    # fmt: on

    def __init__(
        self,
        discovery: Discovery,
        bus: Bus,
        namespace: str,
        *,
        service: ServiceName | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """With `service` only its instances are known, and no model cards."""
        self._service = service
        self._discovery = discovery
        self._bus = bus
        self._namespace = namespace
        self._catalogue = Catalogue()
        self.instances: Mapping[str, Instance] = self._catalogue.instances
        """The known instances by id."""
        self.cards: Mapping[tuple[str, str], ModelCard] = self._catalogue.cards
        """The accepted cards by (model, instance)."""
        self.refused: Mapping[tuple[str, str], str] = self._catalogue.refused
        """The reasons of refused cards by (model, instance). Each begins with the field's name and a colon."""
        self._subscribers: list[Callable[[DirectoryChange], None]] = []
        self._synced = asyncio.Event()
        registry = CollectorRegistry() if registry is None else registry
        register_metrics(self, registry)
        self._limited_log = RateLimitedLog()

    def subscribe(self, changed: Callable[[DirectoryChange], None]) -> None:
        """Call `changed` for everything that is known already, then for every change, in the event loop."""
        for change in self._catalogue.everything():
            changed(change)
        self._subscribers.append(changed)

    @property
    def is_synced(self) -> bool:
        """Whether the first listing is complete."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait until the first listing is complete."""
        await self._synced.wait()

    async def run(self) -> None:
        """Follow discovery until cancelled."""
        namespace, read = self._namespace, partial(read_entry, self._namespace)
        one = self._service
        prefix = subjects.namespace_prefix(namespace) if one is None else subjects.instances_prefix(namespace, one)
        async for change in self._discovery.watch(prefix, ask_owner=self._ask_owner, read=read):
            match change:
                case KeyAdded():
                    self._tell(self._set(change.key, change.value))
                case KeyRemoved():
                    self._tell(self._catalogue.remove(change.key))
                case LeftOut():
                    self._leave_out(change)
                case Synced():
                    self._synced.set()
                case _:
                    assert_never(change)

    def _set(self, key: str, value: bytes) -> list[DirectoryChange]:
        try:
            return self._catalogue.set(key, read_entry(self._namespace, key, value))
        except ProtocolError as wrong:
            self._leave_out(LeftOut(1, key, str(wrong)))
            return self._catalogue.remove(key)

    def _leave_out(self, left_out: LeftOut) -> None:
        self._limited_log.warn("discovery: a key is left out", f"{left_out.key}: {left_out.why}", left_out.count)
        self._unreadable.inc(left_out.count)

    def _tell(self, changes: Iterable[DirectoryChange]) -> None:
        for change in changes:
            if isinstance(change, CardRefused):
                _log.error("model %s at %s is refused: %s", change.card.model, change.card.instance, change.reason)
                self._refusals.labels(change.reason.partition(":")[0]).inc()
            for changed in self._subscribers:
                changed(change)

    async def _ask_owner(self, key: str, _value: bytes) -> OwnerAnswer:
        """Ping the owner of a key. Only its own answer, or a subject without responders, proves that it is gone."""
        *_, service, instance = key.split("/")
        if not key.startswith(subjects.instances_prefix(self._namespace)):
            known = self.instances.get(instance)
            service = known.service if known else "worker"
        try:
            subject = subjects.control(self._namespace, service, instance)
            answer = await self._bus.request(subject, PING.encode(Ping(key)), timeout_s=PING_TIMEOUT_S)
        except (NoResponders, ProtocolError):  # ProtocolError: a foreign key, which makes no valid subject
            return "gone"
        except (RequestTimeout, BusDown):
            return "silent"
        try:
            pong = PONG.decode(answer.payload, answer.headers)
        except ProtocolError:
            return "answers"
        if pong.publishes is None:
            return "answers"
        return "publishes" if pong.publishes else "gone"
