"""worker/operations/operations.py: operations in any order, over an engine that fails, dies and answers late."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.contracts.messages import Ready
from services.worker.operations.operations import (
    MOST_LORAS,
    MOST_LOSSES,
    MOST_STARTS,
    AnnounceState,
    AnswerOperation,
    AskEngine,
    AwaitIdle,
    NoteFault,
    OperationAction,
    Operations,
    ReadLora,
    StartEngine,
    StopEngine,
    WorkerState,
)
from shared.lora import make_lora_id, name_of_lora
from shared.messages.people import OperateWorker
from tests.worker.scripted_engine import FACTS

ALL: Ready = msgspec.structs.replace(FACTS, operations=("sleep", "wake", "load_lora", "unload_lora", "clear"))
DIGEST = "0123456789abcdef"
NAMES = ("sql", "law", "med")
OPERATIONS = ("sleep", "wake", "drain", "resume", "clear", "load_lora", "unload_lora")


def lora(name: str) -> str:
    return make_lora_id(name, DIGEST)


def asked(operation: str, name: str = "", level: int = 1) -> OperateWorker:
    path = f"/loras/{name}" if operation == "load_lora" else ""
    return msgspec.convert(
        {"operation": operation, "name": name, "path": path, "level": level, "type": "operate"}, OperateWorker
    )


class WorkerModel:
    """The shell and the engine as the operations should see them, each action carried out when it is given out."""

    def __init__(self, *, by_turns: bool = False) -> None:
        self.operations = Operations("base", by_turns=by_turns)
        self.engine_loras: set[str] = set()
        self.engine_asleep = False
        self.engine_lives = False
        self.engine_wanted = True
        self.losses = 0
        """Engines that were lost in a row."""
        self.shown: tuple[str, tuple[str, ...], bool] = ("", (), False)
        self.answers: list[str] = []
        self.faults: list[str] = []
        self.due: OperationAction | None = None
        """The AwaitIdle, ReadLora or AskEngine that is under way."""
        self.engines = 0
        self.due_engine = 0
        """The number of the engine that lived when `due` was given out. 0 if none did."""

    def seen(self) -> tuple[str, tuple[str, ...], bool]:
        """What routers see: the state, the LoRAs of the card, and whether there is a card."""
        return self.shown

    def now_due(self) -> OperationAction | None:
        return self.due

    def take(self, actions: list[OperationAction]) -> None:
        for action in actions:
            match action:
                case AnnounceState():
                    of = self.operations
                    self.shown = (of.shown_state, of.shown_loras, of.serves)
                case AnswerOperation(failed):
                    self.answers.append(failed)
                case NoteFault(text):
                    self.faults.append(text)
                case StopEngine():
                    self.engine_wanted = False
                    if self.engine_lives:
                        self.losses = -1
                        self.lose()
                case StartEngine():
                    self.engine_wanted = True
                case _:
                    assert self.due is None, "two at a time"
                    self.due = action
                    self.due_engine = self.engines if self.engine_lives else 0

    def start(self) -> None:
        self.engine_lives = True
        self.engines += 1
        self.take(self.operations.engine_ready(ALL))

    def lose(self) -> None:
        self.engine_lives = self.engine_asleep = False
        self.engine_loras.clear()
        self.losses += 1
        self.take(self.operations.engine_lost("it ended", self.losses))
        self.shown = (self.shown[0], self.shown[1], False)  # the shell withdraws the card

    def ask(self, operation: str, name: str = "", level: int = 1) -> str:
        order = asked(operation, name, level)
        refused = self.operations.refusal(order)
        if not refused:
            self.take(self.operations.begin(order))
        return refused

    def do(self, failed: str = "") -> None:
        """Carry out what is due, or let it fail."""
        due, self.due = self.due, None
        match due:
            case AwaitIdle():
                self.take(self.operations.on_idle(failed))
            case ReadLora():
                self.take(self.operations.on_lora_read("" if failed else DIGEST, failed))
            case AskEngine():
                if not self.engine_lives or self.due_engine != self.engines:
                    self.take(self.operations.on_engine("the engine is lost", lost=True))
                    return
                failed = failed or self._engine_refusal(due)
                if not failed:
                    self._engine_does(due)
                self.take(self.operations.on_engine(failed))
            case _:
                raise AssertionError(due)

    def _engine_refusal(self, due: AskEngine) -> str:
        """As engines refuse."""
        match due.operation:
            case "sleep":
                return "the engine sleeps already" if self.engine_asleep else ""
            case "wake":
                return "" if self.engine_asleep else "the engine is awake"
            case _:
                return "the engine is asleep" if self.engine_asleep else ""

    def _engine_does(self, due: AskEngine) -> None:
        match due.operation:
            case "sleep" | "wake":
                self.engine_asleep = due.operation == "sleep"
            case "load_lora":
                assert due.name not in self.engine_loras
                self.engine_loras.add(due.name)
            case "unload_lora":
                self.engine_loras.remove(due.name)
            case _:
                pass

    def settle(self) -> None:
        while self.due is not None:
            self.do()


class OperationsMachine(RuleBasedStateMachine):
    """Any operations, faults and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.world = WorkerModel()
        self.begun = 0

    @initialize(by_turns=st.booleans())
    def begin(self, by_turns: bool) -> None:
        """The worker's model may take turns with others."""
        self.world = WorkerModel(by_turns=by_turns)

    @precondition(lambda self: self.world.engine_wanted and not self.world.engine_lives)
    @rule()
    def start(self) -> None:
        self.world.start()

    @precondition(lambda self: self.world.engine_wanted and not self.world.engine_lives)
    @rule()
    def lose_a_start(self) -> None:
        self.world.lose()

    @precondition(lambda self: self.world.engine_lives)
    @rule()
    def serve_for_a_while(self) -> None:
        self.world.losses = 0

    @precondition(lambda self: self.world.engine_lives)
    @rule(answered=st.booleans())
    def lose(self, answered: bool) -> None:
        """The engine ends, perhaps after it has done what is due and before its answer is looked at."""
        world = self.world
        due = world.due
        world.lose()
        if isinstance(due, AskEngine) and answered:
            world.due = None
            world.take(world.operations.on_engine())

    @precondition(lambda self: isinstance(self.world.due, AskEngine) and self.world.due_engine == self.world.engines)
    @precondition(lambda self: self.world.engine_lives)
    @rule()
    def answer_never(self) -> None:
        """The engine does not answer and is killed; it is reported lost later."""
        world = self.world
        world.due = None
        world.take(world.operations.on_engine("no answer", lost=True))
        world.lose()

    @rule(operation=st.sampled_from(OPERATIONS), name=st.sampled_from(NAMES), level=st.sampled_from((1, 2)))
    def ask(self, operation: str, name: str, level: int) -> None:
        running = self.world.operations.running
        refused = self.world.ask(operation, name, level)
        self.begun += not refused
        assert running is None or "is running; try again" in refused

    @precondition(lambda self: self.world.due is not None)
    @rule()
    def do(self) -> None:
        self.world.do()

    @precondition(lambda self: self.world.due is not None)
    @rule()
    def fail(self) -> None:
        self.world.do("it went wrong")

    @rule()
    def settle(self) -> None:
        """With a living engine and no faults, everything ends where the worker says it is."""
        world = self.world
        world.settle()
        if world.engine_wanted and not world.engine_lives:
            world.start()
            world.settle()
        of = world.operations
        assert of.running is None
        assert world.engine_wanted == (not of.stopped)
        if of.stopped:
            assert (of.state, of.is_busy, of.refusal(asked("wake"))) == (WorkerState.ASLEEP, False, "")
            return
        assert of.state in (WorkerState.SERVING, WorkerState.DRAINED, WorkerState.ASLEEP)
        assert world.engine_asleep == (of.state is WorkerState.ASLEEP)
        if of.state is not WorkerState.ASLEEP:
            assert world.engine_loras == set(of.loras)
        assert of.serves == (of.state is WorkerState.SERVING)

    @invariant()
    def it_never_contradicts_itself(self) -> None:
        world, of = self.world, self.world.operations
        of.validate()
        _state, loras, serves = world.shown
        if serves:
            assert world.engine_lives
            assert not world.engine_asleep
            assert set(loras) <= world.engine_loras
        assert len(world.answers) == self.begun - (of.running is not None)


