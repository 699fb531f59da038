"""TLS on the picker's port: its certificate, and that of gateways, read again when their files change.

    files ──FileReloader──▶ checked ──▶ the next handshake takes them, once ──▶ in use until the next ones

gRPC asks for a newer certificate at each handshake, in a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import grpc
from msgspec import Struct

from services.frontend.auth.file_reload import FileReloader
from services.frontend.config import PickerConfig
from services.frontend.metrics import Metrics
from services.frontend.server.tls import FILE_LIMIT_BYTES, tls_context


class _TlsContents(Struct, frozen=True):
    """The bytes of the files."""

    cert: bytes
    key: bytes
    authorities: bytes | None = None


class GatewayCredentials:
    """What the port's handshakes need."""

    def __init__(self, config: PickerConfig, metrics: Metrics) -> None:
        named = config.tls_files
        self._files = [Path(file) for file in named.values()]
        self._asks_gateways = bool(config.tls_ca)
        self._fresh: deque[_TlsContents] = deque(maxlen=1)
        """What the next handshake takes, if anything is new."""
        self._reloader = FileReloader(
            what=", ".join(map(" ".join, named.items())),
            files=self._files,
            limit_bytes=FILE_LIMIT_BYTES,
            parse=self._checked,
            use=self._fresh.append,
            stale=metrics.stale_files.labels("picker_tls"),
        )

    async def start(self, tasks: asyncio.TaskGroup) -> Any:
        """Read the files, and again whenever they change; return what a gRPC server takes. Raise ConfigError."""
        await self._reloader.start(tasks, "reload the picker's certificate")
        return grpc.dynamic_ssl_server_credentials(self._take(), self._take, self._asks_gateways)

    def _checked(self, contents: list[bytes]) -> _TlsContents:
        tls_context(*self._files)
        return _TlsContents(*contents)

    def _take(self) -> Any:
        """Return what is new; None if nothing is. gRPC owns each one from then on."""
        try:
            new = self._fresh.pop()
        except IndexError:
            return None
        return grpc.ssl_server_certificate_configuration([(new.key, new.cert)], new.authorities)
