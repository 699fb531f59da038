"""Follows the directory's model cards, loads each model's tokenizer, and knows which models can serve requests now.

    cards ──▶ loading ──▶ ready         each model by itself: one that fails or loads does not stop another
                │  ▲
                ▼  │ again after RETRY_S or a change, as long as a newer card than the loaded one is there
              failed(reason)

The cards of a model have the same tokenizer, but their chat templates may differ. The newest card that can be loaded
counts: that of the worker which started last, so that all frontends choose the same. While newer ones do not load,
`card_faults` says why. When the card goes, the newest of the others takes its place.

A model that is expected by the settings is not known before its worker is: requests wait for it, for a while.

A model stays known when its last worker goes, so that its clients get 503 and not 404.

A model that takes turns with others (docs/model_turns.md) is served while it sleeps too: its worker's entry in
discovery has the card, and requests wait until it is awake (requests/turn_waits.py).

The LoRAs of the cards are models too (lora_names.py): each is its base model with another name and the LoRA's id. A
base model of the same name comes first. The name that a card's server has for the model means the model too, unless
another one has it (model_names.py). Both stay known for as long as the model, unless another one takes the name over.

A card that names a server is of one that takes and gives text alone. Nothing is loaded for it, and `text_of` finds it.
Nor is anything for a model that makes pictures, which `pictures_of` finds.

The card has the text of a template that replaces the model's own: a name alone would mean another text in another
version, and a path alone another file on another machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from msgspec.structs import replace

from services.frontend.models.fetched_files import ModelFiles
from services.frontend.models.lora_names import LoraNames
from services.frontend.models.model import (
    BY_TEMPLATE,
    Model,
    ModelLimits,
    ParserNames,
    is_template_text_true,
    load_model,
    model_limits,
)
from services.frontend.models.model_names import ModelAliases, similar_names
from shared.discovery.catalogue import idle_workers
from shared.discovery.directory import CardDown, CardUp, Directory, DirectoryChange, InstanceDown, InstanceUp
from shared.errors import InvalidRequest, ModelError, Unavailable
from shared.messages.cards import Instance, ModelCard, PictureOutput, TurnTaker
from shared.rate_limited_log import RateLimitedLog

RETRY_S = 5.0
"""Seconds between two attempts to load a model."""
RESTART_S = 30.0
"""Seconds for which a model that takes turns stays known after its worker has gone: another one is likely to start, and
requests wait for it."""
EXPECTED_S = 30.0
"""Seconds for which a request waits for an expected model that is not known yet."""
MODELS_LIMIT = 256
"""The number of known models, with or without workers. Cards of further models are ignored with an error."""
FAULTS_LISTED = 32
"""The number of cards that /health lists because they cannot be loaded."""

_LOADING = "its tokenizer is being loaded"

_log = logging.getLogger(__name__)

_Source = tuple[str, str, str, str]
"""Where the tokenizer and the chat template of a card come from, the template's digest, and its text in the card. Cards
with the same one load alike."""


@dataclass
class _Entry:
    instances: Mapping[str, Instance]
    """All instances that are known."""
    awake: dict[str, ModelCard] = field(default_factory=dict)
    """The model's cards by the worker's instance id."""
    by_turns: dict[str, ModelCard] = field(default_factory=dict)
    """The cards of workers that take turns, awake or asleep, or gone for less than RESTART_S."""
    model: Model | None = None
    reason: str = _LOADING
    """Why `model` is None."""
    loading: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by every change, which ends the wait for the next attempt to load."""
    failed: dict[_Source, str] = field(default_factory=dict)
    """Why cards newer than the loaded one cannot be loaded; of a model without a loaded card, why all cannot be."""

    @property
    def cards(self) -> dict[str, ModelCard]:
        """The cards that count: while all workers sleep, those that they will have."""
        return self.awake or self.by_turns

    @cached_property
    def ordered(self) -> list[ModelCard]:
        """The cards in the order in which the workers started; it follows from values that all frontends see."""
        return sorted(self.cards.values(), key=self._age)

    def _age(self, card: ModelCard) -> tuple[float, str]:
        worker = self.instances.get(card.instance)
        return (0.0 if worker is None else worker.started), card.instance

    @cached_property
    def chosen(self) -> list[ModelCard]:
        """The cards of the workers that routers choose, in the same order."""
        return [card for card in self.ordered if card.routed]

    @cached_property
    def limits(self) -> ModelLimits:
        """The limits of these workers."""
        return model_limits(self.chosen)

    def forget_order(self) -> None:
        """Forget what follows from the cards and their workers, because one of these has changed."""
        for name in ("ordered", "chosen", "limits"):
            vars(self).pop(name, None)

    @property
    def fault(self) -> str:
        """Why the model cannot serve requests although it has workers; empty if it can."""
        if not any(card.decodes for card in self.cards.values()):
            roles = ", ".join(sorted({card.role for card in self.cards.values()}))
            return (
                f"its workers have the role {roles}, and none decodes: start one with the role decode or aggregated, or"
                " resume one that is drained, or wake one that sleeps"
            )
        return "" if self.model is not None or not self.has_tokenizer else self.reason

    @property
    def is_text(self) -> bool:
        """Whether the model's servers take and give text alone: then no tokenizer is loaded."""
        return any(card.server for card in self.cards.values())

    @property
    def makes_pictures(self) -> bool:
        """Whether the model makes pictures or videos."""
        return any(card.pictures is not None for card in self.cards.values())

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer is loaded for the model."""
        return not (self.is_text or self.makes_pictures)

    def matches(self, card: ModelCard) -> bool:
        """Whether the loaded model is the card's."""
        loaded = self.model
        return loaded is not None and (loaded.tokenizer_digest, loaded.block_size) == (
            card.tokenizer_digest,
            card.block_size,
        )

    def is_current(self, card: ModelCard) -> bool:
        """Whether the loaded model is the card's, with its chat template."""
        loaded = self.model
        same = loaded is not None and self.matches(card) and loaded.template_digest == card.template_digest
        return same and is_template_text_true(card)

    def newest_first(self) -> Iterator[ModelCard]:
        """Yield one card of each source."""
        seen: set[_Source] = set()
        for card in reversed(self.ordered):
            if _source(card) not in seen:
                seen.add(_source(card))
                yield card


