"""Settings: a TOML file < the environment < flags, into one frozen Struct a service.

The Struct is the schema: a nested Struct is a TOML table. The field `url` of the table `nats` is

    [nats]                       HEADRACE_NATS_URL=…          --nats-url …
    url = "…"

Unknown keys, flags and HEADRACE_ variables are refused, as is a value of the wrong type. Secrets (fields named
`password` or `token`) come from the file or the environment, or from a file that HEADRACE_…_FILE names; never from a
flag, which everyone sees in `ps`.
This is the only module that reads the process's environment.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import FieldInfo, fields

from shared.errors import ConfigError

PREFIX = "HEADRACE_"
SECRETS = ("password", "token")
"""Names of fields that no flag sets."""

# --- tables that several services have


class NatsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach NATS."""

    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: str = ""
    payload_limit_bytes: int = 4 << 20
    """Ours, below the server's max_payload."""
    inbox: str = "_INBOX"
    """What the subjects of our own inboxes begin with; another one than clients', where clients may read theirs."""


class DiscoveryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where instances are published."""

    backend: str = "etcd"
    """etcd, or file (one machine)."""
    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    """etcd's host:port, one or several; unix:PATH for a socket."""
    path: str = ".headrace/discovery"
    """Directory of the file back end."""
    user: str = ""
    password: str = ""
    lease_ttl_s: float = 10.0


class ObserveConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process serves its /live, /health and /metrics (a frontend does so on its API's port too)."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free port; it stands in the address book."""
    events: str = ""
    """A directory: KV events are published at sockets in it, for this machine's processes that may enter it; empty: at
    ports of `host`."""
    url_file: str = ""
    """The base URL is written to this file, for a health check that must find the port; empty: it is not."""
    log_level: str = "info"


C = TypeVar("C", bound=Struct)


def load(
    schema: type[C],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> C:
    """The settings of one service.

    `flags` are `--table-field value` (or `=value`) words, also written `--table.field`; `--config FILE` among them
    names the file.
    Raises ConfigError, naming the key and where it came from.
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
        raise ConfigError(f"{schema.__name__}: {wrong}{_choices(schema, settings)}") from None


def environment() -> dict[str, str]:
    """A copy of the process's environment, for a child that is started with it."""
    return dict(os.environ)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as wrong:
        raise ConfigError(f"{file}: {wrong.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{file}: {wrong}") from None


def _leaves(schema: type[Struct], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every setting of a schema with its path, tables walked through."""
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
            raise ConfigError(f"{where}: unknown key {above}{key}; {_instead(key, known)}")
        table = known[key]
        if isinstance(table, type) and issubclass(table, Struct):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {above}{key} is a table")
            _check_keys(table, value, where, f"{above}{key}.")


NAMES_SHOWN = 8
"""More are `--help`'s to list."""


def _instead(name: str, known: Iterable[str]) -> str:
    """What an unknown name may have been meant to be: the nearest ones, or all where there are few."""
    import difflib  # here: a start without a mistake need not wait for it

    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(names)}" if len(names) <= NAMES_SHOWN else "`--help` lists them all"


def _choices(schema: type[Struct], settings: Mapping[str, Any]) -> str:
    """What may be said instead of words that are none of a setting's; msgspec names the setting alone."""
    said = ""
    for path, field in _leaves(schema):
        choices, value = words(field.type), settings
        for name in path:
            value = value.get(name, {})
        given = value.values() if isinstance(value, Mapping) else (value,)
        if choices and any(isinstance(word, str) and word not in choices for word in given):
            said += f"; {'.'.join(path)} is one of {', '.join(choices)}"
    return said


def words(kind: Any) -> tuple[str, ...]:
    """Of a Literal, or of several that are one type together."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(word for part in get_args(kind) for word in words(part))


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
            except UnicodeDecodeError:  # whose text would show the secret
                raise ConfigError(f"{name}: {text}: not UTF-8") from None
        else:
            raise ConfigError(f"unknown environment variable {name}; {_instead(name, known)}")


def _parse_flags(
    schema: type[Struct], flags: Sequence[str], file: Path | None
) -> tuple[list[tuple[tuple[str, ...], Any]], Path | None]:
    known = {"--" + "-".join(path).replace("_", "-"): (path, field) for path, field in _leaves(schema)}
    given: list[tuple[tuple[str, ...], Any]] = []
    words = iter(flags)
    for word in words:
        typed, equals, text = word.partition("=")
        name = typed.replace(".", "-").replace("_", "-")
        if name != "--config" and name not in known:
            names = [flag if name == typed else "--" + ".".join(path) for flag, (path, _) in known.items()]
            names = [each for each in names if not each.endswith(SECRETS)]
            raise ConfigError(f"{typed}: no such setting; {_instead(typed, ['--config', *names])}")
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"{name} needs a value")
            text = following
        if name == "--config":
            file = Path(text)
            continue
        path, field = known[name]
        if path[-1] in SECRETS:
            raise ConfigError(f"{name}: secrets come from the file or the environment, flags show in `ps`")
        given.append((path, _value(field, text)))
    return given, file


def _value(field: FieldInfo, text: str) -> Any:
    """A setting's text as TOML would have it: tuples are comma-separated, and so are the NAME=VALUE of a table of
    names; the rest is converted by type."""
    kind = get_origin(field.type)
    if kind not in (tuple, list, dict):
        return text
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
