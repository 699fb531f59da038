"""A connection to etcd: every call has a deadline, every error becomes DiscoveryDown or LeaseGone.

After an error the connection is closed, and the next call makes a new one: to the next endpoint, with a new login, the
files of that moment, and without gRPC's memory of failures. The caller decides how soon the next call comes.

A login costs etcd some 60 ms of processor time, unless its bcrypt-cost is lower, and etcd goes on with it when its
client has given up. After an outage all processes log in at once, so each has the more patience the more often it was
in vain: 150 clients that give up after two seconds each do not get in at all.

It runs in the event loop on the library's generated stubs. Its own client is synchronous and took seven threads and
twice the idle CPU. The price: a loop that stands still for 0.8 of a TTL loses its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from random import SystemRandom
from typing import Any, TypeVar

import grpc
import grpc.aio
from etcd3 import etcdrpc

from shared.config import DiscoveryConfig
from shared.discovery.etcd_access import EtcdAccess, check_settings, describe_fault, read_access, split_endpoint
from shared.errors import ConfigError, DiscoveryDown
from shared.file_reads import READ_LIMIT_S, FileReads
from shared.server_order import ServerOrder
from shared.socket_path import reachable

CALL_TIMEOUT_S = 2.0
LOGIN_TIMEOUT_S = 60.0
"""The longest time for a login in seconds, to which CALL_TIMEOUT_S doubles with each login in a row that was too
slow."""
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

_LED = (("hasleader", "true"),)
"""Metadata: a member that is cut off from the cluster's leader must say so, and not show what it knew before."""

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
        self.metadata: tuple[tuple[str, str], ...] = _LED
        """Metadata of each call. It has the token of the login, since gRPC refuses call credentials without TLS."""

    async def ask(self, method: Callable[..., Any], request: object) -> Any:
        """Return the one answer of a stub's method."""
        return await method(request, timeout=CALL_TIMEOUT_S, metadata=self.metadata)


class EtcdClient:
    """One connection for one call at a time, since an error of one call closes it for all.

    `failed` is called for each call that etcd did not answer. Raise ConfigError.
    """

    def __init__(self, config: DiscoveryConfig, failed: Callable[[], None]) -> None:
        check_settings(config)
        self._config = config
        self._order = ServerOrder(config.endpoints, SystemRandom())
        self._failed = failed
        self._calling = asyncio.Lock()
        self._connection: EtcdConnection | None = None
        self._opened = AsyncExitStack()
        """The channel, and the directories that it needs open."""
        self._reads = FileReads()
        self._login_s = CALL_TIMEOUT_S
        """The time that the next login may take."""
        self._away: set[str] = set()
        """The endpoints that failed since one answered."""

    async def call(self, operation: Callable[[EtcdConnection], Awaitable[T]]) -> T:
        """Run `operation` on the connection, and log an outage once.

        Raise LeaseGone or DiscoveryDown; etcd may still apply a failed call.
        """
        async with self._calling:
            try:
                if self._connection is None:
                    self._connection = await self._connect()
                answer = await operation(self._connection)
            except (grpc.aio.AioRpcError, OSError, ConfigError) as wrong:
                await self.close()
                endpoint = self._order.current
                error = self._error(wrong, endpoint)
                self._order.failed()
                if endpoint not in self._away:
                    self._away.add(endpoint)
                    _log.warning("%s; the last known view stays in use", error)
                raise error from None
        if self._away:
            self._away.clear()
            _log.info("etcd answers again")
        return answer

    async def close(self) -> None:
        """Drop the connection; a later call makes a new one."""
        self._connection = None
        await self._opened.aclose()

    async def _connect(self) -> EtcdConnection:
        endpoint = self._order.current
        host, port = split_endpoint(endpoint)
        target = f"{host}:{reachable(port, self._opened, in_url=True)}"
        tls, user, password = await self._read_access(endpoint)
        if tls is None:
            channel = grpc.aio.insecure_channel(target, _OPTIONS)
        else:
            channel = grpc.aio.secure_channel(target, tls, _OPTIONS)
        self._opened.push_async_callback(channel.close)
        connection = EtcdConnection(channel)
        if user:
            login = rpc.AuthenticateRequest(name=user, password=password)
            connection.metadata = (*_LED, ("token", await self._log_in(connection, login)))
        return connection

    async def _log_in(self, connection: EtcdConnection, login: object) -> str:
        """Return the token of a login."""
        try:
            answer = await connection.auth.Authenticate(login, timeout=self._login_s, metadata=_LED)
        except grpc.aio.AioRpcError as wrong:
            slow = wrong.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self._login_s = min(2 * self._login_s, LOGIN_TIMEOUT_S) if slow else CALL_TIMEOUT_S
            raise
        self._login_s = CALL_TIMEOUT_S
        return str(answer.token)

    async def _read_access(self, endpoint: str) -> EtcdAccess:
        """Read the files of this moment."""
        try:
            return await self._reads.read(partial(read_access, self._config, endpoint))
        except TimeoutError:
            files = "discovery.tls_ca, tls_cert, tls_key and password_file"
            raise ConfigError(f"{files}: not read in {READ_LIMIT_S:g} s") from None

    def _error(self, wrong: grpc.aio.AioRpcError | OSError | ConfigError, endpoint: str) -> DiscoveryDown:
        if isinstance(wrong, grpc.aio.AioRpcError) and wrong.code() is grpc.StatusCode.NOT_FOUND:
            return LeaseGone(f"etcd: {wrong.details()}")
        self._failed()
        if isinstance(wrong, TimeoutError):
            return DiscoveryDown(f"etcd at {endpoint}: closed a connection that did not answer")
        if isinstance(wrong, grpc.aio.AioRpcError):
            return DiscoveryDown(f"etcd at {endpoint}: {describe_fault(wrong.details() or '', self._config, endpoint)}")
        return DiscoveryDown(f"etcd at {endpoint}: {wrong}")