class ModelRegistry:
    """All known models by name."""

    def __init__(
        self,
        directory: Directory,
        files: ModelFiles,
        directories: Mapping[str, str],
        tasks: asyncio.TaskGroup,
        pool: Executor,
        parsers: Callable[[str], ParserNames] = lambda _name: BY_TEMPLATE,
        expected: Collection[str] = (),
    ) -> None:
        """Create it. `directories` has the path of a model's tokenizer that counts instead of that of the cards.
        `parsers` returns the names of a model's parsers, `expected` are models that workers will bring."""
        self._expected = frozenset(expected)
        self._files = files
        self._directories = directories
        self._parsers = parsers
        self._tasks = tasks
        self._pool = pool
        self._instances = directory.instances
        self._entries: dict[str, _Entry] = {}
        self._loras = LoraNames()
        self._aliases = ModelAliases()
        self._now_s = asyncio.get_running_loop().time
        self._hidden: set[str] = set()
        """What was logged of names that do not mean what has them, while it holds."""
        self._limited_log = RateLimitedLog()
        self.texts: set[str] = set()
        """The models whose servers take and give text alone."""
        self._loaded = asyncio.Event()
        """Set after every attempt to load a model."""
        directory.subscribe(self._on_change)

    async def wait_loaded(self) -> None:
        """Wait until every model that has a worker was loaded, or failed to load."""
        while any(
            entry.loading and entry.model is None and entry.reason == _LOADING for entry in self._entries.values()
        ):
            self._loaded.clear()
            await self._loaded.wait()

    async def wait_expected(self, name: str | None) -> None:
        """Wait until a model that is expected is loaded, at most for EXPECTED_S. Any other name is not waited for."""
        if name not in self._expected:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(EXPECTED_S):
                while self._is_to_come(name):
                    self._loaded.clear()
                    await self._loaded.wait()

    def _is_to_come(self, name: str) -> bool:
        """Return whether an expected model has had no worker yet, or its tokenizer is being loaded."""
        entry = self._entries.get(name)
        return entry is None or (bool(entry.cards) and entry.fault == _LOADING)

    def find(self, name: str | None) -> tuple[Model, ModelLimits]:
        """Return the model or the LoRA of that name, or the only model for None and an empty name. Raise InvalidRequest
        (404) for a name that no worker has served, and for a LoRA that was unloaded; Unavailable while it cannot be
        served."""
        name = self._own_name(name) if name else self._only()
        entry = self._entries.get(name)
        if entry is not None:
            return self._model_of(name, entry), entry.limits
        lora = self._loras.find(name)
        if lora is not None:
            return self._find_lora(name, *lora)
        if self._loras.is_gone(name):
            raise Unavailable(f"no worker has the LoRA {name!r} now; those that had it are gone or do not serve")
        if idle := self._idle(name):
            raise Unavailable(f"no worker serves the model {name!r} now{idle}")
        if not self._entries or name in self._directories or name in self._expected:
            raise Unavailable(f"no worker serves the model {name!r} yet")
        known = {*self._entries, *self._loras.names}
        wrong = f"the model {name!r} does not exist; there is {', '.join(similar_names(name, known))}"
        raise InvalidRequest(wrong, param="model", code="model_not_found", status=404)

    def pictures_of(self, name: str | None) -> tuple[str, PictureOutput]:
        """Return the name of a model, or the only one for None and an empty name, and what pictures it makes. Raise
        InvalidRequest for a model that makes none, and what `find` raises."""
        name = self._own_name(name) if name else self._only_pictures()
        entry = self._entries.get(name)
        if entry is not None and entry.cards and not entry.fault and entry.limits.pictures is not None:
            return name, entry.limits.pictures
        self.find(name)
        wrong = f"the model {name!r} makes no pictures; --engine diffusers serves those that do"
        raise InvalidRequest(wrong, param="model", code="unsupported_value")

    def _only_pictures(self) -> str:
        """Return the only model that makes pictures, or else the only model."""
        names = [name for name, entry in self._entries.items() if entry.makes_pictures]
        return names[0] if len(names) == 1 else self._only()

    def text_of(self, name: str | None) -> str:
        """Return the model that a request means, if its servers take and give text alone. Empty otherwise."""
        base = self.base_of(name) if self.texts else ""
        return base if base in self.texts else ""

    def base_of(self, name: str | None) -> str:
        """Return the name of the base model that a request means. Empty if it means none that is known."""
        if not name:
            names = self._unnamed()
            return names[0] if len(names) == 1 else ""
        name = self._own_name(name)
        if name in self._entries:
            return name
        lora = self._loras.find(name)
        return "" if lora is None else lora[0]

    def _own_name(self, name: str) -> str:
        """Return a model's own name for another one that it has; any other name as it is."""
        own = name in self._entries or name in self._loras.names or self._loras.is_gone(name)
        return name if own else self._aliases.find(name, self._now_s()) or name

    def _model_of(self, name: str, entry: _Entry) -> Model:
        """Return the model of an entry. Raise Unavailable while it cannot be served."""
        if not entry.cards:
            raise Unavailable(f"no worker serves the model {name!r} now{self._idle(name)}")
        if entry.is_text and not entry.fault:
            wrong = "has servers that take and give text alone: only over HTTP, and at paths that they have themselves"
            raise InvalidRequest(f"the model {name!r} {wrong}", param="model", code="unsupported_value")
        if entry.makes_pictures and not entry.fault:
            wrong = "makes pictures: ask for them at /v1/images/generations or /v1/videos"
            raise InvalidRequest(f"the model {name!r} {wrong}", param="model", code="unsupported_value")
        if entry.model is None or entry.fault:
            raise Unavailable(f"the model {name!r} is not ready: {entry.fault}")
        return entry.model

    def _find_lora(self, name: str, base: str, lora: str) -> tuple[Model, ModelLimits]:
        """Return the base model under the LoRA's name. Raise Unavailable while the base model cannot be served."""
        entry = self._entries[base]
        model = self._model_of(base, entry)
        limits = model_limits([card for card in entry.chosen if lora in card.lora])
        return replace(model, name=name, parent=base, lora=lora), limits

    def _unnamed(self) -> list[str]:
        """Return the models that a request without a name may mean."""
        return [name for name, entry in self._entries.items() if entry.chosen] or list(self._entries)

    def _only(self) -> str:
        names = self._unnamed()
        if not names:
            raise Unavailable(self.absence)
        if len(names) > 1:
            raise InvalidRequest(f"several models are served, name one: {', '.join(sorted(names))}", param="model")
        return names[0]

    def served(self) -> dict[str, ModelLimits]:
        """Return the models that can serve requests now."""
        return {name: entry.limits for name, entry in self._entries.items() if entry.cards and not entry.fault}

    def served_loras(self) -> dict[str, tuple[Model, ModelLimits]]:
        """Return the LoRAs that can be asked for now, by name."""
        found: dict[str, tuple[Model, ModelLimits]] = {}
        for name in sorted(self._loras.names):
            lora = self._loras.find(name)
            if lora is None or name in self._entries:
                continue
            base = self._entries[lora[0]]
            if base.model is not None and not base.fault:
                found[name] = self._find_lora(name, *lora)
        return found

    def faults(self) -> list[str]:
        """Return why models with a worker cannot serve requests."""
        return [f"model {name}: {entry.fault}" for name, entry in self._entries.items() if entry.cards and entry.fault]

    @property
    def absence(self) -> str:
        """Why no model is served, if none has a worker that serves."""
        idle = self._idle()
        return f"no worker serves{idle}" if idle else "no worker is there"

    def _idle(self, model: str = "") -> str:
        """Return which workers of a model, or of all, were asked not to serve, after a colon. Empty if none was."""
        idle = idle_workers(self._instances.values(), model)
        return idle and f": {idle}"

    def card_faults(self) -> list[str]:
        """Return why cards of models that are served with another card cannot be loaded."""
        faults = [
            f"model {name}: the card of worker {card.instance} cannot be loaded: {entry.failed[_source(card)]}"
            for name, entry in self._entries.items()
            for card in (entry.ordered if entry.model is not None else ())
            if _source(card) in entry.failed
        ]
        return faults[:FAULTS_LISTED]

    def _on_change(self, change: DirectoryChange) -> None:
        match change:
            case CardUp():
                self._take(change.card, awake=True)
            case CardDown() if change.card.model in self._entries:
                entry = self._entries[change.card.model]
                entry.awake.pop(change.card.instance, None)
                self._loras.remove_card(change.card.model, change.card.instance)
                for card in () if entry.awake else entry.by_turns.values():  # its LoRAs stay known while it sleeps
                    self._loras.set_card(card.model, card.instance, card.lora)
                self._reload(change.card.model, entry)
            case InstanceUp(Instance(turns=TurnTaker(card=card))):
                self._take(card, awake=False)
            case InstanceDown(Instance(turns=TurnTaker(card=card))):
                asyncio.get_running_loop().call_later(RESTART_S, self._forget_turn, card)
            case InstanceUp() | InstanceDown():  # a card may be known before its worker is, and after it
                for name, entry in self._entries.items():
                    if change.instance.instance in entry.cards:
                        self._reload(name, entry)
            case _:
                pass

    def _forget_turn(self, card: ModelCard) -> None:
        """Forget a model's worker that has gone, unless it has come back."""
        entry = self._entries.get(card.model)
        if (
            entry is not None
            and card.instance not in self._instances
            and entry.by_turns.pop(card.instance, None) is not None
        ):
            self._loras.remove_card(card.model, card.instance)
            self._reload(card.model, entry)

    def _take(self, card: ModelCard, *, awake: bool) -> None:
        if card.model not in self._entries and len(self._entries) >= MODELS_LIMIT:
            self._limited_log.error("models", f"{card.model} is left out: {MODELS_LIMIT} models are known already")
            return
        entry = self._entries.setdefault(card.model, _Entry(self._instances))
        (entry.awake if awake else entry.by_turns)[card.instance] = card
        if card.instance not in entry.cards:  # another worker of the model is awake
            return
        self._loras.set_card(card.model, card.instance, card.lora if card.routed else ())
        if not entry.matches(card):
            entry.model = None  # its tokens would mean something else to the new workers
            entry.reason = _LOADING
        self._reload(card.model, entry)

    def _report_hidden(self) -> None:
        """Log each name once that does not mean what has it, because a model or LoRA has it, too."""
        own, loras = self._entries.keys(), self._loras.names.keys()
        lost = "the LoRA {} cannot be asked for: a model has its name; load it under another one"
        hidden = {*map(lost.format, loras & own), *self._aliases.refusals(self._now_s(), own, loras)}
        for said in sorted(hidden - self._hidden):
            _log.warning("%s", said)
        self._hidden = hidden

    def _reload(self, name: str, entry: _Entry) -> None:
        """Order the cards again, and load the newest if it is not loaded. Many changes at once are one."""
        entry.forget_order()
        if entry.cards:
            newest = entry.ordered[-1]
            aliases = (card.alias for card in entry.cards.values())
            self._aliases.set_names(name, aliases, (newest.path, newest.tokenizer_digest))
        else:
            self._aliases.lose_workers(name, self._now_s())
        self._report_hidden()
        (self.texts.add if entry.is_text else self.texts.discard)(name)
        entry.changed.set()
        if not entry.loading:
            entry.loading = True
            self._tasks.create_task(self._load(name, entry), name=f"load {name}")

    async def _load(self, name: str, entry: _Entry) -> None:
        """Try until the newest card is loaded, or there are no cards."""
        while entry.cards and entry.has_tokenizer:
            entry.changed.clear()
            if await self._load_newest(name, entry):
                if not entry.failed:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await entry.changed.wait()
        entry.loading = False
        self._loaded.set()

    async def _load_newest(self, name: str, entry: _Entry) -> bool:
        """Load the newest card that can be loaded, and note why newer ones cannot. Return False if the cards changed
        meanwhile in such a way that another one may have to be loaded."""
        loop = asyncio.get_running_loop()
        failed: dict[_Source, str] = {}
        for card in entry.newest_first():
            if entry.is_current(card):
                break
            given = self._directories.get(name)
            try:
                async with nullcontext(Path(given)) if given else self._files.directory_of(card) as directory:
                    loaded = await loop.run_in_executor(self._pool, load_model, card, directory, self._parsers(name))
            except ModelError as wrong:
                failed[_source(card)] = str(wrong)
                if entry.failed.get(_source(card)) != str(wrong):
                    _log.error("model %s: the card of worker %s cannot be loaded: %s", name, card.instance, wrong)
                continue
            if card not in entry.cards.values():
                return False
            entry.model = loaded
            _log.info("model %s is ready, as the card of worker %s has it", name, card.instance)
            break
        else:
            if not any(entry.is_current(card) for card in entry.cards.values()):  # one may have come meanwhile
                entry.model = None
            entry.reason = next(iter(failed.values()), entry.reason)
        entry.failed = failed
        self._loaded.set()
        newest = next(entry.newest_first(), None)
        return newest is None or entry.is_current(newest) or _source(newest) in failed


def _source(card: ModelCard) -> _Source:
    return card.path, card.chat_template, card.template_digest, card.template_text
