"""The memory service over real sockets: engines ask, make, map and die in any order, and so does the service."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from services.worker.memory.client import NoSharedWeights, WeightsLock
from services.worker.memory.ledger import LedgerLimits
from services.worker.memory.messages import (
    PROTOCOL,
    AskWeights,
    CommitWeights,
    FreeWeights,
    FromService,
    MapWeights,
    NotMapped,
    ShowWeights,
    ToService,
    WaitForWriter,
    WeightsFreed,
    WeightsShown,
    WriteWeights,
    decode_from_service,
    encode_from_service,
    encode_to_service,
)
from services.worker.memory.service import MOST_CONNECTIONS, MemoryService
from services.worker.sharing import packets
from services.worker.sharing.host_pages import IMMUTABLE, memory_file, seal_memory
from services.worker.sharing.messages import MOST_DESCRIPTORS, MOST_PACKET_BYTES
from shared.errors import ConfigError
from shared.pool.lock import SOCKET
from tests.worker.memory.memory_process import content_of, identity_of, mapped_sum, poke, sum_of

SIZE = 3 * 4096
LIMIT_S = 60.0
LIMITS = LedgerLimits(size_bytes=4 * SIZE)


@contextmanager
def serving(directory: Path, limits: LedgerLimits = LIMITS) -> Iterator[MemoryService]:
    """Yield a service that runs in a thread."""
    with closing(MemoryService(directory, limits)) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            yield service
        finally:
            service.stop()
            thread.join()


class Peer:
    """One connection to the service, as the wire has it."""

    def __init__(self, directory: Path) -> None:
        self.socket = packets.connected(directory / SOCKET)
        self.socket.settimeout(LIMIT_S)
        self.descriptors: list[int] = []

    def send(self, message: ToService, descriptors: list[int] | None = None) -> None:
        socket.send_fds(self.socket, [encode_to_service(message)], descriptors or [])

    def answer(self) -> FromService | None:
        """Return the next message; None if the service has closed the connection."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.socket, MOST_PACKET_BYTES, MOST_DESCRIPTORS)
        except ConnectionResetError:
            return None
        self.descriptors += descriptors
        return decode_from_service(packet) if packet else None

    def ask(self, model: int, size_bytes: int = SIZE) -> FromService | None:
        self.send(AskWeights(PROTOCOL, identity_of(model), size_bytes, f"model-{model}"))
        return self.answer()

    def commit(self, model: int, descriptors: list[int]) -> FromService | None:
        self.send(CommitWeights(identity_of(model)), descriptors)
        return self.answer()

    def close(self) -> None:
        """End as a dead process does: nothing is said."""
        packets.close_all(self.descriptors)
        self.descriptors = []
        self.socket.close()


def made(model: int, seals: int = IMMUTABLE, size_bytes: int = SIZE) -> int:
    """Return memory with a model's weights."""
    descriptor = memory_file("headrace-test")
    os.pwrite(descriptor, content_of(model, size_bytes)[:size_bytes], 0)
    seal_memory(descriptor, seals)
    return descriptor


def commit_weights(directory: Path, model: int) -> Peer:
    """Return the connection of an engine that has made the weights of a model."""
    peer = Peer(directory)
    assert peer.ask(model) == WriteWeights()
    peer.descriptors.append(made(model))
    assert peer.commit(model, peer.descriptors) == MapWeights(identity_of(model), SIZE)
    return peer


def shown(directory: Path) -> WeightsShown:
    with closing(Peer(directory)) as peer:
        peer.send(ShowWeights())
        answer = peer.answer()
        assert isinstance(answer, WeightsShown)
        return answer


