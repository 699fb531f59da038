"""Settings: a TOML file < the environment < flags, as one frozen Struct for each service.

The Struct is the schema: a nested Struct is a TOML table. The field `url` of the table `nats` is

    [nats]                       HEADRACE_NATS_URL=…          --nats-url …
    url = "…"

Unknown keys, flags and HEADRACE_ variables are refused, and so is a value of the wrong type. Secrets (fields named
`password` or `token`) come from the file, the environment, or a file that HEADRACE_…_FILE names; never from a flag,
since every user sees flags in `ps`. This is the only module that reads the process's environment.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo, fields

from shared.errors import ConfigError

# Before gRPC is imported: it prints a line of its own for each failed handshake with etcd, whose error says the same.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

PREFIX = "HEADRACE_"
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")
SECRETS = ("password", "token")
"""The names of fields that no flag sets."""

# --- tables that several services have


class NatsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The connection to NATS."""

    url: str = "nats://127.0.0.1:4222"
    """The server's URL, or those of a cluster, separated by commas: nats://host:port, or tls://host:port if the system,
    or the file that the variable SSL_CERT_FILE names, has the authority of its certificate."""
    user: str = ""
    password: str = ""
    password_file: str = ""
    """The path of a file with the password, in place of `password`. It is read for each new connection, as all files of
    this table are."""
    nkey_file: str = ""
    """The path of a file with the NKey seed of a user (SU…), in place of `user`."""
    creds_file: str = ""
    """The path of a file with the JWT and the NKey seed of a user, as `nsc` writes it, in place of `user`."""
    tls_ca: str = ""
    """The path of a PEM file with the authority whose servers are believed, in place of the system's. Each connection
    then uses TLS, whatever the URL says."""
    tls_cert: str = ""
    """The path of a PEM file with our certificate, for servers that ask for one."""
    tls_key: str = ""
    """The path of a PEM file with its key, without a passphrase."""
    payload_limit_bytes: int = 4 << 20
    """The maximum size of a payload in bytes, at most the server's max_payload."""
    inbox: str = "_INBOX"
    """The prefix of our inboxes. It must differ from that of clients, if clients may read their own inboxes."""


class DiscoveryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The back end in which instances are published."""

    backend: str = "etcd"
    """The back end: etcd, or file (for one machine)."""
    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    """The endpoints of etcd: one or more host:port, https://host:port with TLS, or unix:PATH for a socket."""
    path: str = ".headrace/discovery"
    """The directory of the file back end."""
    user: str = ""
    password: str = ""
    password_file: str = ""
    """The path of a file with the password, in place of `password`. It is read for each new connection, as all files of
    this table are."""
    tls_ca: str = ""
    """The path of a PEM file with the authority whose servers are believed, in place of those that gRPC brings. Each
    connection to a port then uses TLS."""
    tls_cert: str = ""
    """The path of a PEM file with our certificate, for servers that ask for one."""
    tls_key: str = ""
    """The path of a PEM file with its key, without a passphrase."""
    lease_ttl_s: float = 10.0
    """The TTL of a lease in etcd, in seconds; at least 2."""


def check_hosts(hosts: Iterable[str]) -> None:
    """Raise ValueError for an entry of a setting `hosts` that equals no header `Host`, such as a URL."""
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(f"hosts: {host} is no host name such as llm.example, without scheme, port and path")


class ObserveConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The address of /live, /health and /metrics, and of KV events. A frontend serves them on its API's port too."""

    host: str = "127.0.0.1"
    port: int = 0
    """The port; 0 picks a free one, which the address book shows."""
    events: str = ""
    """The directory of sockets for KV events, for processes of this machine that may enter it. Empty if KV events use
    ports of `host`."""
    events_curve: bool = False
    """Whether KV events at a port are encrypted by CURVE: only who can read the address book can read them then. It has
    no effect on sockets, on events over NATS, and on what attached servers publish."""
    events_plane: Literal["zmq", "nats", "jetstream"] = "zmq"
    """The way of this process's KV events to routers: zmq, its own port or socket; nats, a subject of NATS; jetstream,
    the same, and a stream of NATS keeps them for replays. Routers follow each process on its plane, whatever theirs
    is."""
    events_stream_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 256 << 20
    """The maximum size in bytes of the stream of the plane jetstream, in the memory of nats-server, for all processes
    of the namespace. A process that starts with another size changes it. A stream that you made keeps its own."""
    hosts: tuple[str, ...] = ()
    """Host names by which scrapers reach this port, in addition to addresses, localhost and names without a dot. Counts
    only if `host` is a loopback address, or if this is not empty: other names then get 403."""
    url_file: str = ""
    """The file to which the base URL is written, for a health check that must find the port. Empty if there is none."""
    log_level: str = "info"
    """The least level that is logged: debug, info, warning or error. `headrace log` changes it at run time."""
    log_format: Literal["text", "json"] = "text"
    """The form of a line: text, `name=value` pairs; json, one object."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for a name that no client asks for."""
        check_hosts(self.hosts)


class TraceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Traces of requests by OpenTelemetry; this needs the packages of the extra `otel`. `sample`,
    `clients` and `clients_per_s` have an effect at frontends alone, which decide what is traced."""

    endpoint: str = ""
    """The URL to which spans are sent as OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces. Empty if tracing is
    off."""
    token: str = ""
    """The bearer token for the endpoint. Empty if there is none."""
    queue: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    """The maximum number of spans that wait to be sent; further ones are dropped."""
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 10.0
    """The time in seconds that the endpoint has to take a batch of spans; then the batch is lost."""
    sample: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """The share of requests that are traced, 0 to 1."""
    clients: Literal["follow", "ignore"] = "follow"
    """Whether a client's header `traceparent` decides if its request is traced: follow, or ignore its decision."""
    clients_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 10.0
    """The maximum number of requests a second that are traced because their clients ask for it; `sample` decides about
    those beyond."""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, for an endpoint that is no URL."""
        if not self.endpoint:
            return
        address = urlsplit(self.endpoint)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"endpoint: {self.endpoint} is not a URL such as http://127.0.0.1:4318/v1/traces")


class ServiceConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that every service has."""

    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Setting that an earlier version had → what to do instead, for the error of a configuration that still has it."""
    namespace: str = "default"
    nats: NatsConfig = NatsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    observe: ObserveConfig = ObserveConfig()
    trace: TraceConfig = TraceConfig()


C = TypeVar("C", bound=Struct)
_PLACE = re.compile(r"(?P<said>.*) - at (?:`key` in )?`\$\.(?P<setting>[^`]+)`", re.DOTALL)


def load(
    schema: type[C],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> C:
    """Load the settings of one service.

    `flags` are words `--table-field value` or `--table-field=value`, also written `--table.field`; `--config FILE`
    names the file. Raise ConfigError with the key and its origin.
    """
    environ = os.environ if environ is None else environ
    given, file = _parse_flags(schema, flags, file)
    settings: dict[str, Any] = {}
    if file is not None:
        settings = _read(file)
        _check_keys(schema, settings, str(file))
    for path, value in _from_environment(schema, environ):
        _set(settings, path, value)
    for path, value in given:
        _set(settings, path, value)
    try:
        return msgspec.convert(settings, schema, strict=False)
    except msgspec.ValidationError as wrong:
        faults = _faults(schema, settings, _named(str(wrong)))
        raise ConfigError("\n".join(f"{schema.__name__}: {fault}" for fault in faults)) from None


def _named(message: str) -> str:
    """Return msgspec's message with the setting first: `limits.requests: Expected …`, not `Expected … - at …`."""
    found = _PLACE.fullmatch(message)
    if found is None:
        return message
    said, setting = found["said"], found["setting"]
    is_size = setting.endswith("_bytes") and said.endswith("got `str`")
    return f"{setting}: {said}" + ("; write a whole number of bytes" if is_size else "")


def environment() -> dict[str, str]:
    """Return a copy of the process's environment, for a child process."""
    return dict(os.environ)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as wrong:
        raise ConfigError(f"{file}: {wrong.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{file}: {wrong}") from None


