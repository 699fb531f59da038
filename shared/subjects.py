"""NATS subjects and etcd keys, as functions of names and ids. Pure.

Ids are lower-case hex. A model's name is percent-encoded, the dot included, so that it is one token of a subject.
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import quote

from shared.errors import ProtocolError

ROOT = "headrace"
KEPT = 256
"""The number of names whose escaped form is kept."""


@lru_cache(KEPT)
def escape(name: str) -> str:
    """Escape `name` into one token of a NATS subject, which is also one segment of an etcd path."""
    return quote(name, safe="").replace(".", "%2E")


_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_PATTERN = re.compile(r">|(\*|[^\s.*>]+)(\.(\*|[^\s.*>]+))*(\.>)?")


LIMIT_BYTES = 2048
"""The maximum length of a subject. nats-server closes a connection whose line exceeds 4096 bytes, and a line may have a
reply subject in it as well."""

_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


def is_id(text: str) -> bool:
    """Return whether `text` can be an instance's id (ours are hex) or a namespace: one token, one path segment."""
    return _ID.fullmatch(text) is not None


def check(subject: str, *, wildcards: bool = False) -> None:
    """Raise ProtocolError if NATS would not accept `subject`. `wildcards` are allowed for subscriptions."""
    if len(subject.encode(errors="replace")) > LIMIT_BYTES:
        raise ProtocolError(f"a subject of {len(subject)} characters: {subject[:64]}…")
    if not (_PATTERN if wildcards else _SUBJECT).fullmatch(subject):
        raise ProtocolError(f"{subject!r} is not a subject")


# --- frontend: what clients ask, and where workers stream to


def client(namespace: str, operation: str) -> str:
    """The subject of an operation that NATS clients ask of any frontend: one of
    services/frontend/serving/request_context.py, or `models`."""
    return f"{ROOT}.{namespace}.frontend.{operation}"


def stream(namespace: str, frontend: str) -> str:
    """The subject on which workers publish step frames for one frontend."""
    return f"{ROOT}.{namespace}.frontend.{frontend}.stream"


def response_store(namespace: str, frontend: str) -> str:
    """The subject on which other frontends ask one frontend for a response that it stores."""
    return f"{ROOT}.{namespace}.frontend.{frontend}.kept"


def recent_requests(namespace: str, frontend: str) -> str:
    """The subject on which other frontends ask one frontend for its latest requests."""
    return f"{ROOT}.{namespace}.frontend.{frontend}.recent"


# --- router


def select(namespace: str, model_or_router: str) -> str:
    """The subject of Select, for a model (all its routers are one queue group) or for one router by its id."""
    return f"{ROOT}.{namespace}.router.{escape(model_or_router)}.select"


def router_load(namespace: str, model: str) -> str:
    """The subject of Reserved, Prefilled and Finished, for every router of a model."""
    return f"{ROOT}.{namespace}.router.{escape(model)}.load"


def explain(namespace: str, model_or_router: str) -> str:
    """The subject on which people ask for explanations: every router of a model, or one router by its id."""
    return f"{ROOT}.{namespace}.router.{escape(model_or_router)}.explain"


def reservations(namespace: str, router: str) -> str:
    """The subject on which a starting router asks another one for its reservations."""
    return f"{ROOT}.{namespace}.router.{router}.reservations"


def router_state(namespace: str, router: str) -> str:
    """The subject on which people ask one router for its state."""
    return f"{ROOT}.{namespace}.router.{router}.state"


def router_heat(namespace: str, router: str) -> str:
    """The subject on which people ask one router which prefixes are asked for often."""
    return f"{ROOT}.{namespace}.router.{router}.heat"


# --- worker


def worker(namespace: str, instance: str, operation: str) -> str:
    """The subject of one worker's operation: generate, cancel, resend, control, load, snapshot, encode
    or operate."""
    return f"{ROOT}.{namespace}.worker.{instance}.{operation}"


# --- models by turns


def turns(namespace: str, device: str) -> str:
    """The subject of WantModel: the process that decides whose turn it is on a device."""
    return f"{ROOT}.{namespace}.turns.{device}.want"


def turns_state(namespace: str, instance: str) -> str:
    """The subject on which people ask one such process for its state."""
    return f"{ROOT}.{namespace}.turns.{instance}.state"


# --- kvbm


def kvbm(namespace: str, instance: str, operation: str) -> str:
    """The subject of one kvbm's operation: attach, store, commit, abort, fetch, release, discard, snapshot, load, stat
    or control."""
    return f"{ROOT}.{namespace}.kvbm.{instance}.{operation}"


# --- KV events over NATS


def events(namespace: str, source: str) -> str:
    """The subject on which one source publishes batches of KV events; `source` is one token."""
    return f"{ROOT}.{namespace}.events.{source}"


def event_replay(events: str) -> str:
    """The subject on which the source that publishes on `events` is asked for a replay. It has one token more, so that
    no stream of JetStream keeps the questions."""
    return f"{events}.replay"


def event_stream(namespace: str) -> tuple[str, str]:
    """The stream of JetStream that keeps the batches of all sources of a namespace: its name, and its subjects."""
    return f"{ROOT}-{namespace}-events", events(namespace, "*")


# --- etcd keys


def namespace_prefix(namespace: str) -> str:
    """The prefix of all keys of one namespace."""
    return f"/{ROOT}/{namespace}/"


def instances_prefix(namespace: str, service: str = "") -> str:
    """The prefix of the address book entries of all instances, or of those of one service."""
    return f"/{ROOT}/{namespace}/instances/{service + '/' if service else ''}"


def instance_key(namespace: str, service: str, instance: str) -> str:
    """The key of one instance's address book entry."""
    return f"/{ROOT}/{namespace}/instances/{service}/{instance}"


def autoscalers_prefix(namespace: str) -> str:
    """The prefix of the entries of all `headrace autoscale`. It is none of the namespace, whose keys services read."""
    return f"/{ROOT}/{namespace}.autoscalers/"


def models_prefix(namespace: str) -> str:
    """The prefix of all model cards."""
    return f"/{ROOT}/{namespace}/models/"


def model_key(namespace: str, model: str, instance: str) -> str:
    """The key of the card of one instance that serves a model."""
    return f"/{ROOT}/{namespace}/models/{escape(model)}/{instance}"


# --- every service


def control(namespace: str, service: str, instance: str) -> str:
    """The subject on which one process answers Ping."""
    return f"{ROOT}.{namespace}.{service}.{instance}.control"
