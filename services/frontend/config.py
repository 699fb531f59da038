"""The frontend's settings."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.frontend.tool_parsers.formats import FormatName, ReasoningName
from shared.config import DiscoveryConfig, NatsConfig, ObserveConfig

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"https?://[a-z0-9.-]{1,253}(:[0-9]{1,5})?|https?://\[[0-9a-f:.]{2,45}\](:[0-9]{1,5})?")
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
SomeSeconds = Annotated[float, Meta(gt=0, le=86400)]


def check_origin(origin: str) -> None:
    """Raises ValueError where no browser would ever send it."""
    if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
        raise ValueError(f"cors_origins: {origin} is neither * nor an origin, as https://example.org or http://x:3000")


class HttpConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where clients come in; /live, /health and /metrics are on the same port too."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0 picks a free port; it stands in the address book."""
    reuse_port: bool = False
    """Whether other frontends of this machine may listen on the same port: the kernel spreads connections."""
    connections: Positive = 10_000
    """At once; at the bound the one idle longest makes room, and where none is idle, a new one is answered 503. Never
    more than the process may open files, less those that it needs itself."""
    idle_s: SomeSeconds = 75.0
    """How long a connection may be without a request; more than proxies and clients keep theirs, so that they close
    it and not we."""
    header_s: SomeSeconds = 10.0
    """How long a request's line and headers may take, from their first byte; then 408."""
    body_timeout_s: SomeSeconds = 30.0
    """How long a client may take to send its request's body; then 408."""
    unread_s: SomeSeconds = 30.0
    """How long a client may leave waiting what it should read of its answer; then its connection is ended."""
    drain_delay_s: Seconds = 0.0
    """How long the port goes on accepting connections after SIGTERM, while /health says 503: time for a balancer to
    notice. It comes before `limits.drain_s`."""
    tls_cert: str = ""
    """A PEM file, with the chain: then the port speaks TLS (1.2 or newer) alone. Read again when it changes."""
    tls_key: str = ""
    """The PEM file of its key, without a passphrase."""
    cors_origins: tuple[str, ...] = ()
    """Whose pages a browser may let ask, as `https://example.org`; `*`: any. Empty: no page of another origin."""

    def __post_init__(self) -> None:
        """Raises ValueError, which becomes a ConfigError."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key need each other")
        for origin in self.cors_origins:
            check_origin(origin)


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What one frontend takes on. Beyond the first four bounds clients get 429 with Retry-After, before more is done;
    a request that is alone is never too large for them."""

    requests: Natural = 4096
    """At once, from the moment their bodies are there."""
    body_bytes: Natural = 512 << 20
    """Of the bodies of all requests, as far as they have come."""
    tokenising_bytes: Natural = 32 << 20
    """Of the bodies that wait to be tokenised: at a microsecond a token some 8 seconds of a core."""
    tokens: Natural = 64 << 20
    """Prompts, and what their answers may come to, of all running requests: `requests` of 16,384 each. It keeps this
    process's memory; workers' queues and `wait_s` keep the fleet's, whose size it need not know."""
    choices: Positive = 128
    """That one request may want, of all its prompts, each of which counts as one of `requests`; beyond it: 400."""
    inputs_at_once: Positive = 64
    """Of one request for embeddings: what it asks of workers at the same time, each counting as one of `requests`."""
    unasked: Natural = 256
    """At once, requests over NATS whose clients cannot be asked whether they listen: without `stream` and without the
    header Headrace-Probe. Clients that have gone can keep workers busy by so many."""
    wait_s: Seconds = 60.0
    """A request for whose first token every worker is predicted to need longer gets 429 too, and so does one that has
    waited so long at workers and was not begun; 0: none."""
    deadline_s: SomeSeconds = 600.0
    """Of a request whose client asks for none, from the moment its body is there to its last token; then 504."""
    deadline_most_s: SomeSeconds = 3600.0
    """The longest that a client may ask for."""
    first_token_s: SomeSeconds = 300.0
    """How long a client waits for its first token, over all attempts, or for the next one after an attempt that had
    brought some was lost; then 504."""
    stall_s: SomeSeconds = 30.0
    """An attempt that has brought tokens and then brings none for so long goes on elsewhere."""
    attempts: Positive = 3
    """Attempts in a row that may bring no token, and attempts in all that may end with their worker, but for one. Of
    those that were gone with their whole worker before they brought a token, four times as many."""
    rescue_s: Seconds = 20.0
    """How long a request that lost an attempt asks again while no worker can be chosen, or NATS is away."""
    select_timeout_s: SomeSeconds = 0.25
    """How long one router may take before another is asked."""
    offer_timeout_s: SomeSeconds = 2.0
    """How long a worker may take to accept or refuse."""
    quiet_s: SomeSeconds = 1.0
    """An attempt that nothing was heard of for so long is looked for in its worker's load reports."""
    frozen_s: SomeSeconds = 10.0
    """An attempt goes on elsewhere when its worker is silent, or its engine stands still, for so long."""
    drain_s: Seconds = 20.0
    """How long running requests may go on after SIGTERM."""

    def __post_init__(self) -> None:
        """Raises ValueError, which becomes a ConfigError, on limits that contradict one another."""
        for less, more in (("deadline_s", "deadline_most_s"), ("quiet_s", "frozen_s"), ("quiet_s", "stall_s")):
            if getattr(self, less) > getattr(self, more):
                raise ValueError(f"{less} of {getattr(self, less):g} is more than {more} of {getattr(self, more):g}")


class AccessConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Who may ask, at both doors."""

    keys_file: str = ""
    """Names of keys, their hashes and limits, read again when it changes. Empty: no key is asked for."""


class ResponsesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Responses that one frontend keeps in memory, for `previous_response_id` and for who asks for them again. At a
    bound the one used least recently goes, of the key that has the most."""

    kept: Natural = 4096
    kept_bytes: Natural = 256 << 20
    """Of their conversations and bodies."""
    kept_s: SomeSeconds = 3600.0
    """Since it was made, continued or asked for last."""


class FrontendConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One frontend process."""

    namespace: str = "default"
    nats: NatsConfig = NatsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    observe: ObserveConfig = ObserveConfig()
    """Its own /live, /health and /metrics: they answer however many connections clients hold, and where processes share
    a port these are one process's."""
    http: HttpConfig = HttpConfig()
    access: AccessConfig = AccessConfig()
    limits: LimitsConfig = LimitsConfig()
    responses: ResponsesConfig = ResponsesConfig()
    models: dict[str, str] = {}
    """Model name → directory with its tokenizer, where the path in the worker's card is not valid on this machine."""
    tool_parser: dict[str, FormatName | Literal["auto", "none"]] = {}
    """Model name → the format that it writes calls of tools in, where its chat template does not show it; none: no
    requests with tools."""
    reasoning_parser: dict[str, ReasoningName | Literal["auto", "none"]] = {}
    """Model name → whether its thinking is told from its answer; auto: where its chat template knows of thinking."""
