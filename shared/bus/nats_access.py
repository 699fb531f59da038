"""Credentials towards NATS, and which servers we believe. The files are read for each new connection."""

from __future__ import annotations

import re
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

import nats.errors

from shared.bus.nats_key import NatsKey
from shared.bus.nats_servers import server_urls, without_password
from shared.config import NatsConfig
from shared.errors import ConfigError
from shared.outbound import TlsFiles, TlsNames, describe_fault, read_tls
from shared.secret_file import read_secret

TLS_NAMES = TlsNames("nats.tls_ca", "nats.tls_cert", "nats.tls_key")
_JWT = re.compile(r"-+BEGIN NATS USER JWT-+\s+(\S+)\s+-+END")
_SEED = re.compile(r"-+BEGIN USER NKEY SEED-+\s+(\S+)\s+-+END")
_CERTIFICATE = ("certificate", "unknown ca", "handshake failure")
"""Words of an alert by which a server refuses our certificate."""


class NoTls(nats.errors.Error):
    """The server speaks no TLS, and we must not speak anything else."""


class NatsAccess(NamedTuple):
    """What one connection needs."""

    password: str
    key: NatsKey | None
    jwt: str
    tls: ssl.SSLContext | None


def read_access(config: NatsConfig) -> NatsAccess:
    """Read the files. Raise ConfigError, which names the setting."""
    ways = [name for name in ("user", "nkey_file", "creds_file") if getattr(config, name)]
    if len(ways) > 1:
        raise ConfigError(
            " and ".join(f"nats.{name}" for name in ways) + ": a connection has one user; set one of them"
        )
    password, key, jwt = config.password, None, ""
    if config.password_file:
        password = read_secret(config.password_file, "nats.password_file")
    if config.nkey_file:
        key = _key(read_secret(config.nkey_file, "nats.nkey_file"), "nats.nkey_file", config.nkey_file)
    if config.creds_file:
        text = read_secret(config.creds_file, "nats.creds_file")
        found, seed = _JWT.search(text), _SEED.search(text)
        if found is None or seed is None:
            raise ConfigError(f"nats.creds_file {config.creds_file}: it has not both a user's JWT and an NKey seed")
        jwt, key = found[1], _key(seed[1], "nats.creds_file", config.creds_file)
    tls = read_tls(TlsFiles(config.tls_ca, config.tls_cert, config.tls_key), TLS_NAMES, protocols=())
    return NatsAccess(password, key, jwt, tls)


def check_settings(config: NatsConfig) -> None:
    """Raise ConfigError if a URL is invalid, or a file that the settings name cannot be used."""
    server_urls(config.url)
    read_access(config)


def refusal_text(wrong: Exception, config: NatsConfig, url: str) -> str:
    """Return why the server `url` refuses us, or we refuse it, and which setting to change. Empty for another error,
    such as a server that is away."""
    shown = without_password(url)
    if isinstance(wrong, ConfigError):
        return str(wrong)
    if isinstance(wrong, NoTls):
        return f"NATS at {shown} speaks no TLS: nats.url or nats.tls_ca asks for it"
    if isinstance(wrong, ssl.SSLError):
        said = describe_fault(wrong, TLS_NAMES.ca_file)
        ours = said.startswith("TLS: ") and any(word in said for word in _CERTIFICATE)
        mend = f"; it refuses our certificate: set {TLS_NAMES.client_cert} and {TLS_NAMES.client_key}" if ours else ""
        return f"NATS at {shown}: {said}{mend}"
    said = str(wrong)
    if not any(word in said.lower() for word in ("authorization violation", "authentication")):
        return ""
    return f"NATS at {shown} refuses {_client(config, url)} ({said}): {_remedy(config)}"


def _client(config: NatsConfig, url: str) -> str:
    if config.nkey_file or config.creds_file:
        return "the user of our key"
    user = config.user or urlsplit(url).username
    return f"user {user!r}" if user else "a connection without a user"


def _remedy(config: NatsConfig) -> str:
    if config.nkey_file or config.creds_file:
        name = "nkey_file" if config.nkey_file else "creds_file"
        return f"change nats.{name} {config.nkey_file or config.creds_file}, or that user in the server's settings"
    if config.password_file:
        return f"set nats.user, and change nats.password_file {config.password_file}"
    return "set nats.user and nats.password (HEADRACE_NATS_USER, HEADRACE_NATS_PASSWORD)"


def _key(seed: str, setting: str, path: str) -> NatsKey:
    try:
        return NatsKey(seed)
    except ValueError as wrong:
        raise ConfigError(f"{setting} {path}: no NKey seed of a user: {wrong}") from None
