"""Checks API keys against the keys file, which is reloaded when it changes. Without a keys file no key is needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.frontend.auth.accounts import Account, Accounts
from services.frontend.auth.file_reload import FileReloader
from services.frontend.config import AccessConfig
from services.frontend.metrics import Metrics
from shared.api_keys import FILE_LIMIT_BYTES, KeyEntry, read_keys
from shared.errors import InvalidRequest
from shared.metrics import counter, gauge, rows_of, scraped

_log = logging.getLogger(__name__)

HEADER = "Authorization"
"""The header that carries the key, over HTTP and over NATS: `Authorization: Bearer KEY`."""


class KeyMetrics(Collector):
    """The metrics of the API keys that their file has at the time of the scrape, with a series for each key."""

    # fmt: off
    requests = counter("headrace_key_requests", "key", "Accepted requests, by the name of their key")
    running = gauge("headrace_key_running_requests", "key",
        "Requests of the key that have arrived and not ended", "It is bounded by the key's `concurrency`.")
    tokens = counter("headrace_key_tokens", "key kind", "Tokens of requests that ended: prompt, output")
    refused = counter("headrace_key_refused_requests", "key reason",
        "Requests refused with 429 for a limit of their key: requests and tokens (per minute), concurrency, share "
        "(of what all keys have together)",
        "Raise the key's limit, or talk to its owner.")
    # fmt: on

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def describe(self) -> Iterator[Metric]:
        """Describe the metrics, so that a second one of the same name is refused."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        requests, running, tokens, refused = families = [scraped(row) for row in rows_of(KeyMetrics).values()]
        for name, account in self._accounts.by_name.items():
            requests.add_metric([name], account.requests)
            running.add_metric([name], account.running)
            tokens.add_metric([name, "prompt"], account.prompt_tokens)
            tokens.add_metric([name, "output"], account.output_tokens)
            for reason, count in account.refused.items():
                refused.add_metric([name, reason], count)
        yield from families


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
        self._metrics.registry.register(KeyMetrics(self._accounts))
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
