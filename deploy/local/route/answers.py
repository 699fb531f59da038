"""What a server's answers say of it, what it lacks, and whether it fits the others. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

MOST_MODELS = 1000
"""Most models that a server may list."""
EVENTS_FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5558"}\''
)
REPLAY_FLAG = '"replay_endpoint": "tcp://*:5558" in its --kv-events-config'
PROGRAMS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "library": "Ollama",
    "llamacpp": "llama.cpp",
    "tensorrt_llm": "TensorRT-LLM",
}
"""The programs that write these words into `owned_by`."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


class ListedModel(Struct, frozen=True):
    """A model in a server's list."""

    id: str
    root: str | None = None
    """vLLM: what the server was started with, a directory there or a name on the hub."""
    parent: str | None = None
    """The model that a LoRA is for."""
    max_model_len: int | None = None
    owned_by: str | None = None
    """What the server calls itself here, as most do."""

    @property
    def names(self) -> set[str]:
        """The names under which others may know it: paths also by their last part."""
        given = [self.id, *([self.root] if self.root else [])]
        return {*given, *(name.rstrip("/").rpartition("/")[2] for name in given)} - {""}


class ServerModels(Struct, frozen=True):
    """The answer of /v1/models."""

    data: Annotated[tuple[ListedModel, ...], Meta(max_length=MOST_MODELS)]

    @property
    def bases(self) -> tuple[ListedModel, ...]:
        """The models that are no LoRAs."""
        return tuple(model for model in self.data if not model.parent)


class PublishedEvents(Struct, frozen=True):
    """The KV events of one rank, as vLLM's /kv_event_sources shows them."""

    endpoint: str = ""
    replay_endpoint: str | None = None
    enable_kv_cache_events: bool = True


class Found(Struct, frozen=True):
    """What a server says of itself."""

    models: ServerModels
    version: str = ""
    """Empty if it does not say."""
    block_size: int = 0
    """Tokens of a block of KV. 0 if it does not say."""
    blocks: int = 0
    ranks: int = 0
    """Data-parallel ranks. 0 if it does not say."""
    events: str = ""
    """The ZeroMQ endpoint of its KV events, as it is reached from here. Empty if there is none."""
    replay: str = ""
    lacks: str = ""
    """What it lacks, and the flag by which it gets it. Empty if it has all."""
    text: bool = False
    """Whether requests go to it as text, and not as token ids."""


def find_events(host: str, sources: Mapping[str, PublishedEvents] | None, ranks: int) -> tuple[str, str, str]:
    """Return the endpoints of a server's KV events and of their replay, and what is missing: each may be empty.
    `sources` is None if the server does not say."""
    if sources is None:
        return "", "", "it says nothing of KV events, as vLLM does from 0.32 on"
    enabled = [source for source in sources.values() if source.enable_kv_cache_events and source.endpoint]
    if not enabled:
        return "", "", f"it publishes no KV events: start it with {EVENTS_FLAG}"
    if max(ranks, len(sources)) > 1:
        return "", "", f"its KV events are those of {max(ranks, len(sources))} data-parallel ranks, and not followed"
    events = _reached(host, enabled[0].endpoint)
    if not events:
        return "", "", f"its KV events are at {enabled[0].endpoint}, not to be reached from here: {EVENTS_FLAG}"
    replay = _reached(host, enabled[0].replay_endpoint or "")
    return events, replay, "" if replay else f"what it cached before is unknown: set {REPLAY_FLAG}"


def _reached(host: str, endpoint: str) -> str:
    """Return how an endpoint at which a server of `host` listens is reached. Empty if it is not."""
    if endpoint.startswith("ipc://"):
        return endpoint if host in _LOCAL else ""
    try:
        parts = urlsplit(endpoint)
        listens, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if parts.scheme != "tcp" or not listens or not port:
        return ""
    if listens in ("*", "0.0.0.0", "::"):  # noqa: S104 - a server's address, to which nothing is bound here
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    return endpoint if listens not in _LOCAL or host in _LOCAL else ""


def takes_text(models: ServerModels, block_size: int) -> bool:
    """Return whether a server takes and gives text alone, as far as it says what it is: a vLLM or SGLang names where
    its models are from, or the size of its blocks."""
    return not block_size and not any(model.root or model.owned_by in ("vllm", "sglang") for model in models.bases)


def pick(found: Found, names: Collection[str] | None) -> ListedModel | None:
    """Return the server's model that is known under one of the names, or its first one if any will do. None if it has
    none. A server that takes text gets the name as clients give it, so its own must be the same."""
    for model in found.models.bases:
        if names is None or not (model.names if not found.text else {model.id}).isdisjoint(names):
            return model
    return None


def misfit(found: Found, names: Collection[str] | None, block_size: int, *, text: bool | None = None) -> str:
    """Return why a server does not belong to the others: the model's names and tokens of a block are theirs, 0 if there
    are none; `text`: whether they take it, None if that is not known. Empty if it belongs to them."""
    if text is not None and text != found.text:
        kinds = ("takes token ids", "takes text alone")
        return f"{kinds[found.text]}, and the others do not: with --by text all get text"
    has = ", ".join(model.id for model in found.models.bases)[:200] or "none"
    if pick(found, names) is None:
        return f"has no model {' or '.join(sorted(names or ('at all',)))}; it has {has}"
    if block_size and found.block_size and found.block_size != block_size:
        return f"has blocks of {found.block_size} tokens, the others have {block_size}: start it with --block-size"
    return ""


def describe(found: Found, model: str) -> str:
    """Return a line on what was found, and what it lacks."""
    if found.text:
        (owner,) = [one.owned_by or "" for one in found.models.bases if one.id == model][:1]
        loses = "an answer that has begun cannot go on elsewhere (docs/route.md)"
        return f"{PROGRAMS.get(owner, 'a server')}, model {model}, by text, routed by what was sent; {loses}"
    has = [f"vLLM {found.version}" if found.version else "a server without /version"]
    has.append(f"model {model}")
    if found.block_size:
        has.append(f"{found.blocks} blocks of {found.block_size} tokens")
    if found.events:
        has.append(f"KV events at {found.events}")
    else:
        has.append("routed by what was sent")
    return ", ".join(has) + (f"; {found.lacks}" if found.lacks else "")


def translate(reason: str, url: str) -> str:
    """Return a worker's reason, without what its line on the server has said already, and with the flag of `route`."""
    reason = re.sub(r"^headrace-worker: |^.*\bwas lost(?: and is starting again)?: ", "", reason)
    for setting in ("api_key_file", "ca_file", "client_cert", "client_key"):
        reason = reason.replace(f"attached.{setting}", f"--{setting.replace('_', '-')}")
    reason = reason.removeprefix("attached.url: ")
    reason = reason.removeprefix(f"{url} ").removeprefix(url)
    return re.sub(r"^/\S+ does not answer: ", "does not answer: ", reason)  # whichever path it was


MODEL_LIST = msgspec.json.Decoder(ServerModels)
EVENT_SOURCES = msgspec.json.Decoder(dict[str, PublishedEvents])
VERSION = msgspec.json.Decoder(dict[str, str | int | float | bool | None])
