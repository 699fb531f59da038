"""The frontend's settings."""

from __future__ import annotations

from msgspec import Struct

from shared.config import DiscoveryConfig, NatsConfig


class HttpConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where clients come in; /live, /health and /metrics are on the same port."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 picks a free port; it stands in the address book."""
    body_timeout_s: float = 30.0
    """How long a client may take to send its request's body."""
    unread_s: float = 30.0
    """How long a client of a stream may leave waiting what it should read; then its connection is ended."""


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What one frontend takes on."""

    requests: int = 4096
    """At once; more are answered 429 with Retry-After."""
    body_bytes: int = 512 << 20
    """Of the bodies of all running requests; a chunked body counts as the longest allowed. More are answered 429."""
    deadline_s: float = 600.0
    """Of every request, from the moment its body is there to its last token."""
    select_timeout_s: float = 0.25
    """How long one router may take before another is asked."""
    offer_timeout_s: float = 2.0
    """How long a worker may take to accept or refuse."""
    quiet_s: float = 1.0
    """An attempt that nothing was heard of for so long is looked for in its worker's load reports."""
    frozen_s: float = 10.0
    """An attempt goes on elsewhere when its worker is silent, or its engine stands still, for so long."""
    drain_s: float = 20.0
    """How long running requests may go on after SIGTERM."""


class FrontendConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One frontend process."""

    namespace: str = "default"
    log_level: str = "info"
    nats: NatsConfig = NatsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    http: HttpConfig = HttpConfig()
    limits: LimitsConfig = LimitsConfig()
    models: dict[str, str] = {}
    """Model name → directory with its tokenizer, where the path in the worker's card is not valid on this machine."""
