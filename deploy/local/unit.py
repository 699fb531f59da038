"""`headrace unit`: writes a systemd unit that runs a service from this checkout or package.

ExecStart        the program and settings that the service itself has just checked
EnvironmentFile  secrets, which are neither in the unit nor in what `ps` shows
SIGTERM          to the service alone, which drains, ends its engine and then itself; SIGKILL to what is left
status 2         settings or model are wrong: no restart; any other end: a restart
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.local.stack.check import CHECK_SETTINGS, LIMIT_S, translated
from deploy.local.stack.stack import SERVICE_DRAIN_S, ServiceName, Setting
from shared.config import PREFIX, environment
from shared.errors import ConfigError
from shared.installation import service_program

USER = "headrace"
"""The user of all services: a worker and the kvbm of its machine must have the same."""
DRAINS = ("drain_s", "limits.drain_s", "http.drain_delay_s")
"""The settings by which a service takes longer to stop."""
WRITTEN = ("cache", "discovery.path", "disk.directory", "kvbm.pool", "observe.events", "pool.directory")
"""The settings that name directories in which a service writes."""
HARDENED = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "UMask=0077",
)
OF_SYSTEM = (
    "CapabilityBoundingSet=",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectHome=read-only",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectSystem=strict",
)
"""Lines that a systemd of one user cannot carry out."""


def unit(service: ServiceName, words: Sequence[str], *, of_user: bool) -> str:
    """Return the unit. `words` are NAME=VALUE. Raise ConfigError; a wrong setting has the service's own message."""
    settings = [_setting(word) for word in words]
    command = [*service_program(service), *(f"--{name}={value}" for name, value in settings)]
    _check(service, command)
    return "\n".join(_lines(service, command, dict(settings), of_user=of_user)) + "\n"


def _setting(word: str) -> Setting:
    name, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"[a-z][a-z0-9_.]*", name):
        raise ConfigError(f"unit: {word}: not NAME=VALUE, such as limits.requests=64")
    if not value.isprintable():
        raise ConfigError(f"unit: {name}: {value!r} has characters that no unit can have")
    if name in WRITTEN and value and not Path(value).is_absolute():
        raise ConfigError(f"unit: {name}: {value}: a unit needs an absolute path")
    return name, str(Path(value).absolute()) if name == "config" else value


def _check(service: ServiceName, command: Sequence[str]) -> None:
    """Let the service check its settings. Those of its environment are not known here."""
    variables = {name: value for name, value in environment().items() if not name.startswith(PREFIX)}
    try:
        checked = subprocess.run(
            [*command, CHECK_SETTINGS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            env=variables,
        )
    except (OSError, subprocess.TimeoutExpired) as wrong:
        raise ConfigError(f"unit: {command[0]} does not run: {wrong}") from None
    if checked.returncode != 0:
        said = translated(service, checked.stderr, aside="\n")  # no path has it: files are called by their own names
        raise ConfigError(said or f"{service}: its check ended with status {checked.returncode}")


def _lines(service: str, command: Sequence[str], settings: Mapping[str, str], *, of_user: bool) -> Iterator[str]:
    """Yield the lines of the unit."""
    yield from (f"# headrace-{service}.service; docs/operations.md says how to use it", "[Unit]")
    yield f"Description=Headrace {service}"
    yield from ("Wants=network-online.target", "After=network-online.target", "StartLimitIntervalSec=0", "")
    yield from ("[Service]", "Type=exec", f"ExecStart={' '.join(map(_quoted, command))}")
    yield f"EnvironmentFile=-%E/headrace/{service}.env"
    yield "Environment=GRPC_ENABLE_FORK_SUPPORT=0"
    yield from ("StateDirectory=headrace", "StateDirectoryMode=0700", "WorkingDirectory=%S/headrace")
    yield from ("Restart=always", "RestartSec=2", "RestartPreventExitStatus=2")
    yield from ("KillMode=mixed", "KillSignal=SIGTERM", f"TimeoutStopSec={_stop_s(settings):g}")
    if not of_user:
        yield from (f"User={USER}", "LimitNOFILE=65536")
    if service in ("worker", "kvbm") and not of_user:
        yield "LimitMEMLOCK=infinity"
    elif not of_user:
        yield from ("PrivateDevices=yes", "ProtectClock=yes")  # either would take the GPUs away
    yield from HARDENED
    if not of_user:
        yield from OF_SYSTEM
        yield from (f"ReadWritePaths={_quoted(f'-{settings[name]}', '')}" for name in WRITTEN if settings.get(name))
    yield from ("", "[Install]", f"WantedBy={'default' if of_user else 'multi-user'}.target")


def _quoted(word: str, variables: str = "$") -> str:
    """Return a word as systemd reads it: no specifiers, one word, and no variables, where a line may have some."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), (variables, 2 * variables)):
        word = word.replace(plain, escaped) if plain else word
    return word if re.fullmatch(r"[\w@:,.+/=-]+", word) else f'"{word}"'


def _stop_s(settings: Mapping[str, str]) -> float:
    """Return the seconds from SIGTERM to SIGKILL: more than the service takes to drain at most."""
    known = {**_drains_of_file(settings.get("config", "")), **settings}
    return SERVICE_DRAIN_S + sum(float(known.get(name, 0)) for name in DRAINS)


def _drains_of_file(config: str) -> dict[str, Any]:
    """Return the settings of DRAINS in a settings file, which the service has checked."""
    if not config:
        return {}
    content = tomllib.loads(Path(config).read_text(encoding="utf-8"))
    tables = {"": content, "limits.": content.get("limits", {}), "http.": content.get("http", {})}
    return {f"{table}{name}": value for table, values in tables.items() for name, value in values.items()}