TestOperations = OperationsMachine.TestCase


def worker() -> WorkerModel:
    world = WorkerModel()
    world.start()
    world.settle()
    assert world.seen() == ("", (), True)
    return world


def test_sleep_withdraws_the_card_first_and_wake_shows_it_last() -> None:
    world = worker()
    assert not world.ask("sleep")
    assert (world.seen(), world.now_due()) == (("draining", (), False), AwaitIdle())
    world.do()
    assert world.now_due() == AskEngine("sleep", level=1)
    assert not world.seen()[2]
    world.do()
    assert (world.seen(), world.answers) == (("asleep", (), False), [""])
    assert not world.ask("wake")
    assert (world.now_due(), world.seen()) == (AskEngine("wake"), ("waking", (), False))
    world.do()
    assert (world.seen(), world.answers) == (("", (), True), ["", ""])


def test_a_worker_whose_model_takes_turns_begins_asleep_and_is_busy_until_then() -> None:
    world = WorkerModel(by_turns=True)
    assert world.operations.is_busy
    world.start()
    assert world.now_due() == AskEngine("sleep", level=2)
    assert world.operations.is_busy
    world.settle()
    assert (world.seen(), world.operations.is_busy) == (("asleep", (), False), False)
    assert not world.ask("wake")
    world.settle()
    assert world.seen() == ("", (), True)


