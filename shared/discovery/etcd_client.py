"""A connection to etcd: every call has a deadline, every error becomes DiscoveryDown or LeaseGone.

After an error the connection is closed, and the next call makes a new one: to a random endpoint, with a new login, and
without gRPC's memory of failures. The caller decides how soon the next call comes.

It runs in the event loop on the library's generated stubs. Its own client is synchronous and took seven threads and
twice the idle CPU. The price: a loop that stands still for 0.8 of a TTL loses its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from random import SystemRandom
from typing import Any, TypeVar

import grpc
import grpc.aio
from etcd3 import etcdrpc

from shared.errors import ConfigError, DiscoveryDown
from shared.socket_path import reachable

CALL_TIMEOUT_S = 2.0
MESSAGE_LIMIT_BYTES = 16 << 20
"""The maximum size of an answer; a slow machine can receive it within a call's deadline. One key always fits, since
etcd accepts requests up to 1.5 MiB."""

rpc: Any = etcdrpc
"""etcd's messages and stubs: generated code, whose types are not written down."""

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new connection shares nothing with the one that failed
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LeaseGone(DiscoveryDown):
    """etcd does not know the lease: it has ended."""


class EtcdConnection:
    """A channel to one endpoint. Its calls raise grpc.RpcError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.auth = rpc.AuthStub(channel)
        self.kv = rpc.KVStub(channel)
        self.lease = rpc.LeaseStub(channel)
        self.maintenance = rpc.MaintenanceStub(channel)
        self.watch = rpc.WatchStub(channel)
        self.metadata: tuple[tuple[str, str], ...] = ()
        """The token of the login; it goes as metadata, since gRPC refuses call credentials without TLS."""

    async def ask(self, method: Callable[..., Any], request: object) -> Any:
        """Return the one answer of a stub's method."""
        return await method(request, timeout=CALL_TIMEOUT_S, metadata=self.metadata)


class EtcdClient:
    """One connection for one call at a time, since an error of one call closes it for all.

    `endpoints` are host:port or unix:PATH. `failed` is called for each call that etcd did not answer.
    """

    def __init__(self, endpoints: Sequence[str], user: str, password: str, failed: Callable[[], None]) -> None:
        self._endpoints = [_split(endpoint) for endpoint in endpoints]
        if not self._endpoints:
            raise ConfigError("discovery: no etcd endpoint given")
        if bool(user) != bool(password):
            raise ConfigError("discovery: etcd needs a user and a password, or neither")
        self._user = user
        self._password = password
        self._failed = failed
        self._calling = asyncio.Lock()
        self._connection: EtcdConnection | None = None
        self._opened = AsyncExitStack()
        """The channel, and the directories that it needs open."""
        self._away = False

    async def call(self, operation: Callable[[EtcdConnection], Awaitable[T]]) -> T:
        """Run `operation` on the connection, and log an outage once.

        Raise LeaseGone or DiscoveryDown; etcd may still apply a failed call.
        """
        async with self._calling:
            try:
                if self._connection is None:
                    self._connection = await self._connect()
                answer = await operation(self._connection)
            except (grpc.aio.AioRpcError, OSError) as wrong:
                await self.close()
                error = self._error(wrong)
                if not self._away:
                    self._away = True
                    _log.warning("%s; the last known view stays in use", error)
                raise error from None
        if self._away:
            self._away = False
            _log.info("etcd answers again")
        return answer

    async def close(self) -> None:
        """Drop the connection; a later call makes a new one."""
        self._connection = None
        await self._opened.aclose()

    async def _connect(self) -> EtcdConnection:
        host, port = SystemRandom().choice(self._endpoints)
        channel = grpc.aio.insecure_channel(f"{host}:{reachable(port, self._opened, in_url=True)}", _OPTIONS)
        self._opened.push_async_callback(channel.close)
        connection = EtcdConnection(channel)
        if self._user:
            login = rpc.AuthenticateRequest(name=self._user, password=self._password)
            connection.metadata = (("token", (await connection.ask(connection.auth.Authenticate, login)).token),)
        return connection

    def _error(self, wrong: grpc.aio.AioRpcError | OSError) -> DiscoveryDown:
        if isinstance(wrong, grpc.aio.AioRpcError) and wrong.code() is grpc.StatusCode.NOT_FOUND:
            return LeaseGone(f"etcd: {wrong.details()}")
        self._failed()
        if isinstance(wrong, TimeoutError):
            return DiscoveryDown("etcd: closed a connection that did not answer")
        return DiscoveryDown(f"etcd: {wrong.details() if isinstance(wrong, grpc.aio.AioRpcError) else wrong}")


def _split(endpoint: str) -> tuple[str, str]:
    """Split an endpoint into a host and a port, or `unix` and a path; gRPC accepts them joined by a colon."""
    if endpoint.startswith("unix:"):
        path = endpoint.removeprefix("unix:").removeprefix("//")
        if not path:
            raise ConfigError(f"discovery.endpoints: {endpoint!r} has no path")
        return "unix", path
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(f"discovery.endpoints: {endpoint!r} is neither host:port nor unix:PATH")
    return host, port
