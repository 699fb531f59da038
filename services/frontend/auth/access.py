"""Checks API keys against the keys file, which is reloaded when it changes. Without a keys file no key is needed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from services.frontend.auth.accounts import Account, Accounts
from services.frontend.auth.file_reload import FileReloader
from services.frontend.config import AccessConfig
from services.frontend.metrics import Metrics
from shared.api_keys import FILE_LIMIT_BYTES, KeyEntry, read_keys
from shared.errors import InvalidRequest

_log = logging.getLogger(__name__)

HEADER = "Authorization"
"""The header that carries the key, over HTTP and over NATS: `Authorization: Bearer KEY`."""


class Authenticator:
    """Finds the account of each request by its API key; one a frontend."""

    def __init__(self, config: AccessConfig, metrics: Metrics) -> None:
        self._file = Path(config.keys_file) if config.keys_file else None
        self._metrics = metrics
        self._accounts = Accounts()

    @property
    def requires_key(self) -> bool:
        """Whether requests need a key."""
        return self._file is not None

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Read the keys file now, and in a task whenever it changes. Raise ConfigError."""
        if self._file is None:
            return
        self._metrics.register_accounts(self._accounts)
        keys = FileReloader(
            f"access.keys_file {self._file}",
            [self._file],
            FILE_LIMIT_BYTES,
            lambda contents: read_keys(contents[0]),
            self._use,
            self._metrics.stale_files.labels("keys"),
        )
        await keys.start(tasks, "reload the keys file")

    def authenticate(self, authorization: str | None) -> Account | None:
        """Return the account whose key the header carries; None if no key is needed. Raise InvalidRequest with 401."""
        if self._file is None:
            return None
        try:
            return self._accounts.authenticate(authorization)
        except InvalidRequest as wrong:
            self._metrics.unauthorized.labels("unknown" if wrong.code else "missing").inc()
            raise

    def _use(self, entries: dict[str, KeyEntry]) -> None:
        if not entries:
            _log.warning("access.keys_file %s has no entry: every request will be refused", self._file)
        self._accounts.replace(entries, asyncio.get_running_loop().time())
