"""The model card: what a worker says of the model that it serves, and its entries in discovery."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path

import msgspec

from services.worker.config import SamplingConfig, WorkerConfig
from services.worker.contracts.messages import Ready
from services.worker.model.facts import read_pooling, read_sampling
from shared import hashing, subjects
from shared.chat_templates import NAMES, template_file
from shared.discovery.announcement import Announcement
from shared.discovery.catalogue import read_catalogue
from shared.errors import DiscoveryDown
from shared.messages.cards import ASLEEP, MODEL_CARD, EventSource, ModelCard, Role, TurnTaker
from shared.messages.codec import JSON_HEADER
from shared.model_file import TOKENIZER_LIMIT_BYTES, read_model_file
from shared.model_files.templates import read_templates
from shared.runtime.runtime import Runtime

DEFAULT_SAMPLING = SamplingConfig()
TEXT_DIGEST = "text"
"""What stands for the tokenizer's digest if a server takes text alone. Discovery refuses a model with both kinds."""
PICTURES_DIGEST = "pictures"
"""What stands for it if the model makes pictures."""
OPERATIONS = ("generate", "prefetch", "cancel", "resend", "snapshot", "files", "load", "operate", "encode", "control")
"""The operations whose subjects a worker's address book names."""
TEMPLATE_LIMIT_BYTES = 32 << 10
"""The maximum size of a chat template in a card, as JSON; half of what discovery takes as a value."""

_log = logging.getLogger(__name__)


def card_of(
    facts: Ready,
    *,
    model: str,
    model_name: str,
    instance: str,
    device: str = "",
    chat_template: str = "",
    sampling: SamplingConfig = DEFAULT_SAMPLING,
    role: Role = "aggregated",
    max_running: int = 0,
) -> ModelCard:
    """Return the card of an engine that is ready. `model` is where the tokenizer lies, unless the engine names another
    directory. Reads some MB. Raise ModelError."""
    if facts.server or facts.pictures:
        return _card_without_tokenizer(facts, model_name, instance, max_running)
    path, digest = _tokenizer(Path(facts.path or model))
    templates = read_templates(path, chat_template)
    named = not chat_template or chat_template in NAMES
    return ModelCard(
        model=model_name,
        instance=instance,
        path=str(path),
        tokenizer_digest=digest,
        hash_self_test=hashing.self_test(facts.block_size),
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        block_size=facts.block_size,
        capacity_blocks=facts.capacity_blocks,
        ranks=facts.ranks,
        kv_layout=facts.kv_layout,
        eos_token_ids=facts.eos_token_ids,
        role=role,
        max_running=max_running,
        grammars=facts.grammars,
        biases=facts.biases,
        min_tokens=facts.min_tokens,
        prompt_logprobs=facts.prompt_logprobs,
        allowed_tokens=facts.allowed_tokens,
        forgets_output=facts.forgets_output,
        images=facts.images,
        embeddings_layout=facts.embeddings_layout,
        embedding_size=facts.embedding_size,
        generates=facts.generates,
        pooling=(facts.pooling or read_pooling(Path(model))) if facts.embedding_size else "",
        device=device,
        sampling=read_sampling(path, sampling),
        chat_template=chat_template if named else str(template_file(chat_template).resolve()),
        template_digest=templates.digest,
        template_text=_carried(templates.chat) if chat_template else "",
        address=facts.address,
        alias=facts.alias,
    )


def _card_without_tokenizer(facts: Ready, model_name: str, instance: str, max_running: int) -> ModelCard:
    """Return the card of a server that takes text alone, or of a model that makes pictures: frontends read no files of
    either."""
    return ModelCard(
        model=model_name,
        instance=instance,
        path="",
        tokenizer_digest=PICTURES_DIGEST if facts.pictures else TEXT_DIGEST,
        hash_self_test=hashing.self_test(facts.block_size),
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        block_size=facts.block_size,
        capacity_blocks=facts.capacity_blocks,
        kv_layout=facts.kv_layout,
        address=facts.address,
        server=facts.server,
        generates=facts.generates,
        pictures=facts.pictures,
        max_running=max_running if facts.pictures else 0,
    )


