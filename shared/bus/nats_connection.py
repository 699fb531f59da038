"""One connection to NATS through nats-py, and the work around nats-py's faults. `nats_bus.py` makes the connections.

These are the faults of nats-py 2.16, each with its remedy here:

- Its PING overtakes commands that wait to be sent, so `flush` and `drain` alone prove nothing: `sync`.
- Closing waits for the server to receive what is unsent, which a frozen server never does: `abort`.
- A forced flush swallows a cancellation: `wait_sent` never forces one. So may `connect`: a bus that closes cancels it
  until it has ended.
- A message whose header, subject or reply it cannot read ends its reading for good, while it still calls itself
  connected: `DirectClient`, `is_reading`.
- The answer to a flush that was cancelled ends its reading too: `DirectClient`.
- It tries a server twice that does not answer, and then says only that there is none: `DirectClient`.
- It sends the password unencrypted to a server without TLS, also if the URL says tls://: `DirectClient`.

docs/decisions/0021 gives the reasons.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as RemoteSubscription
from nats.aio.transport import TcpTransport

from shared.bus.contract import Message
from shared.bus.nats_access import NoTls, read_access
from shared.bus.nats_key import NatsKey
from shared.bus.nats_servers import server_urls
from shared.config import NatsConfig
from shared.errors import BusDown, ConfigError, HeadraceError, PayloadTooLarge, ProtocolError
from shared.file_reads import READ_LIMIT_S, FileReads

CONNECT_LIMIT_S = 2
PING_INTERVAL_S = 10
"""The time in seconds between two PINGs. A server that leaves three without an answer is given up."""
CLUSTER_PING_INTERVAL_S = 2
"""The time in seconds between two PINGs if there is another server to go to."""
UNSENT_LIMIT_BYTES = 2 << 20
WRITE_LIMIT_BYTES = 64 << 10
"""The maximum of unsent bytes in the socket's buffer."""
UNSENT_WAIT_S = 2.0
"""How long a publisher waits for the server to receive what is unsent, in seconds, before it gets BusDown."""
FAILURES = (nats.errors.Error, OSError, RuntimeError, ValueError, AttributeError, TypeError, LookupError)
"""The exceptions that nats-py raises. RuntimeError is uvloop's, for a closed socket; those after it come up if the peer
is not a NATS server."""

FAIR_SHARE = 128
"""The number of messages read before the event loop gets a turn. nats-py reads on while there is input, and thousands
of small messages took 28 ms."""

Take = Callable[[Message], None]

_log = logging.getLogger(__name__)