def _leaves(schema: type[Struct], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield every setting of a schema with its path, also those in tables."""
    for field in fields(schema):
        path = (*above, field.name)
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            yield from _leaves(field.type, path)
        else:
            yield path, field


def _check_keys(schema: type[Struct], settings: Mapping[str, Any], where: str, above: str = "") -> None:
    known = {field.name: field.type for field in fields(schema)}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {above}{key}; {_instead(schema, key, known)}")
        table = known[key]
        if isinstance(table, type) and issubclass(table, Struct):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {above}{key} is a table")
            _check_keys(table, value, where, f"{above}{key}.")
        elif get_origin(table) is dict and not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {above}{key} is a table")


NAMES_SHOWN = 8
"""The maximum number of names in an error; with more, it refers to `--help`."""
MOST_SHOWN = 64
"""The maximum number of characters of a wrong word in an error."""


def _instead(schema: type[Struct], name: str, known: Iterable[str]) -> str:
    """Return what to do instead of a setting that was removed, or what an unknown name may be meant to be: the nearest
    names, or all if they are few."""
    setting = name.removeprefix(PREFIX).strip("-").replace("-", "_").lower()
    removed: Mapping[str, str] = getattr(schema, "REMOVED", {})
    if setting in removed:
        return removed[setting]
    import difflib  # imported here, since only a mistake needs it

    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(names)}" if len(names) <= NAMES_SHOWN else "`--help` lists them all"


def _faults(schema: type[Struct], settings: Mapping[str, Any], said: str) -> list[str]:
    """Return what msgspec `said` of the first fault, then a line of each other setting that has a word which is not
    allowed. msgspec's error names only the setting, so the allowed words are added."""
    others = list[str]()
    for path, field in _leaves(schema):
        choices, value = literal_values(field.type), settings
        for name in path:
            value = value.get(name, {})
        given = value.values() if isinstance(value, Mapping) else (value,)
        wrong = [word for word in given if isinstance(word, str) and word not in choices]
        if choices and wrong:
            setting, allowed = ".".join(path), ", ".join(choices)
            if re.match(rf"{re.escape(setting)}(\[\S*)?: ", said):
                said += f"; {setting} is one of {allowed}"
            else:
                others.append(f"{setting}: {wrong[0][:MOST_SHOWN]!r} is not one of {allowed}")
    return [said, *others]


def literal_values(kind: Any) -> tuple[str, ...]:
    """Return the words of a Literal, or of a union of Literals."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(word for part in get_args(kind) for word in literal_values(part))


def _from_environment(schema: type[Struct], environ: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    known = {PREFIX + "_".join(path).upper(): (path, field) for path, field in _leaves(schema)}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name in known:
            path, field = known[name]
            yield path, _value(field, text)
        elif name.endswith("_FILE") and name[:-5] in known and known[name[:-5]][0][-1] in SECRETS:
            try:
                yield known[name[:-5]][0], Path(text).read_text(encoding="utf-8").strip()
            except OSError as wrong:
                raise ConfigError(f"{name}: {text}: {wrong.strerror}") from None
            except UnicodeDecodeError:  # the text of this error would show the secret
                raise ConfigError(f"{name}: {text}: not UTF-8") from None
        else:
            raise ConfigError(f"unknown environment variable {name}; {_instead(schema, name, known)}")


def _parse_flags(
    schema: type[Struct], flags: Sequence[str], file: Path | None
) -> tuple[list[tuple[tuple[str, ...], Any]], Path | None]:
    known = {"--" + "-".join(path).replace("_", "-"): (path, field) for path, field in _leaves(schema)}
    given: list[tuple[tuple[str, ...], Any]] = []
    words = iter(flags)
    for word in words:
        typed, equals, text = word.partition("=")
        name = typed.replace(".", "-").replace("_", "-")
        entry = None if name in known else _entry(typed, known)
        if name != "--config" and name not in known and entry is None:
            names = [flag if name == typed else "--" + ".".join(path) for flag, (path, _) in known.items()]
            names = [each for each in names if not each.endswith(SECRETS)]
            raise ConfigError(f"{typed}: no such setting; {_instead(schema, typed, ['--config', *names])}")
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"{name} needs a value")
            text = following
        if name == "--config":
            file = Path(text)
            continue
        if entry is not None:
            if entry[-1].endswith(SECRETS):
                raise ConfigError(f"{typed}: set a secret in the file or the environment, since `ps` shows flags")
            given.append((entry, text))
            continue
        path, field = known[name]
        if path[-1] in SECRETS:
            raise ConfigError(f"{name}: set a secret in the file or the environment, since `ps` shows flags")
        given.append((path, _value(field, text)))
    return given, file


def _entry(flag: str, known: Mapping[str, tuple[tuple[str, ...], FieldInfo]]) -> tuple[str, ...] | None:
    """Return the path of one entry of a table of any values, such as --vllm.max_num_seqs. None if there is no such
    table."""
    table, dot, name = flag.partition(".")
    path, field = known.get(table.replace("_", "-"), ((), None))
    if not dot or field is None or get_origin(field.type) is not dict or get_args(field.type)[1] is not Any:
        return None
    return (*path, name)


def _value(field: FieldInfo, text: str) -> Any:
    """Convert a setting's text to a TOML value. Tuples are comma-separated, or written as in TOML: `[1, 2]`. NAME=VALUE
    pairs of a table of names are comma-separated."""
    kind = get_origin(get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type)
    if kind not in (tuple, list, dict):
        return text
    if kind is not dict and text.strip().startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as wrong:
            raise ConfigError(f"{field.name}: {text[:128]!r} is not a list such as [1, 2]: {wrong}") from None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if kind is not dict:
        return parts
    for part in parts:
        if "=" not in part:
            raise ConfigError(f"{field.name}: {part!r} is not NAME=VALUE")
    return dict(part.split("=", 1) for part in parts)


def _set(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for table in path[:-1]:
        settings = settings.setdefault(table, {})
    settings[path[-1]] = value
