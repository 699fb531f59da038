"""One thread's connection to etcd: every call has a deadline, every error becomes DiscoveryDown or LeaseGone.

After an error the connection is closed, and the next call makes a new one: to a random endpoint, with a new login, and
without gRPC's memory of failures. The caller decides how soon the next call comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import grpc
from etcd3 import Endpoint, MultiEndpointEtcd3Client
from etcd3.exceptions import Etcd3Exception

from shared.errors import ConfigError, DiscoveryDown
from shared.socket_path import reachable

CALL_TIMEOUT_S = 2.0
MESSAGE_LIMIT_BYTES = 16 << 20
"""The maximum size of an answer; a slow machine can receive it within a call's deadline. One key always fits, since
etcd accepts requests up to 1.5 MiB."""

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new connection shares nothing with the one that failed
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LeaseGone(DiscoveryDown):
    """etcd does not know the lease: it has ended."""


class EtcdClient:
    """One connection, used by one thread at a time.

    `endpoints` are host:port or unix:PATH. `failed` is called for each call that etcd did not answer.
    """

    def __init__(self, endpoints: Sequence[str], user: str, password: str, failed: Callable[[], None]) -> None:
        self._endpoints = [_split(endpoint) for endpoint in endpoints]
        if not self._endpoints:
            raise ConfigError("discovery: no etcd endpoint given")
        if bool(user) != bool(password):
            raise ConfigError("discovery: etcd needs a user and a password, or neither")
        self._user = user or None
        self._password = password or None
        self._failed = failed
        self._client: MultiEndpointEtcd3Client | None = None
        self._opened = ExitStack()
        """The directories that the connection needs open."""
        self._away = False

    def call(self, operation: Callable[[MultiEndpointEtcd3Client], T]) -> T:
        """Run `operation` on the connection. Raise LeaseGone or DiscoveryDown; etcd may still apply a failed call."""
        try:
            if self._client is None:
                self._client = self._connect()
            answer = operation(self._client)
        except (Etcd3Exception, grpc.RpcError, OSError) as wrong:
            self.close()
            cause = wrong if isinstance(wrong, grpc.Call) else wrong.__context__
            if isinstance(cause, grpc.Call) and cause.code() is grpc.StatusCode.NOT_FOUND:
                raise LeaseGone(f"etcd: {cause.details()}") from None
            self._failed()
            raise DiscoveryDown(f"etcd: {_why(wrong, cause)}") from None
        if self._away:
            self._away = False
            _log.info("etcd answers again")
        return answer

    def report(self, wrong: DiscoveryDown) -> None:
        """Log an outage once."""
        if not self._away:
            self._away = True
            _log.warning("%s; the last known view stays in use", wrong)

    def close(self) -> None:
        """Drop the connection; a later call makes a new one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._opened.close()

    def _connect(self) -> MultiEndpointEtcd3Client:
        client = MultiEndpointEtcd3Client(
            [
                Endpoint(host, reachable(port, self._opened, in_url=True), secure=False, time_retry=0, opts=_OPTIONS)
                for host, port in self._endpoints
            ],
            timeout=CALL_TIMEOUT_S,
            user=self._user,
            password=self._password,
        )
        # gRPC refuses call credentials on a connection without TLS; the token goes as metadata, as etcd reads it.
        client.call_credentials = None
        return client


def _why(wrong: Exception, cause: BaseException | None) -> str:
    if not isinstance(cause, grpc.Call):
        return str(wrong)
    if cause.code() is grpc.StatusCode.CANCELLED:
        return "closed a connection that did not answer"
    return str(cause.details())


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