def by_turns() -> WorkerModel:
    """A worker whose model has its turn."""
    world = WorkerModel(by_turns=True)
    world.start()
    world.settle()
    world.ask("wake")
    world.settle()
    assert world.seen() == ("", (), True)
    return world


def test_a_worker_by_turns_falls_asleep_while_its_engine_starts_and_a_wake_starts_one() -> None:
    world = by_turns()
    world.lose()
    assert not world.ask("sleep")
    world.settle()
    assert (world.seen(), world.engine_wanted, world.answers) == (("asleep", (), False), False, ["", ""])
    assert not world.operations.is_busy
    assert world.ask("sleep") == "sleep: the worker is asleep already"
    assert not world.ask("wake")
    assert (world.seen(), world.engine_wanted) == (("waking", (), False), True)
    world.start()
    assert (world.seen(), world.answers) == (("", (), True), ["", "", ""])


def test_a_worker_by_turns_whose_engines_are_lost_in_a_row_falls_asleep_and_a_wake_that_loses_one_fails() -> None:
    world = by_turns()
    for _ in range(MOST_STARTS - 1):
        world.lose()
        assert world.engine_wanted
        world.start()
        world.settle()
        assert world.seen() == ("", (), True)
    world.lose()
    assert (world.seen(), world.engine_wanted) == (("asleep", (), False), False)
    assert world.faults == ["the worker sleeps without an engine: 3 engines in a row were lost: it ended"]
    assert not world.ask("wake")
    world.lose()
    assert (world.seen(), world.engine_wanted) == (("asleep", (), False), False)
    assert world.answers[-1] == "it ended"


def test_an_engine_that_is_lost_as_it_falls_asleep_has_given_way() -> None:
    world = by_turns()
    world.ask("sleep")
    world.do()
    world.lose()
    world.do()
    assert (world.seen(), world.engine_wanted, world.answers) == (("asleep", (), False), False, ["", ""])