def kept_files() -> int:
    """Return how many descriptors of this process stand for weights."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "memfd:headrace-test" in str(path.readlink())
    return found


def test_an_engine_maps_what_another_made_and_cannot_write_to_it(tmp_path: Path) -> None:
    with serving(tmp_path / "memory"), ExitStack() as ends:
        writer = commit_weights(tmp_path / "memory", 7)
        ends.callback(writer.close)
        lock = WeightsLock(tmp_path / "memory", identity_of(7), SIZE, LIMIT_S)
        ends.callback(lock.close)
        descriptors = lock.ask("model-7", LIMIT_S, lambda: None)
        assert descriptors is not None
        ends.callback(packets.close_all, descriptors)
        assert mapped_sum(descriptors[0]) == sum_of(7, SIZE)
        assert poke(descriptors[0]) == "EPERM EPERM"
        [row] = shown(tmp_path / "memory").rows
        assert (row.state, row.readers) == ("committed", (os.getpid(),) * 2)


def test_weights_outlive_all_engines_and_an_operator_frees_them(tmp_path: Path) -> None:
    directory = tmp_path / "memory"
    with serving(directory):
        commit_weights(directory, 7).close()
        with closing(Peer(directory)) as again:
            assert again.ask(7) == MapWeights(identity_of(7), SIZE)
            assert mapped_sum(again.descriptors[0]) == sum_of(7, SIZE)
            with closing(Peer(directory)) as operator:
                operator.send(FreeWeights())
                assert operator.answer() == WeightsFreed(0, ("model-7",))
        assert kept_files() == 1
        with closing(Peer(directory)) as operator:
            operator.send(FreeWeights("model-7"))
            assert operator.answer() == WeightsFreed(SIZE)
        assert kept_files() == 0


def test_weights_that_no_engine_maps_are_released_after_their_time(tmp_path: Path) -> None:
    directory = tmp_path / "memory"
    with serving(directory, LedgerLimits(size_bytes=SIZE, keep_s=0.01)):
        commit_weights(directory, 7).close()
        while shown(directory).rows:  # the suite has a limit of time for each test
            time.sleep(0.01)
        assert kept_files() == 0


def unsealed() -> list[int]:
    descriptor = memory_file("headrace-test")
    os.ftruncate(descriptor, SIZE)
    return [descriptor]


def of_a_disk() -> list[int]:
    with tempfile.TemporaryFile() as file:
        return [os.dup(file.fileno())]


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (unsealed, "could shrink"),
        (lambda: [made(7, fcntl.F_SEAL_SHRINK)], "could be written to"),
        (lambda: [made(7, size_bytes=SIZE - 1)], f"has {SIZE - 1} bytes"),
        (lambda: [made(7, size_bytes=SIZE + 1)], f"has {SIZE + 1} bytes, more than"),
        (lambda: [made(7), made(7)], "one descriptor; these are 2"),
        (list, "one descriptor; these are 0"),
        (of_a_disk, "no memory"),
    ],
    ids=["unsealed", "writable", "short", "long", "two", "none", "file"],
)
def test_memory_that_is_not_fit_is_not_committed_and_not_kept(tmp_path: Path, memory: object, why: str) -> None:
    assert callable(memory)
    with serving(tmp_path / "memory"), closing(Peer(tmp_path / "memory")) as writer:
        assert writer.ask(7) == WriteWeights()
        writer.descriptors += memory()
        refused = writer.commit(7, writer.descriptors)
        assert isinstance(refused, NotMapped)
        assert why in refused.reason
        assert writer.answer() is None
        writer.close()
        assert shown(tmp_path / "memory").rows == ()
        assert kept_files() == 0


def test_memory_that_its_writer_still_maps_for_writing_cannot_be_sealed() -> None:
    descriptor = unsealed()[0]
    with mmap.mmap(descriptor, SIZE), pytest.raises(OSError, match="busy"):
        seal_memory(descriptor, IMMUTABLE)
    seal_memory(descriptor, IMMUTABLE)
    os.close(descriptor)


def test_a_full_service_refuses_in_one_line_that_names_the_setting(tmp_path: Path) -> None:
    with serving(tmp_path / "memory", LedgerLimits(size_bytes=SIZE)), closing(commit_weights(tmp_path / "memory", 7)):
        lock = WeightsLock(tmp_path / "memory", identity_of(8), SIZE, LIMIT_S)
        with closing(lock), pytest.raises(NoSharedWeights, match=r"^weights\.memory, .*size_bytes") as refused:
            lock.ask("model-8", LIMIT_S, lambda: None)
        assert "\n" not in str(refused.value)


def test_without_a_service_the_line_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(NoSharedWeights, match=r"^weights\.memory, .*no memory service answers"):
        WeightsLock(tmp_path, identity_of(7), SIZE, 0.01)


def test_a_frozen_service_is_not_awaited_for_ever(tmp_path: Path) -> None:
    directory = tmp_path / "memory"
    with closing(MemoryService(directory, LIMITS)):  # which does not run
        lock = WeightsLock(directory, identity_of(7), SIZE, 0.05)
        with closing(lock), pytest.raises(NoSharedWeights, match=r"^weights\.memory, .*no answer in 0\.05 s"):
            lock.ask("model-7", LIMIT_S, lambda: None)


def test_a_second_service_of_a_directory_is_refused(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "memory"),
        pytest.raises(ConfigError, match=f"^directory: another memory service.*{os.getpid()}"),
    ):
        MemoryService(tmp_path / "memory", LIMITS)


def test_a_directory_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"^directory: .*no other user may open it"):
        MemoryService(tmp_path / "memory", LIMITS)


def test_nonsense_closes_only_its_own_connection(tmp_path: Path) -> None:
    with serving(tmp_path / "memory"), closing(commit_weights(tmp_path / "memory", 7)):
        for packet in (b"{", b'{"type":"ask"}', b'{"type":"commit","identity":{"model":"x","layout":"y"}}'):
            with closing(Peer(tmp_path / "memory")) as stranger:
                stranger.socket.send(packet)
                assert stranger.answer() is None
        assert len(shown(tmp_path / "memory").rows) == 1


def test_refusals_do_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path / "memory"):
        for _ in range(50):
            with closing(Peer(tmp_path / "memory")) as stranger:
                stranger.send(AskWeights(PROTOCOL + 1, identity_of(7), SIZE))
                assert isinstance(stranger.answer(), NotMapped)
    [record] = caplog.records
    assert f"process {os.getpid()}: protocol {PROTOCOL + 1}" in record.getMessage()


def test_a_service_that_sends_more_than_it_should_leaves_no_descriptors(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    with packets.listening(tmp_path / "memory" / SOCKET) as listening, ExitStack() as ends:
        lock = WeightsLock(tmp_path / "memory", identity_of(7), SIZE, LIMIT_S)
        ends.callback(lock.close)
        theirs, _ = listening.accept()
        ends.enter_context(theirs)
        descriptor = made(7)
        ends.callback(os.close, descriptor)
        for message in (WaitForWriter(), WriteWeights()):
            packets.send(theirs, encode_from_service(message), [descriptor])
        assert lock.ask("model-7", LIMIT_S, lambda: None) is None
        assert kept_files() == 1


def test_a_connection_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "memory"), ExitStack() as ends:
        for _ in range(MOST_CONNECTIONS):
            peer = Peer(tmp_path / "memory")
            ends.callback(peer.close)
            peer.send(ShowWeights())
            assert isinstance(peer.answer(), WeightsShown)
        with closing(Peer(tmp_path / "memory")) as one_more:
            assert isinstance(one_more.answer(), NotMapped)
            assert one_more.answer() is None


class KillMachine(RuleBasedStateMachine):
    """Writers, readers and the service die in each state, and what is mapped stays right."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = ExitStack()
        self.directory = Path(self.ends.enter_context(tempfile.TemporaryDirectory())) / "memory"
        self.peers: dict[Peer, tuple[int, str]] = {}
        """Connection → its model, and what it does: write, wait, map; or lost, if the service died meanwhile."""
        self.kept: set[int] = set()
        """The models that the service has."""
        self.service = ExitStack()
        self.start()

    def start(self) -> None:
        self.service.enter_context(serving(self.directory))

    def drawn(self, data: st.DataObject, *doing: str) -> Peer:
        return data.draw(st.sampled_from([peer for peer, (_, what) in self.peers.items() if what in doing]))

    def doing(self, *doing: str) -> bool:
        return any(what in doing for _, what in self.peers.values())

    def of(self, model: int, doing: str) -> list[Peer]:
        return [peer for peer, state in self.peers.items() if state == (model, doing)]

    def check_sum(self, peer: Peer, model: int) -> None:
        assert mapped_sum(peer.descriptors[0]) == sum_of(model, SIZE)

    @precondition(lambda self: len(self.peers) < 5)
    @rule(model=st.integers(1, 3))
    def ask(self, model: int) -> None:
        peer = Peer(self.directory)
        answer = peer.ask(model)
        if model in self.kept:
            assert answer == MapWeights(identity_of(model), SIZE)
            self.check_sum(peer, model)
            self.peers[peer] = model, "map"
        elif self.of(model, "write"):
            assert answer == WaitForWriter()
            self.peers[peer] = model, "wait"
        else:
            assert answer == WriteWeights()
            self.peers[peer] = model, "write"

    @precondition(lambda self: self.doing("write"))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        writer = self.drawn(data, "write")
        model, _ = self.peers[writer]
        writer.descriptors.append(made(model))
        assert writer.commit(model, writer.descriptors) == MapWeights(identity_of(model), SIZE)
        self.kept.add(model)
        self.peers[writer] = model, "map"
        for waiting in self.of(model, "wait"):
            assert waiting.answer() == MapWeights(identity_of(model), SIZE)
            self.check_sum(waiting, model)
            self.peers[waiting] = model, "map"

    @precondition(lambda self: self.doing("write", "wait", "map", "lost"))
    @rule(data=st.data())
    def kill_an_engine(self, data: st.DataObject) -> None:
        peer = self.drawn(data, "write", "wait", "map", "lost")
        model, what = self.peers.pop(peer)
        peer.close()
        if what == "write" and (waiting := self.of(model, "wait")):
            assert waiting[0].answer() == WriteWeights()
            self.peers[waiting[0]] = model, "write"

    @rule()
    def kill_the_service(self) -> None:
        self.service.close()
        for peer, (model, what) in list(self.peers.items()):
            if what != "lost":
                assert peer.answer() is None
            if what == "map":
                self.check_sum(peer, model)
            self.peers[peer] = model, "lost"
        self.kept.clear()
        self.start()

    @rule()
    def free(self) -> None:
        with closing(Peer(self.directory)) as operator:
            operator.send(FreeWeights())
            answer = operator.answer()
        mapped = {model for model, what in self.peers.values() if what == "map"}
        assert isinstance(answer, WeightsFreed)
        assert answer.size_bytes == SIZE * len(self.kept - mapped)
        self.kept &= mapped

    @rule()
    def read_all(self) -> None:
        for peer, (model, what) in self.peers.items():
            if what == "map":
                self.check_sum(peer, model)

    def teardown(self) -> None:
        for peer in self.peers:
            peer.close()
        with closing(Peer(self.directory)) as operator:
            operator.send(FreeWeights())
            operator.answer()
        assert shown(self.directory).rows == ()
        assert kept_files() == 0, "all memory is freed"
        self.service.close()
        self.ends.close()


KillMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestKillMachine = KillMachine.TestCase
