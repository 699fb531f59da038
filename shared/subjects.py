"""NATS subjects and etcd keys, as functions of names and ids. Pure.

Ids are lower-case hex. A model's name is escaped into one subject token: percent-encoded, the dot included.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from shared.errors import ProtocolError

ROOT = "headrace"


def escape(name: str) -> str:
    """`name` as one NATS subject token and one etcd path segment."""
    return quote(name, safe="").replace(".", "%2E")


def unescape(token: str) -> str:
    """The reverse of `escape`."""
    return unquote(token)


_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_PATTERN = re.compile(r">|(\*|[^\s.*>]+)(\.(\*|[^\s.*>]+))*(\.>)?")


LIMIT_BYTES = 2048
"""Of a subject. nats-server closes the connection at 4096 bytes of a line, which has a reply subject in it as well."""

_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


def is_id(text: str) -> bool:
    """Whether `text` can be an instance's id (ours are hex) or a namespace: one subject token, one path segment."""
    return _ID.fullmatch(text) is not None


def check(subject: str, *, wildcards: bool = False) -> None:
    """Raises ProtocolError where NATS would not take `subject`; `wildcards` are for those who subscribe."""
    if len(subject.encode(errors="replace")) > LIMIT_BYTES:
        raise ProtocolError(f"a subject of {len(subject)} characters: {subject[:64]}…")
    if not (_PATTERN if wildcards else _SUBJECT).fullmatch(subject):
        raise ProtocolError(f"{subject!r} is not a subject")


# --- frontend: what clients ask, and where workers stream to


def client(namespace: str, operation: str) -> str:
    """Where a NATS client asks any frontend, as services/frontend/serving/request_context.py names it; or `models`."""
    return f"{ROOT}.{namespace}.frontend.{operation}"


def stream(namespace: str, frontend: str) -> str:
    """Where workers publish step frames for one frontend."""
    return f"{ROOT}.{namespace}.frontend.{frontend}.stream"


def kept(namespace: str, frontend: str) -> str:
    """Where one frontend is asked for a response that it keeps, by the others."""
    return f"{ROOT}.{namespace}.frontend.{frontend}.kept"


# --- router


def select(namespace: str, model_or_router: str) -> str:
    """Select for a model (a queue group of routers; the name is escaped) or at one router by its id."""
    return f"{ROOT}.{namespace}.router.{escape(model_or_router)}.select"


def router_load(namespace: str, model: str) -> str:
    """Reserved, prefilled and finished, told to every router of a model."""
    return f"{ROOT}.{namespace}.router.{escape(model)}.load"


def explain(namespace: str, model_or_router: str) -> str:
    """The candidate table of a request, for people: at every router of a model, or at one router by its id."""
    return f"{ROOT}.{namespace}.router.{escape(model_or_router)}.explain"


def reservations(namespace: str, router: str) -> str:
    """Where one router tells the reservations it knows to another that starts."""
    return f"{ROOT}.{namespace}.router.{router}.reservations"


def router_state(namespace: str, router: str) -> str:
    """One router's account of its models and of the event streams it follows, for people."""
    return f"{ROOT}.{namespace}.router.{router}.state"


# --- worker


def worker(namespace: str, instance: str, operation: str) -> str:
    """One worker's subject: generate, cancel, resend, control, load or snapshot."""
    return f"{ROOT}.{namespace}.worker.{instance}.{operation}"


# --- kvbm


def kvbm(namespace: str, instance: str, operation: str) -> str:
    """One block store's subject: attach, store, commit, abort, fetch, release, snapshot, load, stat or control."""
    return f"{ROOT}.{namespace}.kvbm.{instance}.{operation}"


# --- etcd keys


def namespace_prefix(namespace: str) -> str:
    """The prefix of everything in one namespace."""
    return f"/{ROOT}/{namespace}/"


def instances_prefix(namespace: str) -> str:
    """The prefix of all address books."""
    return f"/{ROOT}/{namespace}/instances/"


def instance_key(namespace: str, service: str, instance: str) -> str:
    """The key of one instance's address book."""
    return f"/{ROOT}/{namespace}/instances/{service}/{instance}"


def models_prefix(namespace: str) -> str:
    """The prefix of all model cards."""
    return f"/{ROOT}/{namespace}/models/"


def model_key(namespace: str, model: str, instance: str) -> str:
    """The key of the card of one instance serving a model."""
    return f"/{ROOT}/{namespace}/models/{escape(model)}/{instance}"


# --- every service


def control(namespace: str, service: str, instance: str) -> str:
    """Where one process answers Ping."""
    return f"{ROOT}.{namespace}.{service}.{instance}.control"
