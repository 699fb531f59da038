"""Follows the directory: one ModelRouter per model, one EventFeed per worker that sends events and per store in use.

    card and address come ─▶ candidates of the model ─▶ a feed of the worker's events
    card or address goes or changes ─▶ its blocks are removed in slices, and the worker is followed from the start
    a card names a kvbm's layout, and the kvbm's address has it ─▶ one feed of that store, for all workers that name it

With `events = "off"` there are no feeds: what a worker caches is predicted from the prompts that were sent there.

A model without workers is kept, to answer that it has no instances. At MODELS_LIMIT, a model that had no worker for
UNSERVED_LIMIT_S is dropped for a new one. If there is none, the new model's cards are ignored, with a warning.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from services.router.config import RouterConfig
from services.router.index.chains import Chains, SlotCleanup
from services.router.index.inheritance import StoreId, kvbm_of, layout_of
from services.router.metrics import RouterMetrics
from services.router.selection.eligibility import same_worker
from services.router.selection.model_router import ModelRouter
from services.router.selection.policy import BUILT_IN, load_policy
from services.router.sync.feed import EventFeed, SourceOrigin
from shared import subjects
from shared.discovery.directory import DirectoryChange, InstanceDown, InstanceUp
from shared.errors import ProtocolError
from shared.messages.cards import EventSource, Instance, ModelCard
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime

MODELS_LIMIT = 256
"""Most models kept, with or without workers; each has an index."""
UNSERVED_LIMIT_S = 3600.0
CONCURRENT_SNAPSHOTS = 4
"""Snapshots requested at the same time. A router that starts asks all workers, and NATS closes the connection of a
client that leaves more than 64 MB unread."""
STORES_LIMIT = 16
"""Most layouts followed of one kvbm: the number of models served from it, times their weights and shards."""
_SLICE_BLOCKS = 1024
_STORE_TIERS = 1, 2


class DirectoryFollower:
    """Owns the models and the feeds of one router."""

    def __init__(
        self,
        runtime: Runtime,
        config: RouterConfig,
        metrics: RouterMetrics,
        limited_log: RateLimitedLog,
        *,
        model_added: Callable[[str], None],
        model_dropped: Callable[[str], None],
    ) -> None:
        """`model_added` and `model_dropped` are called with the model's name. Raise ConfigError if the policy cannot
        be loaded."""
        self._runtime = runtime
        self._config = config
        self._metrics = metrics
        self._limited_log = limited_log
        self._model_added = model_added
        self._model_dropped = model_dropped
        self._make_policy = load_policy(config.policy)
        self._draw = runtime.draw
        self.models: dict[str, ModelRouter] = {}
        self.feeds: dict[str, EventFeed] = {}
        """Feeds by instance or store; each one feeds the chains of one model."""
        self._model_of_feed: dict[str, str] = {}
        """Name of the feed → that model: the first one that the instance served."""
        self.other_routers: set[str] = set()
        """Ids of the other routers."""
        self._unserved: dict[str, float] = {}
        """Models without instances → since when; longest first."""
        self._cleanups: deque[SlotCleanup] = deque()
        self._snapshot_semaphore = asyncio.Semaphore(CONCURRENT_SNAPSHOTS)

    def start(self) -> None:
        """Subscribe to the directory, and add what it has already."""
        self._runtime.directory.subscribe(self._changed)

    def close(self) -> None:
        for feed in self.feeds.values():
            feed.close()

    async def tick(self) -> None:
        """Clean up retired slots, in slices so that no Select waits for it, and update what depends on time."""
        while self._cleanups:
            if not self._cleanups[0].step(_SLICE_BLOCKS):
                self._cleanups.popleft()
            await asyncio.sleep(0)
        for model in list(self.models.values()):
            before = model.eligibility.frozen
            model.tick(asyncio.get_running_loop().time(), listening=self._runtime.bus.connected)
            for worker in sorted(model.eligibility.frozen - before):
                self._limited_log.warn(f"worker {worker}", f"it is frozen and passed over for {model.model}")
            await asyncio.sleep(0)

    # --- the directory

    def _changed(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceUp | InstanceDown):
            instance = change.instance
            if instance.service == "worker":
                self._refresh(instance.instance)
            elif instance.service == "kvbm":
                self._refresh_stores(instance.instance)
            elif instance.service == "router" and instance.instance != self._runtime.instance:
                (self.other_routers.add if isinstance(change, InstanceUp) else self.other_routers.discard)(
                    instance.instance
                )
            elif instance.service == "frontend" and isinstance(change, InstanceDown):
                for model in self.models.values():
                    model.load.remove_frontend(instance.instance)
        else:
            self._refresh(change.card.instance)

    def _refresh(self, worker: str) -> None:
        """Make the models agree with the directory for one worker, which needs an address and a card."""
        directory = self._runtime.directory
        address = directory.instances.get(worker)
        cards = {
            model: card
            for (model, instance), card in directory.cards.items()
            if instance == worker and address is not None
        }
        self._apply_models_limit(cards)
        changed = False
        kvbms = {card.kvbm for card in cards.values()}
        for name, model in self.models.items():
            before, after = model.cards.get(worker), cards.get(name)
            if before is not None:
                kvbms.add(before.kvbm)
            if before is not None and (after is None or not same_worker(before, after)):
                changed = True
                self._clear_later(model.remove_instance(worker))
                if not model.cards:
                    self._unserved[name] = asyncio.get_running_loop().time()
        for name, card in cards.items():
            self._model(name).add_card(card, asyncio.get_running_loop().time())
            self._unserved.pop(name, None)
        stream = address.events if address is not None and cards and self._config.events == "on" else None
        feed = self.feeds.get(worker)
        if feed is not None and (changed or feed.stream != stream):
            feed.close()
            del self.feeds[worker], self._model_of_feed[worker]
            for name in cards:
                # A new stream starts from empty: blocks of the old stream must not be kept under it.
                self._clear_later([chains.clear() for chains in self._chains(name, worker).values()])
        if stream is not None and worker not in self.feeds:
            model_name = min(cards)
            origin = SourceOrigin(worker, subjects.worker(self._runtime.namespace, worker, "snapshot"))
            chains = self._chains(model_name, worker)
            trust = partial(self.models[model_name].set_sends_events, worker)
            self._follow(origin, stream, model_name, chains, trust)
        feed = self.feeds.get(worker)
        for name in cards:
            self.models[name].set_sends_events(
                worker, feed is not None and feed.usable and name == self._model_of_feed[worker]
            )
        for kvbm in kvbms - {""}:
            self._refresh_stores(kvbm)

    def _apply_models_limit(self, cards: dict[str, ModelCard]) -> None:
        """Remove cards from `cards` for whose models there is no room."""
        for name in [name for name in cards if name not in self.models]:
            if len(self.models) >= MODELS_LIMIT and not self._drop_longest_unserved():
                del cards[name]
                self._limited_log.warn("models", f"{name} is ignored: {MODELS_LIMIT} models are known already")
            else:
                self._model(name)

    def _drop_longest_unserved(self) -> bool:
        """Drop the model that has been unserved longest, if that is long enough; return whether one was dropped."""
        for name, since_s in self._unserved.items():
            if asyncio.get_running_loop().time() - since_s < UNSERVED_LIMIT_S:
                return False
            del self._unserved[name]
            del self.models[name]
            self._model_dropped(name)
            return True
        return False

    def _model(self, name: str) -> ModelRouter:
        if name not in self.models:
            clock = None if self._config.policy in BUILT_IN else time.perf_counter
            self.models[name] = ModelRouter(
                name, self._runtime.instance, self._config, self._make_policy(), self._draw, clock
            )
            self._model_added(name)
        return self.models[name]

    # --- events

    def _follow(
        self,
        origin: SourceOrigin,
        stream: EventSource,
        model: str,
        chains: dict[int, Chains],
        trust: Callable[[bool], None],
    ) -> bool:
        """Open a feed; return whether its address is valid."""
        try:
            self.feeds[origin.name] = EventFeed(
                self._runtime,
                origin,
                stream,
                chains,
                self._config.source,
                self._metrics,
                self._limited_log,
                clear_later=lambda cleanup: self._clear_later([cleanup]),
                trust=trust,
                snapshot_semaphore=self._snapshot_semaphore,
            )
        except ProtocolError as wrong:
            self._metrics.malformed.labels("event source").inc()
            self._limited_log.warn("event source", wrong)
            return False
        self._model_of_feed[origin.name] = model
        return True

    def _chains(self, model: str, worker: str) -> dict[int, Chains]:
        chains = self.models[model].caches.chains
        return {rank: chains[worker, rank] for instance, rank in chains if instance == worker}

    def _clear_later(self, cleanups: list[SlotCleanup]) -> None:
        self._cleanups.extend(cleanup for cleanup in cleanups if cleanup.step(_SLICE_BLOCKS))

    # --- stores

    def _refresh_stores(self, kvbm: str) -> None:
        """Follow exactly the stores of a kvbm that cards name and that its address has."""
        address = self._runtime.directory.instances.get(kvbm)
        wanted = self._wanted_stores(kvbm, address) if address is not None and address.service == "kvbm" else {}
        for name, model in self.models.items():
            for store in [store for store in model.caches.stores if kvbm_of(store) == kvbm]:
                feed = self.feeds[store]
                if wanted.get(store) != (name, feed.stream):
                    feed.close()
                    del self.feeds[store], self._model_of_feed[store]
                    self._clear_later([model.caches.remove_store(store)])
        for store, (name, stream) in wanted.items():
            if store not in self.feeds:
                self._follow_store(store, stream, name)

    def _wanted_stores(self, kvbm: str, address: Instance) -> dict[StoreId, tuple[str, EventSource]]:
        """Return the kvbm's stores that cards name → the first model that names it, and the source of its events. None
        is wanted if events are off."""
        named: dict[StoreId, tuple[str, EventSource]] = {}
        if self._config.events == "off":
            return named
        for name, model in self.models.items():
            for store in model.caches.instances_of_store:
                stream = address.layouts.get(layout_of(store)) if kvbm_of(store) == kvbm else None
                if stream is None:
                    continue
                if len(named) < STORES_LIMIT:
                    named.setdefault(store, (name, stream))
                else:
                    self._limited_log.warn(
                        f"kvbm {kvbm}",
                        f"layout {layout_of(store)[:64]} is not followed: at most {STORES_LIMIT} layouts are",
                    )
        return named

    def _follow_store(self, store: StoreId, stream: EventSource, model: str) -> None:
        snapshots = subjects.kvbm(self._runtime.namespace, kvbm_of(store), "snapshot")
        origin = SourceOrigin(store, snapshots, layout_of(store), _STORE_TIERS)
        chains = self.models[model].caches.add_store(store)
        if not self._follow(origin, stream, model, {0: chains}, lambda _usable: None):
            self._clear_later([self.models[model].caches.remove_store(store)])