def _carried(template: str) -> str:
    """Return a chat template for the card. Empty if it is too long: frontends then read the file."""
    return template if len(msgspec.json.encode(template)) <= TEMPLATE_LIMIT_BYTES else ""


def served_name(config: WorkerConfig) -> str:
    """Return the model's name for clients. Without `model_name`, a file's name without its suffix, or a directory's
    whole name, since that may have dots in it."""
    model = Path(config.model)
    return config.model_name or (model.stem if model.is_file() else model.resolve().name)


def _tokenizer(directory: Path) -> tuple[Path, str]:
    """Return the directory's absolute path, and the SHA-256 (hex) of its tokenizer.json. Raise ModelError."""
    file = directory.resolve() / "tokenizer.json"
    return file.parent, hashlib.sha256(read_model_file(file, TOKENIZER_LIMIT_BYTES)).hexdigest()


class CardAnnouncement:
    """Keeps a worker's entries in discovery: its address book from the first card on, and the card while it takes
    requests. They are written as soon as discovery can be reached."""

    def __init__(self, runtime: Runtime, source: EventSource | None, role: Role) -> None:
        """`source` is that of the worker's KV events. None if it sends none."""
        self._runtime = runtime
        self._role: Role = role
        self._source = source
        self.entries = Announcement(
            runtime.discovery, self._make_entries, due=lambda: bool(self.card or self.turn), shown=self._shown
        )
        self.card: ModelCard | None = None
        self.turn: TurnTaker | None = None
        """What frontends know of the model while it sleeps until its turn. None if it takes no turns, or no engine was
        ready yet."""
        self._state = self._model = self._device = ""
        self._published = asyncio.Event()
        """Set while discovery has all that was shown last."""
        self._card_published = asyncio.Event()
        """Set once discovery has a card."""

    def show(self, card: ModelCard | None, state: str = "") -> None:
        """Publish this card, or none while no request would be accepted; `state` is `Instance.state`."""
        self.card, self._state = card, state
        known = self.known_card()
        if known is not None:
            self._model, self._device = known.model, known.device
        self._published.clear()
        self.entries.request_update()

    def known_card(self) -> ModelCard | None:
        """Return the card by which frontends know the model. None if they do not."""
        return self.turn.card if self.card is None and self.turn is not None else self.card

    async def published_within(self, limit_s: float) -> bool:
        """Wait until discovery has what was shown last; return whether that was so in time."""
        try:
            async with asyncio.timeout(limit_s):
                await self._published.wait()
        except TimeoutError:
            return False
        return True

    async def report_refusal(self) -> None:
        """Log, once the first card is published, why it is refused, if it is: routers and frontends then ask the worker
        for nothing."""
        own = None
        while own is None:  # a worker that takes turns may withdraw it at once
            await self._card_published.wait()
            self._card_published.clear()
            own = self.card
        try:
            found = await self._runtime.discovery.list(subjects.namespace_prefix(self._runtime.namespace))
        except DiscoveryDown:
            return
        key = subjects.model_key(self._runtime.namespace, own.model, own.instance)
        others, _ = read_catalogue(self._runtime.namespace, {name: found[name] for name in found if name != key})
        others.set(key, own)  # the last one that came
        if wrong := others.refused.get((own.model, own.instance)):
            _log.error("this worker's card is refused, and it gets no requests: %s", wrong)

    def _shown(self) -> None:
        if not self.entries.pending:
            self._published.set()
            if self.card is not None:
                self._card_published.set()
        if self.card is not None or (self.turn is not None and self._state == ASLEEP):
            self._runtime.health.ready()  # routers can choose it, or its turn comes; a rolling restart waits for that

    def _make_entries(self, epoch: int) -> dict[str, bytes]:
        runtime = self._runtime
        operations = {name: subjects.worker(runtime.namespace, runtime.instance, name) for name in OPERATIONS}
        entries = runtime.address(
            epoch,
            operations,
            events=self._source,
            state=self._state,
            role=self._role,
            turns=self.turn,
            model=self._model,
            device=self._device,
        )
        if self.card is not None:
            card_key = subjects.model_key(runtime.namespace, self.card.model, runtime.instance)
            entries[card_key] = MODEL_CARD.encode(self.card, JSON_HEADER)
        return entries
