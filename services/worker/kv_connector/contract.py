"""What an engine says to its machine's kvbm, and what it hears. Pure.

KVConnector ── KvbmAsk ──▶ SocketClient ──▶ kvbm
            ◀── KvbmUp, KvbmDown, KvbmReply ──
"""

from __future__ import annotations

from msgspec import Struct

from services.worker.contracts.messages import KvbmOperation


class KvbmAsk(Struct, frozen=True):
    """A request to the kvbm. Each KvbmReply is an answer; the last one is marked `last`."""

    number: int
    """Names the request; its answers carry the same number."""
    operation: KvbmOperation
    payload: bytes
    """The request as `shared.messages.kvbm` encodes it."""
    timeout_s: float = 0.0
    """Seconds to wait for each answer. 0 stands for the connector's usual time."""
    trace: str = ""
    """The `traceparent` of the attempt that waits for a fetch. Empty if it is not traced, or if no attempt waits."""


class KvbmUp(Struct, frozen=True):
    """A kvbm serves the pool's directory now: attach to it."""

    kvbm: str
    """The kvbm's instance id."""
    namespace: str = ""
    """The kvbm's namespace. Empty if it does not say it."""


class KvbmDown(Struct, frozen=True):
    """No kvbm can be reached. Slots that one held for this engine may soon belong to another engine."""

    reason: str


class KvbmReply(Struct, frozen=True):
    """One answer to the KvbmAsk of this number."""

    number: int
    payload: bytes
    last: bool = True
    """No other answer to the KvbmAsk follows."""
    failed: str = ""
    """Why there is no payload: no answer came in time, or there is no kvbm. The kvbm may have done what was asked."""


KvbmNews = KvbmUp | KvbmDown | KvbmReply