class DirectClient(Client):
    """A nats-py client that delivers a message in the same turn of the event loop in which it was read.

    nats-py itself uses a queue and a task for each subscription, which takes two turns more. This client also drops
    messages that nats-py cannot read: the server checks neither headers nor UTF-8, so any client may send such
    messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, Take] = {}
        self._share = 0
        self.lame_duck = False
        """Whether the server asks its clients to leave, because it will stop."""
        self.needs_tls = False
        """Whether the connection must be encrypted before anything is sent."""

    def send(self, subject: str, payload: bytes, reply: str) -> None:
        """Publish without headers. uvloop writes everything that is sent in one turn at once, at the end of the turn.

        nats-py itself uses five coroutines, a future and a task: four times the cost, and a turn later. It only gets
        what the socket does not accept now, and what must follow that; then `pending_data_size` grows.
        """
        if not self.is_connected:
            raise nats.errors.ConnectionClosedError
        command = b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload)
        assert isinstance(self._transport, TcpTransport)
        assert self._transport._io_writer is not None
        assert self._flush_queue is not None
        transport = self._transport._io_writer.transport
        if not (self._pending or transport.is_closing() or transport.get_write_buffer_size() > WRITE_LIMIT_BYTES):
            transport.write(command)
            return
        self._pending.append(command)
        self._pending_data_size += len(command)
        if self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def subscribe_direct(self, subject: str, take: Take, queue: str = "") -> RemoteSubscription:
        """Subscribe. `take` is called for each message; it must not raise, and must limit what it keeps."""

        async def passed_on(msg: Msg) -> None:  # a message that came before its `take` was registered
            take(Message(msg.subject, msg.data, msg.reply, msg.headers or {}))

        remote = await self.subscribe(subject, queue=queue, cb=passed_on)
        self._takers[remote._id] = take
        return remote

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        try:
            take = self._takers.get(sid)
            if take is None or sid not in self._subs:
                await super()._process_msg(sid, subject, reply, data, headers)
                return
            shown_headers = await self._process_headers(headers) if headers else None
            came = Message(subject.decode(), bytes(data), reply.decode() if reply else "", shown_headers or {})
        except (ValueError, TypeError, LookupError) as wrong:
            await self._error_cb(ProtocolError(f"dropped a message on {subject!r}: {wrong!r}"))
        else:
            take(came)
        self._share = (self._share + 1) % FAIR_SHARE
        if not self._share:
            await asyncio.sleep(0)

    def show_key(self, key: NatsKey) -> None:
        """Name this key to the server, which nats-py does only if it has read the key itself."""
        self._auth_configured = True
        self._public_nkey = key.public

    async def _select_next_server(self) -> None:
        """Try the one server once."""
        [server] = self._server_pool
        await self._connect_to_server(server)
        self._current_server = server

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Refuse a server without TLS before a password is sent, and use TLS that a server only offers."""
        if initial_connection and self.needs_tls:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise NoTls
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_pong(self) -> None:
        """Survive a PONG whose flush was cancelled: nats-py would end its reading."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def _process_disconnect(self) -> None:
        """Drop what is unsent. nats-py would still write it: uvloop raises then, and a frozen peer never receives
        it."""
        super()._process_disconnect()
        self.drop_unsent()

    def drop_unsent(self) -> None:
        """Drop everything that was to be sent on a lost connection."""
        self._pending, self._pending_data_size = [], 0

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        if sid not in self._subs:
            self._takers.pop(sid, None)


async def dial(
    client: DirectClient,
    config: NatsConfig,
    url: str,
    name: str,
    failed: Callable[[Exception], None],
    reads: FileReads,
) -> None:
    """Connect once, to the server `url` of `config`. `failed` is called for errors then and later. Raise one of
    FAILURES, or ConfigError."""
    try:
        access = await reads.read(partial(read_access, config))  # the system's authorities take 35 ms
    except TimeoutError:
        files = "nats.tls_ca, tls_cert, tls_key, password_file, nkey_file and creds_file"
        raise ConfigError(f"{files}: not read in {READ_LIMIT_S:g} s") from None
    client.needs_tls = access.tls is not None or urlsplit(url).scheme == "tls"
    key, jwt = access.key, access.jwt
    if key is not None:
        client.show_key(key)

    async def error(wrong: Exception) -> None:
        failed(wrong)

    async def leave() -> None:
        client.lame_duck = True

    await client.connect(
        url,
        name=name,
        inbox_prefix=config.inbox,  # of JetStream's answers
        user=config.user or None,
        password=access.password or None,
        signature_cb=None if key is None else key.sign,
        user_jwt_cb=jwt.encode if jwt else None,
        tls=access.tls,
        allow_reconnect=False,
        connect_timeout=CONNECT_LIMIT_S,
        ping_interval=CLUSTER_PING_INTERVAL_S if len(server_urls(config.url)) > 1 else PING_INTERVAL_S,
        pending_size=1 << 40,
        error_cb=error,
        lame_duck_mode_cb=leave,
    )


def is_reading(client: Client) -> bool:
    """Return whether the client is connected and reads what comes."""
    return client.is_connected and client._reading_task is not None and not client._reading_task.done()


async def reading_ended(client: Client, limit_s: float) -> None:
    """Wait until the client has stopped reading, as it does when its connection is lost; at most for `limit_s`."""
    if client._reading_task is not None:
        await asyncio.wait((client._reading_task,), timeout=limit_s)


async def sync(client: Client) -> None:
    """Wait until the server has processed everything sent before, and everything that it sent before has been read.

    Raise one of FAILURES, or BusDown.
    """
    await wait_sent(client, 0)
    await client.flush(CONNECT_LIMIT_S)
    if not is_reading(client):  # nats-py does not wait for a PONG then
        raise BusDown("the connection to NATS was lost")


async def wait_sent(client: Client, limit_bytes: int) -> None:
    """Wait until at most `limit_bytes` are unsent. Raise BusDown after UNSENT_WAIT_S."""
    try:
        async with asyncio.timeout(UNSENT_WAIT_S):
            while client.pending_data_size > limit_bytes and client.is_connected:  # noqa: ASYNC110
                await asyncio.sleep(0.0005)  # nats-py has no event to wait on
    except TimeoutError:
        raise BusDown(f"NATS has not received what was published for {UNSENT_WAIT_S:g} s") from None


async def drain(client: Client, remote: RemoteSubscription) -> None:
    """Unsubscribe, and return when everything that the server sent has been delivered."""
    try:
        await client._send_unsubscribe(remote._id)
        await sync(client)
        await remote.drain()  # type: ignore[no-untyped-call]
    except (*FAILURES, BusDown) as wrong:  # the connection is gone, and the subscription with it
        _log.debug("unsubscribing from %s: %r", remote.subject, wrong)


async def unsubscribe_now(remote: RemoteSubscription) -> None:
    """Unsubscribe, and drop what has come."""
    try:
        await remote.unsubscribe()
    except FAILURES as wrong:  # it ended with its connection
        _log.debug("unsubscribing from %s: %r", remote.subject, wrong)


def abort(client: DirectClient) -> None:
    """Free the socket of a lost connection, or of one that was not made: nats-py would wait for its end, which does not
    come after a failed TLS handshake."""
    client.drop_unsent()
    writer, client._transport = getattr(client._transport, "_io_writer", None), None
    if writer is not None:
        writer.transport.abort()


def as_headrace_error(wrong: Exception, client: Client, subject: str, payload: bytes) -> HeadraceError:
    """Convert an error of nats-py into ours."""
    if isinstance(wrong, nats.errors.MaxPayloadError):
        return PayloadTooLarge(len(payload), client.max_payload)
    if isinstance(wrong, nats.errors.BadSubjectError):
        return ProtocolError(f"{subject!r} is not a subject")
    if isinstance(wrong, nats.errors.BadHeaderError):
        return ProtocolError(f"invalid header: {wrong}")
    return BusDown(f"NATS: {wrong}")