def test_a_worker_that_serves_all_the_time_has_its_engine_started_again_and_again() -> None:
    world = worker()
    for _ in range(2 * MOST_STARTS):
        world.lose()
        assert world.engine_wanted
        assert world.ask("sleep") == "sleep: the engine is starting"
        world.start()
    assert world.seen() == ("", (), True)


def test_a_sleep_waits_for_what_runs_as_long_as_it_was_asked_to() -> None:
    world = worker()
    world.take(world.operations.begin(OperateWorker("sleep", drain_s=7.0)))
    assert world.now_due() == AwaitIdle(within_s=7.0)


def test_a_lora_is_read_then_loaded_then_shown_under_its_id() -> None:
    world = worker()
    assert not world.ask("load_lora", "sql")
    assert world.now_due() == ReadLora("/loras/sql")
    world.do()
    assert world.now_due() == AskEngine("load_lora", lora("sql"), "/loras/sql")
    assert world.seen() == ("", (), True)
    world.do()
    assert world.seen() == ("", (lora("sql"),), True)
    assert not world.ask("unload_lora", "sql")
    assert world.now_due() == AwaitIdle(lora("sql"))
    assert world.seen() == ("", (), True)
    world.do()
    world.do()
    assert (world.engine_loras, world.answers) == (set(), ["", ""])


def test_a_lora_whose_files_are_loaded_already_is_loaded_and_other_files_are_refused() -> None:
    world = worker()
    for name in [f"lora-{number}" for number in range(MOST_LORAS - 1)] + ["sql", "sql"]:
        assert not world.ask("load_lora", name)
        world.settle()
    assert world.answers == [""] * (MOST_LORAS + 1)
    assert not world.ask("load_lora", "sql")
    world.take(world.operations.on_lora_read("fedcba9876543210"))
    assert world.answers[-1] == "load_lora: sql is loaded already, from other files; unload it first"
    assert lora("sql") in world.seen()[1]


def test_a_lora_that_is_loaded_again_from_another_directory_is_read_there_by_the_next_engine() -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    world.take(world.operations.begin(OperateWorker("load_lora", "sql", path="/moved")))
    world.settle()
    world.lose()
    world.start()
    assert world.now_due() == AskEngine("load_lora", lora("sql"), "/moved")


def test_an_engine_that_started_while_a_lora_became_idle_is_not_asked_to_unload_it() -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    world.ask("unload_lora", "sql")
    world.lose()
    world.start()
    world.settle()
    assert (world.engine_loras, world.answers, world.seen()) == (set(), ["", ""], ("", (), True))


def test_a_deep_sleep_unloads_the_loras_and_waking_loads_them() -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    world.ask("sleep", level=2)
    world.settle()
    assert world.engine_loras == set()
    world.ask("wake")
    world.settle()
    assert (world.engine_loras, world.seen()) == ({lora("sql")}, ("", (lora("sql"),), True))


def test_a_worker_that_sleeps_goes_back_to_sleep_when_its_engine_was_lost() -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    world.ask("sleep")
    world.settle()
    world.lose()
    world.start()
    assert not world.seen()[2]
    world.settle()
    assert (world.engine_asleep, world.engine_loras, world.seen()[0]) == (True, {lora("sql")}, "asleep")


def test_a_worker_that_does_not_go_back_to_a_deep_sleep_has_its_loras() -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    world.ask("sleep", level=2)
    world.settle()
    world.lose()
    world.start()
    world.do("it cannot")
    world.settle()
    assert world.faults == ["the worker does not go back to sleep: it cannot"]
    assert (world.engine_asleep, world.engine_loras, world.operations.state) == (
        False,
        {lora("sql")},
        WorkerState.DRAINED,
    )


def test_an_engine_that_started_while_an_operation_put_it_to_sleep_is_not_asked_twice() -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    world.ask("sleep")
    world.lose()
    world.start()
    world.settle()
    assert (world.engine_asleep, world.faults, world.answers) == (True, [], ["", ""])
    world.ask("wake")
    world.settle()
    assert world.seen() == ("", (lora("sql"),), True)


