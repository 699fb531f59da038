"""A kvbm in a drawer with a real socket: engines of vLLM's shape reach it through their real socket client, and each
frame goes on only when the test says so. With a clock that a test sets, a run is the same each time."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import cast

from services.kvbm.tickets.results import TicketLimits
from services.worker.contracts.messages import KvbmOperation
from services.worker.kv_connector.contract import KvbmAsk
from services.worker.vllm.connector.chain import TokenChain
from services.worker.vllm.connector.scheduler_half import store_layout
from services.worker.vllm.connector.settings import ConnectorSettings
from shared.blocks import Content
from shared.hashing import ContentKey
from shared.pool.lock import SOCKET
from shared.pool.socket_frames import PROTOCOL, TO_KVBM, Answered, FrameReader, Hello, encode_frame
from tests.worker.kvbm_drawer import Drawer
from tests.worker.vllm.connector.vllm_shaped import BLOCK, LAYERS, MODEL, Engine, Request, token_bytes

BOUNDS = TicketLimits(store_time_s=4.0, fetch_time_s=4.0, tickets_per_owner=16, owner_share=0.7)
BLOCKS = 14
"""Blocks of an engine's device."""


class Connection:
    """The kvbm's end of one connection."""

    def __init__(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.asked: deque[KvbmAsk] = deque()
        """Requests that have come, and that the kvbm has not handled."""
        self.answers: deque[Answered] = deque()
        """Answers that the engine has not got."""
        self.streams: dict[int, int] = {}
        """Ticket → the number of the fetch that more answers come to."""
        self.ended = False
        self._reader = FrameReader()

    def receive(self) -> None:
        """Take what the engine has sent."""
        with suppress(BlockingIOError):
            while not self.ended:
                try:
                    data = self.socket.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                self.ended = not data
                for body in self._reader.feed(data):
                    asked = TO_KVBM.decode(body)
                    operation = cast(KvbmOperation, asked.operation)
                    self.asked.append(KvbmAsk(asked.number, operation, asked.payload, 0.0))

    def send(self, message: Hello | Answered) -> None:
        try:
            assert self.socket.send(frame := encode_frame(message)) == len(frame)
        except (BrokenPipeError, ConnectionResetError):
            self.ended = True


class DrawerWorld:
    """Engines, and at most one kvbm, on a pool in `directory`."""

    def __init__(self, directory: Path, ranks: int, depth: int) -> None:
        self.directory = directory
        self.ranks = ranks
        self.depth = depth
        self.now_s = 0.0
        self.drawer: Drawer | None = None
        self.connections: list[Connection] = []
        self.engines: list[Engine] = []
        self.requests: list[Request] = []
        """All that there ever were."""
        self._disk: dict[ContentKey, tuple[Content, bytes]] = {}
        self._prefixes: dict[ContentKey, list[int]] = {}
        """Key of a block → what its tokens' bytes are made of: the salt, and all tokens up to its end."""
        self._lives = self._names = 0
        self._listening: socket.socket | None = None

    # --- the kvbm

    def open_kvbm(self) -> None:
        assert self.drawer is None
        self._lives += 1
        identity, facts = self.engines[0].half.identity, [rank.facts for rank in self.engines[0].ranks]
        layout = store_layout(identity, facts)
        self.drawer = Drawer(self.directory, f"k{self._lives}", layout, BOUNDS, self._disk, self._right)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.setblocking(False)
        self._listening.bind(str(self.directory / SOCKET))
        self._listening.listen()

    def kill_kvbm(self) -> None:
        assert self.drawer is not None
        assert self._listening is not None
        self.drawer.close()
        self.drawer = None
        self._listening.close()
        (self.directory / SOCKET).unlink()
        for connection in self.connections:
            connection.socket.close()
        self.connections.clear()

    def accept(self) -> None:
        """Take all new connections, and say hello."""
        if self.drawer is None or self._listening is None:
            return
        with suppress(BlockingIOError):
            while True:
                connection = Connection(self._listening.accept()[0])
                connection.send(Hello(PROTOCOL, self.drawer.name))
                self.connections.append(connection)

    def carry(self, connection: Connection) -> None:
        """The kvbm handles the connection's oldest request."""
        connection.receive()
        if self.drawer is None or not connection.asked:
            return
        ask = connection.asked.popleft()
        replies, ticket = self.drawer.answer(ask, self.now_s)
        self.drawer.validate()
        if ticket:
            connection.streams[ticket] = ask.number
        connection.answers.extend(Answered(ask.number, reply, last=not ticket) for reply in replies)

    def deliver(self, connection: Connection) -> None:
        """The engine gets the connection's oldest answer; later answers to fetches line up."""
        for ticket, number in list(connection.streams.items()):
            more = self.drawer.advanced.get(ticket, []) if self.drawer is not None else []
            last = bool(more) and more[-1] == b""
            payloads = [payload for payload in more if payload]
            for place, payload in enumerate(payloads, 1):
                connection.answers.append(Answered(number, payload, last=last and place == len(payloads)))
            more.clear()
            if last:
                del connection.streams[ticket]
        if connection.answers:
            connection.send(connection.answers.popleft())

    def pass_frames(self) -> None:
        """The kvbm handles all requests, and each engine gets one more answer."""
        self.accept()
        for connection in self.connections:
            connection.receive()
            while connection.asked:
                self.carry(connection)
            self.deliver(connection)

    def drop_ended(self) -> None:
        for connection in list(self.connections):
            connection.receive()
            if connection.ended:  # what it has asked is still handled, as a kvbm may do
                while connection.asked:
                    self.carry(connection)
                connection.socket.close()
                self.connections.remove(connection)

    # --- engines

    def start_engine(self, draw_seed: int, wait_s: float = 0.5) -> Engine:
        self._names += 1
        settings = ConnectorSettings(pool=str(self.directory), timeout_s=1.0, wait_s=wait_s, blocks_in_flight=8)
        engine = Engine(
            settings,
            Random(draw_seed),
            lambda: self.now_s,
            name=f"e{self._names}",
            blocks=BLOCKS,
            ranks=self.ranks,
            depth=self.depth,
            threads=False,
        )
        self.engines.append(engine)
        return engine

    def kill_engine(self, engine: Engine) -> None:
        """Its locks are released, and its copies are not made any more."""
        self.engines.remove(engine)
        for rank in engine.ranks:
            rank.half.close()
        engine.half.close()

    def add(self, engine: Engine, prompt: Sequence[int], most: int, salt: str) -> None:
        request = Request(f"r{len(self.requests)}", prompt, most, salt)
        self.requests.append(request)
        engine.add(request)

    def step(self, engine: Engine) -> None:
        engine.step()
        self.validate(engine)

    def copy(self, engine: Engine, pick: int) -> None:
        for rank in engine.ranks:
            assert rank.steps is not None
            rank.steps.go_on(pick)

    def validate(self, engine: Engine) -> None:
        engine.half.blocks.validate()
        if engine.half._connector is not None:
            engine.half._connector.validate()

    # --- all is well again

    def settle(self) -> None:
        """Nothing goes wrong any more, until every engine is attached and has nothing to do."""
        if self.drawer is None:
            self.open_kvbm()
        for rank in [rank for engine in self.engines for rank in engine.ranks]:
            assert rank.steps is not None
            rank.steps.trouble = ""
        for _ in range(5000):
            rests = [self.go_on(engine) for engine in self.engines]
            assert self.drawer is not None
            if all(rests) and not self.drawer.reads and not any(each.answers for each in self.connections):
                return
        raise AssertionError("it does not come to rest")

    def go_on(self, engine: Engine) -> bool:
        """All goes well with this engine for a while; return whether it is at rest, attached."""
        assert self.drawer is not None
        self.now_s += 0.05
        self.step(engine)
        self.pass_frames()
        while any(rank.steps is not None and not rank.steps.idle for rank in engine.ranks):
            self.copy(engine, 0)
        while self.drawer.reads:
            self.drawer.read("ok", self.now_s)
        self.drop_ended()
        self.drawer.look(self.now_s)
        self.drawer.validate()
        return not engine.has_work and bool(engine.half.link.kvbm)

    def nothing_is_left(self) -> None:
        """Check that no request, block, slot or ticket is held."""
        assert self.drawer is not None
        for engine in self.engines:
            assert engine.pool.held == []
            assert not engine.requests
        assert all(request.state == "finished" for request in self.requests if request.name not in self._lost)
        now = self.drawer.tickets.statistics()
        assert (now.stores, now.fetches, now.expired, now.awaited) == (0, 0, 0, 0)
        host = now.tiers.host
        assert (host.writing, host.loading, host.quarantined, host.held) == (0, 0, 0, 0)

    @property
    def _lost(self) -> set[str]:
        """Requests of engines that were killed."""
        alive = {name for engine in self.engines for name in engine.requests}
        return {request.name for request in self.requests if request.state != "finished"} - alive

    def close(self) -> None:
        for engine in list(self.engines):
            self.kill_engine(engine)
        if self.drawer is not None:
            self.kill_kvbm()

    # --- what is right

    def _right(self, content: Content) -> bytes:
        """Return the right bytes of a block, those of the first rank."""
        if content.key not in self._prefixes:
            for request in self.requests:
                chain = TokenChain(request.tokens, BLOCK, MODEL, "", request.salt)
                for index in range(len(request.tokens) // BLOCK):
                    salt = list(map(ord, request.salt))
                    self._prefixes[chain.key(index)] = [*salt, *request.tokens[: (index + 1) * BLOCK]]
        prefix = self._prefixes[content.key]
        ends = range(len(prefix) - BLOCK + 1, len(prefix) + 1)
        return b"".join(token_bytes(0, each, prefix[:end]) for each in range(2 * LAYERS) for end in ends)
