"""KV events encrypted by CURVE: https://rfc.zeromq.org/spec/26/. Each process makes a key pair when it starts, and the
address book has the public key.

    subscriber  HELLO, sealed for the publisher's key  ──▶ publisher
                ◀── WELCOME, sealed with it              who does not know that key cannot open it: no events
                INITIATE ──▶  ◀── READY  ── messages, sealed ──

A subscriber has a new key for each connection and is not asked who it is: to know the publisher's key is the right to
subscribe. docs/security.md says what that is worth.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq

from shared.errors import ConfigError

SEND_LIMIT_BATCHES = 4096
"""The maximum number of batches that wait for one subscriber; further ones are dropped, and it sees a gap. All
subscribers share the bytes of a batch."""
TOPIC_LIMIT_BYTES = 1024
"""The maximum size of a frame that a publisher accepts."""
HANDSHAKE_LIMIT_MS = 10_000

Socket = zmq.Socket[bytes]


class CurveKeys(NamedTuple):
    """A key pair, each key in 40 characters of Z85."""

    public: bytes
    secret: bytes


def new_keys() -> CurveKeys:
    """Make a key pair. Raise ConfigError if this libzmq cannot."""
    if not zmq.has("curve"):
        raise ConfigError("observe.events_curve: libzmq was built without CURVE; install pyzmq from a wheel")
    return CurveKeys(*zmq.curve_keypair())


def serve(socket: Socket, keys: CurveKeys) -> None:
    """Make a socket that will be bound accept only peers that know its public key."""
    socket.curve_server = 1
    socket.curve_secretkey = keys.secret
    socket.handshake_ivl = HANDSHAKE_LIMIT_MS


def join(socket: Socket, server_key: str) -> None:
    """Make a socket that will be connected talk only to the server with this public key. Raise ValueError if it is no
    key, ConfigError if this libzmq cannot."""
    ours = new_keys()
    if len(server_key) != len(ours.public) or not server_key.isascii():
        raise ValueError("its CURVE key is malformed")
    socket.curve_serverkey = server_key.encode()
    socket.curve_publickey, socket.curve_secretkey = ours


class CurvePort:
    """libzmq's PUB socket at a free port of `host`, in place of an EventPort. Raise zmq.ZMQError."""

    def __init__(self, context: zmq.Context[Socket], host: str, keys: CurveKeys) -> None:
        self._socket = context.socket(zmq.PUB)
        try:
            self._socket.sndhwm = SEND_LIMIT_BATCHES
            self._socket.maxmsgsize = TOPIC_LIMIT_BYTES
            self._socket.tcp_keepalive = 1
            self._socket.ipv6 = ":" in host
            serve(self._socket, keys)
            self.port = self._socket.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        except zmq.ZMQError:
            self.close()
            raise

    def publish(self, *frames: bytes) -> None:
        """Publish one message to each subscriber."""
        self._socket.send_multipart(frames, zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close(linger=0)
