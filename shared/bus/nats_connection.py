"""One connection to NATS through nats-py, and what must be done around it. `nats_bus.py` makes one after another.

Five things in nats-py 2.16 that this is about: its PING overtakes commands that wait to be sent, so that `flush` and
`drain` alone prove nothing (`sync`); closing waits for a server to take what is unsent, a frozen one never (`abort`); a
forced flush swallows a cancellation, so none is ever forced (`wait_sent`); a message whose header, subject or reply it
cannot read ends its reading for good, while it calls itself connected (`DirectClient`, `reads`), and so does the answer
to a flush that was cancelled (`DirectClient`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as RemoteSubscription
from nats.aio.transport import TcpTransport

from shared.bus.contract import Message
from shared.config import NatsConfig
from shared.errors import BusDown, ConfigError, HeadraceError, PayloadTooLarge, ProtocolError

CONNECT_LIMIT_S = 2
PING_INTERVAL_S = 10
UNSENT_LIMIT_BYTES = 2 << 20
WRITE_LIMIT_BYTES = 64 << 10
"""Of these, in the socket's buffer."""
UNSENT_WAIT_S = 2.0
"""A publisher waits this long for the server to take what is unsent, then gets BusDown."""
FAILURES = (nats.errors.Error, OSError, RuntimeError, ValueError, AttributeError, TypeError, LookupError)
"""What nats-py raises; RuntimeError is uvloop's, of a socket that is closed, and those behind it are what nats-py makes
of a peer that is no NATS server."""

FAIR_SHARE = 128
"""Messages taken before the loop gets a turn: nats-py reads on while there is something to read, and thousands of small
ones took 28 ms."""

Take = Callable[[Message], None]

_log = logging.getLogger(__name__)


class DirectClient(Client):
    """Hands a message to its taker in the turn of the loop that read it; nats-py's own way leads through a queue and a
    task for each subscription, two turns more. Drops a message that nats-py cannot read: the server looks into neither
    headers nor UTF-8, so any client may send such a one."""

    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, Take] = {}
        self._share = 0

    def send(self, subject: str, payload: bytes, reply: str) -> None:
        """Publish without headers. All that is sent in one turn of uvloop is one write, at its end.

        nats-py's own way is five coroutines, a future and a task, four times the price and a turn later. It is left to
        take what the socket does not take now, and what must stay behind that: then `pending_data_size` grows.
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
        """`take` is called for each message, must not raise, and bounds what it keeps."""

        async def passed_on(msg: Msg) -> None:  # one that came before its subscription had its taker
            take(message(msg))

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

    async def _process_pong(self) -> None:
        """nats-py ends its reading over a PONG whose asker has given up."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def _process_disconnect(self) -> None:
        """nats-py would still write what is unsent: uvloop raises then, and a frozen peer never takes it."""
        super()._process_disconnect()
        self.drop_unsent()

    def drop_unsent(self) -> None:
        """The connection is lost, and what was to be sent on it."""
        self._pending, self._pending_data_size = [], 0

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        if sid not in self._subs:
            self._takers.pop(sid, None)


async def dial(client: Client, config: NatsConfig, name: str, failed: Callable[[Exception], None]) -> None:
    """Connect once. `failed` hears of errors then and afterwards. Raises one of FAILURES."""

    async def error(wrong: Exception) -> None:
        failed(wrong)

    await client.connect(
        config.url,
        name=name,
        user=config.user or None,
        password=config.password or None,
        allow_reconnect=False,
        max_reconnect_attempts=1,  # of a first connection: else nats-py would try without telling
        reconnect_time_wait=0,
        connect_timeout=CONNECT_LIMIT_S,
        ping_interval=PING_INTERVAL_S,
        pending_size=1 << 40,
        error_cb=error,
    )


def reads(client: Client) -> bool:
    """Whether it is connected and takes what comes."""
    return client.is_connected and client._reading_task is not None and not client._reading_task.done()


async def reading_ended(client: Client, limit_s: float) -> None:
    """Returns when it reads no more, as it does when its connection is lost; at the latest after `limit_s`."""
    if client._reading_task is not None:
        await asyncio.wait((client._reading_task,), timeout=limit_s)


async def sync(client: Client) -> None:
    """Returns when the server has done all that was asked before, and what it sent before has been read. Raises one of
    FAILURES, or BusDown."""
    await wait_sent(client, 0)
    await client.flush(CONNECT_LIMIT_S)
    if not reads(client):  # nats-py asks for no PONG then
        raise BusDown("the connection to NATS was lost")


async def wait_sent(client: Client, limit_bytes: int) -> None:
    """Until no more than `limit_bytes` are unsent. Raises BusDown after UNSENT_WAIT_S."""
    try:
        async with asyncio.timeout(UNSENT_WAIT_S):
            while client.pending_data_size > limit_bytes and client.is_connected:  # noqa: ASYNC110
                await asyncio.sleep(0.0005)  # nats-py has no event to wait on
    except TimeoutError:
        raise BusDown(f"NATS has not taken what was published for {UNSENT_WAIT_S:g} s") from None


async def drain(client: Client, remote: RemoteSubscription) -> None:
    """Unsubscribe, and return when all that the server sent has been handed over."""
    try:
        await client._send_unsubscribe(remote._id)
        await sync(client)
        await remote.drain()  # type: ignore[no-untyped-call]
    except (*FAILURES, BusDown) as wrong:  # the connection is gone, and the subscription with it
        _log.debug("unsubscribing from %s: %r", remote.subject, wrong)


async def leave(remote: RemoteSubscription) -> None:
    """Unsubscribe; what has come is dropped."""
    try:
        await remote.unsubscribe()
    except FAILURES as wrong:  # it ended with its connection
        _log.debug("unsubscribing from %s: %r", remote.subject, wrong)


def abort(client: DirectClient) -> None:
    """Free the socket of a lost connection."""
    client.drop_unsent()
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


def message(msg: Msg) -> Message:
    """As our subscribers get it."""
    return Message(msg.subject, msg.data, msg.reply, msg.headers or {})


def translated(wrong: Exception, client: Client, subject: str, payload: bytes) -> HeadraceError:
    """nats-py's error as ours."""
    if isinstance(wrong, nats.errors.MaxPayloadError):
        return PayloadTooLarge(len(payload), client.max_payload)
    if isinstance(wrong, nats.errors.BadSubjectError):
        return ProtocolError(f"{subject!r} is not a subject")
    if isinstance(wrong, nats.errors.BadHeaderError):
        return ProtocolError(f"not a header: {wrong}")
    return BusDown(f"NATS: {wrong}")


def check_url(url: str) -> None:
    """Raises ConfigError where it is not nats://host:port."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("nats", "tls") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"nats.url: {shown(url)} is not nats://host:port")


def refusal(wrong: Exception, config: NatsConfig) -> str:
    """Where the server refuses who connects: what it says, and which settings say who that is; empty: it is something
    else."""
    said = str(wrong)
    if not any(word in said.lower() for word in ("authorization violation", "authentication")):
        return ""
    user = config.user or urlsplit(config.url).username
    who = f"user {user!r}" if user else "a connection without a user"
    return (
        f"NATS at {shown(config.url)} refuses {who} ({said}): set nats.user and nats.password "
        "(HEADRACE_NATS_USER, HEADRACE_NATS_PASSWORD)"
    )


def shown(url: str) -> str:
    """A URL without its password."""
    before, at, host = url.rpartition("@")
    return f"{before.partition('://')[0]}://…@{host}" if at else url
