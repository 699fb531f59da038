"""Opens the discovery back end that the config names. It imports no other: the file back end needs no gRPC."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from shared.config import DiscoveryConfig
from shared.discovery.contract import Discovery
from shared.errors import ConfigError


def check_settings(config: DiscoveryConfig) -> None:
    """Raise ConfigError if an address is invalid, or a file that the settings name cannot be used."""
    if config.backend == "etcd":
        from shared.discovery import etcd_access

        etcd_access.check_settings(config)


def open_discovery(config: DiscoveryConfig, registry: CollectorRegistry | None = None) -> Discovery:
    """Open the back end, in a running event loop. Raise ConfigError. A back end that is away is not an error."""
    match config.backend:
        case "etcd":
            from shared.discovery.etcd import EtcdDiscovery

            return EtcdDiscovery(config, registry=registry)
        case "file":
            from shared.discovery.file import FileDiscovery

            return FileDiscovery(Path(config.path))
        case _:
            raise ConfigError(f"discovery: unknown backend {config.backend!r}; known: etcd, file")
