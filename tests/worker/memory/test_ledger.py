"""Who makes and who maps which weights, in any order of events: nothing is mapped that is not complete, and nothing
stays that has no owner and no reason."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.memory.ledger import (
    MOST_WEIGHTS,
    CloseConnection,
    KeepMemory,
    Ledger,
    LedgerAction,
    LedgerLimits,
    ReleaseMemory,
    SendPacket,
)
from services.worker.memory.messages import (
    MOST_NAME,
    PROTOCOL,
    AskWeights,
    MapWeights,
    NotMapped,
    WaitForWriter,
    WeightsFreed,
    WeightsIdentity,
    WriteWeights,
    decode_to_service,
    encode_from_service,
    encode_to_service,
)
from services.worker.memory.service import MOST_CONNECTIONS
from services.worker.sharing.messages import MOST_PACKET_BYTES
from shared.errors import ProtocolError

LIMITS = LedgerLimits(size_bytes=100, keep_s=10.0, write_s=60.0)


def identity(number: int) -> WeightsIdentity:
    return WeightsIdentity(f"{number:016x}", "0" * 16)


def question(number: int, size_bytes: int = 40, protocol: int = PROTOCOL) -> AskWeights:
    return AskWeights(protocol, identity(number), size_bytes, f"model-{number}")


def answers(actions: list[LedgerAction]) -> dict[int, object]:
    """Return the messages by their connections."""
    return {action.connection: action.message for action in actions if isinstance(action, SendPacket)}


def released(actions: list[LedgerAction]) -> list[int]:
    return [action.memory for action in actions if isinstance(action, ReleaseMemory)]


def committed(ledger: Ledger, connection: int, number: int, size_bytes: int = 40) -> None:
    assert answers(ledger.ask(connection, question(number, size_bytes), 0.0)) == {connection: WriteWeights()}
    assert any(isinstance(action, KeepMemory) for action in ledger.commit(connection, identity(number), "", 0.0))


def test_the_first_writes_the_others_wait_and_all_map_what_was_committed() -> None:
    ledger = Ledger(LIMITS)
    assert answers(ledger.ask(1, question(7), 0.0)) == {1: WriteWeights()}
    assert answers(ledger.ask(2, question(7), 0.0)) == {2: WaitForWriter()}
    assert answers(ledger.ask(3, question(7), 0.0)) == {3: WaitForWriter()}
    actions = ledger.commit(1, identity(7), "", 1.0)
    assert answers(actions) == dict.fromkeys((1, 2, 3), MapWeights(identity(7), 40))
    with_memory = [action.connection for action in actions if isinstance(action, SendPacket) and action.memory]
    assert with_memory == [2, 3], "the writer has the memory already"
    assert answers(ledger.ask(4, question(7), 1.0)) == {4: MapWeights(identity(7), 40)}
    ledger.validate()


def test_a_writer_that_dies_commits_nothing_and_the_next_writes() -> None:
    ledger = Ledger(LIMITS)
    ledger.ask(1, question(7), 0.0)
    ledger.ask(2, question(7), 0.0)
    assert answers(ledger.connection_closed(1, 5.0)) == {2: WriteWeights()}
    assert ledger.connection_closed(2, 6.0) == []
    assert ledger.used_bytes == 0
    assert answers(ledger.ask(3, question(7), 7.0)) == {3: WriteWeights()}


def test_a_writer_that_is_too_slow_is_refused_and_the_next_writes() -> None:
    ledger = Ledger(LIMITS)
    ledger.ask(1, question(7), 0.0)
    ledger.ask(2, question(7), 0.0)
    assert ledger.due_s == 60.0
    actions = ledger.tick(60.0)
    said = answers(actions)
    assert isinstance(said[1], NotMapped)
    assert said[1].code == "slow"
    assert said[2] == WriteWeights()
    assert CloseConnection(1) in actions
    refused = answers(ledger.commit(1, identity(7), "", 61.0))[1]
    assert isinstance(refused, NotMapped), "it is no writer any more"


def test_memory_that_others_could_change_is_not_committed() -> None:
    ledger = Ledger(LIMITS)
    ledger.ask(1, question(7), 0.0)
    actions = ledger.commit(1, identity(7), "the memory could be written to while it is read", 1.0)
    assert not any(isinstance(action, KeepMemory) for action in actions)
    assert ledger.used_bytes == 0


def test_weights_under_another_identity_than_the_asked_one_are_not_committed() -> None:
    ledger = Ledger(LIMITS)
    ledger.ask(1, question(7), 0.0)
    [refused] = answers(ledger.commit(1, identity(8), "", 1.0)).values()
    assert isinstance(refused, NotMapped)
    assert refused.code == "memory"


def test_weights_outlive_their_last_reader_for_a_time_and_a_new_reader_keeps_them() -> None:
    ledger = Ledger(LIMITS)
    committed(ledger, 1, 7)
    ledger.connection_closed(1, 3.0)
    assert ledger.due_s == 13.0
    assert ledger.tick(12.9) == []
    assert answers(ledger.ask(2, question(7), 12.9)) == {2: MapWeights(identity(7), 40)}
    assert ledger.tick(99.0) == []
    ledger.connection_closed(2, 100.0)
    assert released(ledger.tick(110.0)) == [1]
    assert ledger.used_bytes == 0


def test_without_a_time_unmapped_weights_stay_until_room_is_needed() -> None:
    ledger = Ledger(LedgerLimits(size_bytes=100))
    committed(ledger, 1, 7)
    committed(ledger, 2, 8)
    ledger.connection_closed(2, 3.0)
    ledger.connection_closed(1, 4.0)
    assert ledger.due_s is None
    actions = ledger.ask(3, question(9, 30), 5.0)
    assert released(actions) == [2], "the longest unmapped, and no more than are needed"
    assert answers(actions) == {3: WriteWeights()}


def test_full_is_a_refusal_that_names_the_setting_and_releases_nothing() -> None:
    ledger = Ledger(LIMITS)
    committed(ledger, 1, 7, 60)
    committed(ledger, 2, 8, 30)
    ledger.connection_closed(2, 1.0)
    actions = ledger.ask(3, question(9, 50), 2.0)
    [refused] = answers(actions).values()
    assert isinstance(refused, NotMapped)
    assert refused.code == "full"
    assert "60 of the 100 bytes of size_bytes" in refused.reason
    assert released(actions) == []
    assert CloseConnection(3) in actions


def test_a_further_model_takes_the_place_of_one_that_is_unmapped() -> None:
    ledger = Ledger(LedgerLimits(size_bytes=1 << 20))
    for number in range(MOST_WEIGHTS):
        committed(ledger, number, number, 1)
    [refused] = answers(ledger.ask(999, question(999, 1), 0.0)).values()
    assert isinstance(refused, NotMapped)
    assert refused.code == "full"
    ledger.connection_closed(5, 1.0)
    assert released(ledger.ask(1000, question(1000, 1), 2.0)) == [6]


@pytest.mark.parametrize(
    ("asked", "code"), [(question(7, protocol=PROTOCOL + 1), "protocol"), (question(7, size_bytes=41), "size")]
)
def test_what_does_not_fit_is_refused(asked: AskWeights, code: str) -> None:
    ledger = Ledger(LIMITS)
    committed(ledger, 1, 7)
    [refused] = answers(ledger.ask(2, asked, 0.0)).values()
    assert isinstance(refused, NotMapped)
    assert refused.code == code


def test_a_connection_that_asks_twice_loses_its_lock() -> None:
    ledger = Ledger(LIMITS)
    committed(ledger, 1, 7)
    assert CloseConnection(1) in ledger.ask(1, question(7), 1.0)
    assert released(ledger.tick(11.0)) == [1]


def test_an_operator_frees_what_no_engine_maps_and_learns_what_stays() -> None:
    ledger = Ledger(LIMITS)
    committed(ledger, 1, 7)
    committed(ledger, 2, 8)
    ledger.connection_closed(1, 1.0)
    assert answers(ledger.free(9, "model-8")) == {9: WeightsFreed(0, ("model-8",))}
    actions = ledger.free(9, "")
    assert released(actions) == [1]
    assert answers(actions) == {9: WeightsFreed(40, ("model-8",))}


def test_what_is_there_is_shown_with_the_processes() -> None:
    ledger = Ledger(LIMITS)
    committed(ledger, 1, 7)
    ledger.ask(2, question(7), 0.0)
    ledger.ask(3, question(8), 0.0)
    ledger.ask(4, question(8), 0.0)
    mapped, written = ledger.show({1: 11, 2: 12, 3: 13, 4: 14}).rows
    assert (mapped.name, mapped.state, mapped.readers) == ("model-7", "committed", (11, 12))
    assert (written.name, written.state, written.writer, written.waiting) == ("model-8", "written", 13, (14,))


def test_all_that_is_there_is_shown_and_freed_in_one_packet_whatever_the_names() -> None:
    ledger = Ledger(LedgerLimits(size_bytes=1 << 46))
    for connection in range(MOST_CONNECTIONS):
        model = connection % MOST_WEIGHTS
        named = WeightsIdentity(f"{model:016x}", "0" * 16, "f" * 32)
        ledger.ask(connection, AskWeights(PROTOCOL, named, (1 << 46) // MOST_WEIGHTS, "\1" * MOST_NAME), 0.0)
    shown = ledger.show(dict.fromkeys(range(MOST_CONNECTIONS), 1 << 22))
    [freed] = answers(ledger.free(999, "")).values()
    assert sum(1 + len(row.waiting) for row in shown.rows) == MOST_CONNECTIONS
    assert isinstance(freed, WeightsFreed)
    assert len(freed.held) == MOST_WEIGHTS
    assert max(len(encode_from_service(message)) for message in (shown, freed)) <= MOST_PACKET_BYTES
    with pytest.raises(ProtocolError, match="device"):
        decode_to_service(encode_to_service(AskWeights(PROTOCOL, WeightsIdentity("0" * 16, "0" * 16, "\1" * 32), 1)))


class LedgerMachine(RuleBasedStateMachine):
    """Engines that ask, commit, die and are slow, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMITS)
        self.now_s = 0.0
        self.newest = 0
        self.doing: dict[int, str] = {}
        """Connection → write, wait or map, as it was said to the engine."""
        self.of: dict[int, int] = {}
        """Connection → its model."""
        self.kept: set[int] = set()
        """The memory whose descriptors are kept."""

    def carry_out(self, actions: list[LedgerAction]) -> None:
        for action in actions:
            match action:
                case KeepMemory(memory):
                    assert memory not in self.kept
                    self.kept.add(memory)
                case ReleaseMemory(memory):
                    self.kept.remove(memory)
                case CloseConnection(connection):
                    self.doing.pop(connection, None)
                case SendPacket(connection, message, memory):
                    assert memory is None or memory in self.kept, "descriptors are sent that are not there"
                    if isinstance(message, WriteWeights):
                        self.doing[connection] = "write"
                    elif isinstance(message, WaitForWriter):
                        self.doing[connection] = "wait"
                    elif isinstance(message, MapWeights):
                        assert memory is not None or self.doing[connection] == "write"
                        self.doing[connection] = "map"

    def drawn(self, data: st.DataObject, doing: str | None = None) -> int:
        return data.draw(st.sampled_from([each for each, what in self.doing.items() if doing in (None, what)]))

    @precondition(lambda self: len(self.doing) < 6)
    @rule(number=st.integers(1, 4))
    def ask(self, number: int) -> None:
        self.newest += 1
        self.of[self.newest] = number
        self.carry_out(self.ledger.ask(self.newest, question(number, 20 * number), self.now_s))

    @precondition(lambda self: "write" in self.doing.values())
    @rule(data=st.data(), fault=st.sampled_from(["", "", "it can be written"]))
    def commit(self, data: st.DataObject, fault: str) -> None:
        writer = self.drawn(data, "write")
        self.carry_out(self.ledger.commit(writer, identity(self.of[writer]), fault, self.now_s))
        assert (self.doing.get(writer) == "map") == (not fault)

    @precondition(lambda self: self.doing)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        connection = self.drawn(data)
        del self.doing[connection]
        self.carry_out(self.ledger.connection_closed(connection, self.now_s))

    @rule(seconds=st.sampled_from([1.0, 9.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.carry_out(self.ledger.tick(self.now_s))
        assert self.ledger.due_s is None or self.ledger.due_s > self.now_s

    @rule()
    def free(self) -> None:
        self.carry_out(self.ledger.free(-1, ""))

    @invariant()
    def holds(self) -> None:
        self.ledger.validate()
        writers = [self.of[each] for each, what in self.doing.items() if what == "write"]
        assert len(writers) == len(set(writers)), "one writer a model"
        mapped = {self.of[each] for each, what in self.doing.items() if what == "map"}
        assert not mapped.intersection(writers)
        assert len(mapped) <= len(self.kept), "what is mapped is kept"

    def teardown(self) -> None:
        for connection in list(self.doing):
            self.carry_out(self.ledger.connection_closed(connection, self.now_s))
        self.carry_out(self.ledger.tick(self.now_s + LIMITS.keep_s))
        assert not self.kept
        assert self.ledger.used_bytes == 0


TestLedgerMachine = LedgerMachine.TestCase
