"""The frontend's settings."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from services.frontend.tool_parsers.parser import FormatName, ReasoningName
from shared.config import ServiceConfig, check_hosts
from shared.runtime.origin import ANY_ORIGIN

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{1,31}://([a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?")
_INT32_MAX = (1 << 31) - 1
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
SomeSeconds = Annotated[float, Meta(gt=0, le=86400)]


class HttpConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP port for clients; /live, /health and /metrics are on it too."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port number; 0 picks a free port. Discovery shows its address."""
    reuse_port: bool = False
    """Whether other frontends on this machine may listen on the same port; the kernel spreads connections over them."""
    connections: Positive = 10_000
    """Largest number of connections at the same time. At the limit, the one that is idle longest is closed; if none is
    idle, a new one gets 503. The process's limit of open files also applies."""
    idle_s: SomeSeconds = 75.0
    """Seconds that a connection may be idle. The default is longer than that of proxies and clients, so that they close
    connections first."""
    header_s: SomeSeconds = 10.0
    """Seconds that a request's line and headers may take from their first byte; then 408."""
    body_timeout_s: SomeSeconds = 30.0
    """Seconds that a client may take to send a request's body; then 408."""
    unread_s: SomeSeconds = 30.0
    """Seconds that a client may leave its answer unread; then its connection is closed."""
    silent_s: Seconds = 5.0
    """Longest time, in seconds, that a stream is silent: then it gets a comment, or what its API has for that. Its
    headers are sent after half a second without text; an error after that is an event in place of a status. 0 if
    headers come with the first text, and no comments."""
    drain_delay_s: Seconds = 0.0
    """Seconds after SIGTERM in which the port still accepts connections while /health says 503, so that a load balancer
    notices. `limits.drain_s` follows."""
    tls_cert: str = ""
    """Path of a PEM file with the certificate chain; the port then speaks only TLS 1.2 or newer. Read again when it
    changes. Empty means no TLS."""
    tls_key: str = ""
    """Path of the PEM file with the certificate's key, without a passphrase."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call this API, such as `https://example.org`; `*`: any. Empty if none but its own."""
    hosts: tuple[str, ...] = ()
    """Host names by which clients reach this port, in addition to addresses, localhost and names without a dot. Counts
    only if no key is needed and `host` is a loopback address, or if this is not empty: other names then get 403."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for settings that contradict each other."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key need each other")
        for origin in self.cors_origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                wrong = f"{origin} is neither * nor an origin such as https://example.org, http://x:3000 or app://x"
                raise ValueError(f"cors_origins: {wrong}")
        check_hosts(self.hosts)


class UiConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The page at /ui, which shows the fleet."""

    serve: Literal["auto", "off", "api", "port"] = "auto"
    """Where the page is: at the API's port (api), at a port of its own (port), or nowhere (off). auto: at the API's
    port, unless the API needs keys."""
    host: str = "127.0.0.1"
    """Address of the page's own port."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    """Number of the page's own port; 0 picks a free port, which the log shows."""
    pages: Positive = 16
    """Largest number of pages that are open at the same time; one more gets 503."""
    hosts: tuple[str, ...] = ()
    """Host names by which browsers may reach the page, in addition to `http.hosts`, addresses, localhost and names
    without a dot. If the API needs keys, any name is accepted."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for a name that no browser asks for."""
        check_hosts(self.hosts)

    def place(self, *, keys: bool) -> Literal["off", "api", "port"]:
        """Return where the page is; `keys`: whether the API needs them."""
        if self.serve == "auto":
            return "off" if keys else "api"
        return self.serve


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How much one frontend accepts. Beyond the first four limits clients get 429 with Retry-After, before more is
    done. A request that is alone is never too large for them."""

    requests: Natural = 4096
    """Largest number of requests at the same time; a request counts once its body is complete."""
    body_bytes: Natural = 512 << 20
    """Largest number of bytes of request bodies held at the same time, partial bodies included. Pictures that wait to
    be sent count too, with their base64."""
    tokenising_bytes: Natural = 32 << 20
    """Largest number of bytes of bodies that wait to be tokenised; at one microsecond
    a token, the default takes a core about 8 seconds."""
    tokens: Natural = 64 << 20
    """Largest number of tokens of all running requests, prompts and longest outputs together; the default is `requests`
    times 16,384. It limits this process's memory; `wait_s` and the workers' queues limit the fleet's load."""
    choices: Positive = 128
    """Largest number of choices of one request over all prompts; beyond it 400. Each counts as one of `requests`."""
    inputs_at_once: Positive = 64
    """Largest number of inputs of one request for embeddings that workers compute at once. Each counts as one
    of `requests`."""
    unasked: Natural = 256
    """Largest number of requests over NATS at the same time without `stream` and without the header Headrace-Probe.
    Their clients cannot be asked whether they still listen, so clients that are gone can keep workers busy with this
    many."""
    grammars: Natural = 64
    """Largest number of grammars that wait to be compiled at the same time; beyond it 429."""
    images: Natural = 64
    """Largest number of requests whose images wait to be fetched or decoded at the same time; beyond it 429."""
    wait_s: Seconds = 60.0
    """Seconds that a request may wait for earlier ones: it gets 429 if no worker is predicted to begin it by then, or
    if its worker has not. The time that its own prompt takes does not count. 0 disables the check."""
    asleep_s: SomeSeconds = 180.0
    """Seconds that a request waits until its model is awake, if models take turns on a device; then 503."""
    deadline_s: SomeSeconds = 600.0
    """Seconds from the complete body of a request to its last token, if its client sets no deadline; then 504."""
    deadline_most_s: SomeSeconds = 3600.0
    """Longest deadline, in seconds, that a client may ask for."""
    first_token_s: SomeSeconds = 300.0
    """Seconds that a client waits for its first token, over all attempts; also for the next token after an attempt with
    tokens was lost. Then 504."""
    stall_s: SomeSeconds = 30.0
    """Seconds without a token after which an attempt that had tokens continues on another worker."""
    attempts: Positive = 3
    """Number of fruitless attempts in a row after which a request fails. It also fails when one more attempt than this,
    counted in all, ends with its engine or worker. Attempts whose whole worker is lost before a token are counted
    apart: four times as many are allowed."""
    rescue_s: Seconds = 20.0
    """Seconds for which a request that lost an attempt asks again while no worker can be chosen, or NATS is away."""
    select_timeout_s: SomeSeconds = 0.25
    """Seconds that one router may take before another is asked."""
    offer_timeout_s: SomeSeconds = 2.0
    """Seconds that a worker may take to accept or refuse a request."""
    quiet_s: SomeSeconds = 1.0
    """Seconds of silence after which an attempt is looked up in its worker's load reports."""
    frozen_s: SomeSeconds = 10.0
    """Seconds after which an attempt continues elsewhere if its worker is silent, or its engine makes no progress."""
    drain_s: Seconds = 20.0
    """Seconds that running requests may continue after SIGTERM."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for limits that contradict each other."""
        for less, more in (("deadline_s", "deadline_most_s"), ("quiet_s", "frozen_s"), ("quiet_s", "stall_s")):
            if getattr(self, less) > getattr(self, more):
                raise ValueError(f"{less} of {getattr(self, less):g} is more than {more} of {getattr(self, more):g}")


class AccessConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Access to the API, over HTTP and NATS."""

    keys_file: str = ""
    """Path of the file with names, hashes and limits of API keys; read again when it changes. Empty means no keys."""
    min_priority: Annotated[int, Meta(ge=-_INT32_MAX, le=_INT32_MAX)] = 0
    """Lowest `priority` that a request may ask for, if it has no key or its key sets none; lower is served earlier, and
    a request that asks for none has 0, or this if it is higher."""


class PickerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The endpoint picker: a gateway asks over gRPC, by Envoy's ext_proc, which attached server gets a request. The
    port has no keys: only gateways should reach it, or only they have a certificate that `tls_ca` has signed."""

    host: str = "127.0.0.1"
    """Address of the port."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port number; 0 means no picker. Frontends of one machine share it if `http.reuse_port` is on."""
    endpoints: Annotated[int, Meta(ge=1, le=16)] = 1
    """Largest number of endpoints in an answer, best first. More than 1 needs a gateway that tries them in turn; one
    whose cluster is of the type ORIGINAL_DST reads no list."""
    streams: Positive = 4096
    """Largest number of requests of gateways that are open at once; beyond it 429."""
    body_s: SomeSeconds = 30.0
    """Seconds that a gateway may take to send a request; then 408."""
    unseen_s: Seconds = 1.0
    """Seconds after the headers of a streamed answer for which its prompt counts as not computed yet, if the gateway
    does not show the answer's text; also for which the load stays reserved, if the gateway ends its stream there."""
    tls_cert: str = ""
    """Path of a PEM file with the certificate chain; the port then speaks only TLS 1.2 or newer. Read again when it
    changes. Empty means no TLS."""
    tls_key: str = ""
    """Path of the PEM file with the certificate's key, without a passphrase."""
    tls_ca: str = ""
    """Path of a PEM file with authorities; a gateway must then show a certificate that one of them has signed. Read
    again when it changes. Empty means that none is asked for."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for files of TLS that need each other."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key need each other")
        if self.tls_ca and not self.tls_cert:
            raise ValueError("tls_ca needs tls_cert and tls_key")

    @property
    def tls_files(self) -> dict[str, str]:
        """The files of TLS by their settings; none without TLS."""
        named = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        return {f"picker.{name}": file for name, file in named.items() if file}


class TextServersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Servers that take and give text alone, to which this frontend sends requests itself (docs/route.md)."""

    api_key_file: str = ""
    """Path of a file with these servers' API key; read again for each request. Empty if they need none."""
    ca_file: str = ""
    """Path of a PEM file with the authorities of their https certificates. Empty means those of the system."""
    client_cert: str = ""
    """Path of a PEM file with the certificate that is shown to a server which asks for one. Empty if there is none."""
    client_key: str = ""
    """Path of a PEM file with the key of `client_cert`, without a passphrase."""
    connect_s: SomeSeconds = 5.0
    """Seconds within which a server accepts a connection; then another one is tried."""
    idle_s: SomeSeconds = 60.0
    """Seconds for which an answer that has begun may be silent. It is ended after this time, or twice of it at most."""
    ignore_salts: bool = False
    """Whether requests that ask for a cache of their own, by their key's `salt` or the header X-Cache-Salt, are served.
    These servers' caches are shared by all, so such requests get 403 otherwise."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for settings that contradict each other."""
        if bool(self.client_cert) != bool(self.client_key):
            raise ValueError("client_cert and client_key need each other")


class ResponsesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Responses that one frontend keeps in memory, to be continued (`previous_response_id`) and retrieved. At a limit,
    the least recently used one is removed, of the key that has the most."""

    kept: Natural = 4096
    """Largest number of responses."""
    kept_bytes: Natural = 256 << 20
    """Largest number of bytes of their conversations and bodies."""
    kept_s: SomeSeconds = 3600.0
    """Seconds that a response is kept after it was made, continued or retrieved last."""


class ImagesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Images in requests, for models that take them (docs/images.md)."""

    hosts: tuple[str, ...] = ()
    """Hosts from which images are fetched whose URL is sent in place of their data: names, or names with a port. Their
    addresses must be public. Empty means that images come as data alone."""
    bytes: Positive = 16 << 20
    """Largest number of bytes of one image's file. A request's body is bounded by itself."""
    pixels: Annotated[int, Meta(ge=1, le=1 << 26)] = 1 << 25
    """Largest number of pixels of one image, width times height."""
    most: Positive = 16
    """Largest number of images in one request."""
    fetch_s: SomeSeconds = 10.0
    """Seconds that fetching one image may take, redirects included."""
    prepared_bytes: Natural = 64 << 20
    """Most bytes of prepared pixels that are kept for later turns of chats. The least recently used go first. 0 means
    that each turn decodes all of its images."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for a host that is no name."""
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"hosts: {host!r} is neither a name such as img.example.org nor one with a port")


class MediaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Files of pictures and videos that are kept for their clients (docs/pictures.md)."""

    directory: str = ""
    """Path of the directory with the files. Frontends that share it serve one another's files. Empty means that none
    are kept: then pictures come as base64 alone, and there are no videos."""
    bytes: Positive = 8 << 30
    """Largest number of bytes of all files together; beyond it 429."""
    kept_s: SomeSeconds = 86400.0
    """Seconds that a file is kept after it was written."""
    jobs: Positive = 256
    """Largest number of videos that are not made yet, of all keys and all frontends of the directory; beyond it 429."""
    jobs_of_key: Positive = 32
    """Largest number of them of one API key."""
    job_s: SomeSeconds = 3600.0
    """Seconds that a video may take from its request on, its wait for other videos included; then it has failed."""
    base_url: str = ""
    """Base URL of the files, without /v1, as clients reach it. Empty means the address at which this frontend
    listens."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for a URL that is none."""
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {self.base_url}, not an http or https URL")


class FrontendConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True):
    """The settings of one frontend process.

    The port of `observe` answers however many connections clients hold, and for one process even if several share the
    HTTP port.
    """

    http: HttpConfig = HttpConfig()
    access: AccessConfig = AccessConfig()
    limits: LimitsConfig = LimitsConfig()
    responses: ResponsesConfig = ResponsesConfig()
    ui: UiConfig = UiConfig()
    picker: PickerConfig = PickerConfig()
    text: TextServersConfig = TextServersConfig()
    images: ImagesConfig = ImagesConfig()
    media: MediaConfig = MediaConfig()
    access_log: bool = False
    """Whether each request has a line in the log. Those that fail in the service, with 500 or more, always have one."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What to do with fields of a request that have no effect: ignore them, count them, and name them in the header
    X-Headrace-Ignored; or refuse them with 400."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Sampling parameters of requests that do not set them: those that the model recommends (generation_config.json),
    or OpenAI's (temperature 1, top_p 1)."""
    default_max_tokens: Natural = 0
    """Largest number of tokens of a chat's answer, if the request does not limit it. 0 means what is left of the
    context."""
    schema_objects: Literal["closed", "open"] = "closed"
    """Whether an object of a JSON Schema has only the properties that it declares, if the schema does not say: closed,
    as OpenAI's strict mode demands; open, by the letter of JSON Schema."""
    models: dict[str, str] = field(default_factory=dict)
    """Model name → directory with its tokenizer, that counts instead of the worker's."""
    expected_models: Annotated[tuple[str, ...], Meta(max_length=256)] = ()
    """Names of models that workers will bring: a request for one that is not known yet waits for it, up to 30 seconds,
    and then gets 503 in place of 404."""
    tool_parser: dict[str, FormatName | Literal["auto", "none"]] = field(default_factory=dict)
    """Model name → format of its tool calls, if its chat template does not show it. None means no requests with
    tools."""
    reasoning_parser: dict[str, ReasoningName | Literal["auto", "none"]] = field(default_factory=dict)
    """Model name → whether its reasoning is separated from its answer; auto: if its chat template has reasoning."""
