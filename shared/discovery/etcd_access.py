"""Credentials towards etcd, and which servers we believe. The files are read for each new connection."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import grpc

from shared.config import DiscoveryConfig
from shared.errors import ConfigError
from shared.outbound import TlsFiles, TlsNames, read_tls
from shared.secret_file import read_secret

TLS_NAMES = TlsNames("discovery.tls_ca", "discovery.tls_cert", "discovery.tls_key")
_HTTPS = "https://"
_UNVERIFIED = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:;\n]+)|Hostname Verification Check failed")
_ALERT = re.compile(r"\w+_ALERT_(\w+)")
_USER = ("authentication", "user name", "permission denied", "invalid auth token")
"""Words of etcd when it refuses a user."""


class EtcdAccess(NamedTuple):
    """What one connection needs. User and password are empty if there is no login."""

    tls: grpc.ChannelCredentials | None
    user: str
    password: str


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Split an endpoint into a host and a port, or `unix` and a path; gRPC accepts them joined by a colon. Raise
    ConfigError."""
    if endpoint.startswith("unix:"):
        path = endpoint.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ConfigError(f"discovery.endpoints: {endpoint!r} has no path")
        return "unix", path
    if "@" in endpoint:
        raise ConfigError("discovery.endpoints: no user in an endpoint: set discovery.user and discovery.password")
    host, _, port = endpoint.removeprefix(_HTTPS).rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(f"discovery.endpoints: {endpoint!r} is none of host:port, https://host:port and unix:PATH")
    return host, port


def read_credentials(config: DiscoveryConfig, endpoint: str) -> grpc.ChannelCredentials | None:
    """Return the TLS towards an endpoint; None if there is none. Raise ConfigError, which names the setting."""
    files = TlsFiles(config.tls_ca, config.tls_cert, config.tls_key)
    if endpoint.startswith("unix:") or (files == TlsFiles() and not endpoint.startswith(_HTTPS)):
        return None
    read_tls(files, TLS_NAMES, protocols=())  # finds what is wrong with the files, in one line
    return grpc.ssl_channel_credentials(
        *(_content(path) for path in (files.ca_file, files.client_key, files.client_cert))
    )


def read_login(config: DiscoveryConfig) -> tuple[str, str]:
    """Return user and password, both empty if there is no login. Raise ConfigError, which names the setting."""
    password = config.password
    if config.password_file:
        password = read_secret(config.password_file, "discovery.password_file")
    if bool(config.user) != bool(password):
        raise ConfigError("discovery: etcd needs a user and a password, or neither")
    return config.user, password


def read_access(config: DiscoveryConfig, endpoint: str) -> EtcdAccess:
    """Read the files that a connection to an endpoint needs. Raise ConfigError, which names the setting."""
    return EtcdAccess(read_credentials(config, endpoint), *read_login(config))


def check_settings(config: DiscoveryConfig) -> None:
    """Raise ConfigError if an endpoint is invalid, or a file that the settings name cannot be used."""
    if not config.endpoints:
        raise ConfigError("discovery: no etcd endpoint given")
    for endpoint in config.endpoints:
        split_endpoint(endpoint)
        read_access(config, endpoint)


def describe_fault(said: str, config: DiscoveryConfig, endpoint: str) -> str:
    """Return what gRPC or etcd `said` of a failed call, in one line that names the setting to change if it is known."""
    said = " ".join(said.split())
    if found := _UNVERIFIED.search(said):
        why = found[1] or "it is not a certificate of that host"
        return f"its certificate is refused: {why}; discovery.tls_ca names an authority"
    if found := _ALERT.search(said):
        alert = found[1].replace("_", " ").lower()
        return f"it refuses our certificate ({alert}): set discovery.tls_cert and discovery.tls_key"
    encrypted = endpoint.startswith(_HTTPS) or bool(config.tls_ca or config.tls_cert)
    if encrypted and "Handshake read failed" in said:
        return (
            "it ends the handshake, as a server does that speaks no TLS: see discovery.endpoints and discovery.tls_ca"
        )
    if not encrypted and "Socket closed" in said:
        return f"{said}; if it speaks TLS, set discovery.tls_ca"
    if any(word in said for word in _USER):
        return f"{said}: set discovery.user and discovery.password"
    return said


def _content(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