def test_a_lora_that_cannot_be_loaded_again_is_gone_and_that_is_logged() -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    world.lose()
    world.start()
    world.do("path: the files have changed")
    assert world.faults == ["the LoRA sql is gone: path: the files have changed"]
    assert world.seen() == ("", (), True)


def test_a_wake_that_fails_leaves_the_worker_asleep_and_may_be_tried_again() -> None:
    world = worker()
    world.ask("sleep")
    world.settle()
    world.ask("wake")
    world.do("no memory")
    assert (world.answers[-1], world.seen()) == ("no memory", ("asleep", (), False))
    assert not world.ask("wake")
    world.settle()
    assert world.seen() == ("", (), True)


def test_a_sleep_that_fails_leaves_the_worker_as_it_was() -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    world.ask("sleep", level=2)
    world.do()
    world.do()
    world.do("it cannot")
    world.settle()
    assert (world.answers[-1], world.seen()) == ("it cannot", ("", (lora("sql"),), True))
    assert world.engine_loras == {lora("sql")}


@pytest.mark.parametrize(
    ("operation", "name", "words"),
    [
        ("load_lora", "a@b", "name: 'a@b' is not 1 to 128 letters"),
        ("load_lora", "base", "name: base is the name of the model"),
        ("unload_lora", "law", "there is no LoRA 'law'"),
        ("wake", "", "the worker is awake"),
        ("resume", "", "the worker serves already"),
    ],
)
def test_what_cannot_begin_is_refused_by_name(operation: str, name: str, words: str) -> None:
    world = worker()
    world.ask("load_lora", "sql")
    world.settle()
    refused = world.ask(operation, name)
    assert refused.startswith(f"{operation}: ")
    assert words in refused


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("sleep", "asleep already"),
        ("drain", "asleep already"),
        ("resume", "asleep; wake it"),
        ("clear", "asleep, and has no cache"),
        ("load_lora", "asleep; wake it first"),
        ("unload_lora", "asleep; wake it first"),
    ],
)
def test_a_worker_that_sleeps_can_only_wake(operation: str, words: str) -> None:
    world = worker()
    world.ask("sleep")
    world.settle()
    assert words in world.ask(operation, "sql")


def test_a_level_of_sleep_that_there_is_not_is_refused() -> None:
    assert worker().ask("sleep", level=3) == "sleep: level 3: there are 1 and 2"


def test_an_engine_that_cannot_do_it_is_not_asked() -> None:
    world = WorkerModel()
    world.engine_lives = True
    world.take(world.operations.engine_ready(FACTS))
    for operation in ("sleep", "wake", "clear", "load_lora", "unload_lora"):
        assert world.ask(operation, "sql") == f"{operation}: this engine cannot do it"
    assert not world.ask("drain")
    world.settle()
    assert world.seen()[0] == "drained"


def test_without_an_engine_nothing_begins() -> None:
    assert WorkerModel().ask("drain") == "drain: the engine is starting"


def test_the_number_of_loras_is_bounded() -> None:
    world = worker()
    for number in range(MOST_LORAS):
        assert not world.ask("load_lora", f"lora-{number}")
        world.settle()
    assert f"{MOST_LORAS} LoRAs are loaded; unload one first" in world.ask("load_lora", "one-more")
    assert len({name_of_lora(each) for each in world.operations.loras}) == MOST_LORAS


def test_a_lora_that_no_engine_survives_is_given_up() -> None:
    world = worker()
    assert not world.ask("load_lora", "sql")
    world.settle()
    assert world.seen() == ("", (lora("sql"),), True)
    world.lose()
    for _ in range(MOST_LOSSES):
        world.start()
        assert world.now_due() == AskEngine("load_lora", lora("sql"), "/loras/sql")
        world.lose()
        world.due = None
        world.take(world.operations.on_engine("the engine is lost", lost=True))
    assert [each for each in world.faults if "engines ended while loading it" in each]
    world.start()
    world.settle()
    assert world.seen() == ("", (), True)
