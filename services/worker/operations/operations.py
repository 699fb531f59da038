"""Operations: what may be done with a worker as a whole, and in which order. Pure.

                drain: idle                sleep: the engine sleeps
    serving ──▶ draining ──▶ drained ─▶ falling asleep ──▶ asleep
       ▲  ▲                    │                             │
       │  └─────── resume ─────┘                             │ wake
       └──────────────── waking ◀────────────────────────────┘

`sleep` passes through draining, from serving; a sleep that fails goes back to where it began. Every state has a set of
LoRAs. A worker shows its card only while it serves: the card goes first and comes last.

When an engine was lost, the next one gets the LoRAs again before the card is shown, and a worker that slept goes back
to sleep. Before a sleep of level 2, which drops all weights, the engine unloads the LoRAs; it loads them again when it
wakes. One operation runs at a time; another one is refused meanwhile.

A worker whose model takes turns with others (docs/model_turns.md) begins asleep: its first engine is put to sleep like
one that follows a lost one. Its device is for all models. So it also falls asleep without its engine, which is stopped:

- if it is sent to sleep while its engine is starting, or its engine is lost as it falls asleep;
- by itself, if MOST_STARTS engines in a row were lost.

A wake then starts one engine, and fails if that is lost.

The shell reads the files of a LoRA before the engine does, since their digest is part of the LoRA's id
(`shared/lora.py`). It reads them again before it has them loaded again: a LoRA whose files have changed is gone.

Another operation is not queued, since its sender could not know in which state it will begin. Nothing is written to
disk: a worker that is started again is as its settings say.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from services.worker.contracts.messages import EngineOperation, Ready
from shared.lora import NAME_RULE, is_lora_name, make_lora_id, name_of_lora
from shared.messages.people import OperateWorker, WorkerOperation

MOST_LORAS = 64
"""Most LoRAs that a worker serves at once."""
MOST_LOSSES = 3
"""Engines that may be lost while they load a LoRA again, before it is given up."""
MOST_STARTS = 3
"""Engines in a row that may be lost before a worker whose model takes turns falls asleep by itself."""
MOST_PATH_CHARACTERS = 4096
"""Length of the longest path of a LoRA."""


class WorkerState(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


_SHOWN = {
    WorkerState.SERVING: "",
    WorkerState.DRAINING: "draining",
    WorkerState.DRAINED: "drained",
    WorkerState.FALLING_ASLEEP: "drained",
    WorkerState.ASLEEP: "asleep",
    WorkerState.WAKING: "waking",
}

# --- actions


class AnnounceState(Struct, frozen=True):
    """Publish the card, or withdraw it, and publish the state."""


class AwaitIdle(Struct, frozen=True):
    """Wait until no attempt runs, and hand those back that take too long; then call `on_idle`."""

    lora: str = ""
    """Wait for the attempts with this LoRA only. Empty means for all."""
    within_s: float | None = None
    """The seconds after which they are handed back. None means those of the worker's settings."""


class ReadLora(Struct, frozen=True):
    """Check the files of a LoRA, and compute their digest; then call `on_lora_read`."""

    path: str


class AskEngine(Struct, frozen=True):
    """Have the engine that lives now do it; then call `on_engine`. After `load_lora`, and also before it if the LoRA
    was loaded earlier, read the files again: if their digest is not that of the id, or they cannot be read, that is
    the answer, and the engine is not asked or unloads the LoRA."""

    operation: EngineOperation
    name: str = ""
    """Id of the LoRA."""
    path: str = ""
    level: int = 1


class StopEngine(Struct, frozen=True):
    """End the engine, if there is one, and start no other before StartEngine."""


class StartEngine(Struct, frozen=True):
    """Start an engine again; `engine_ready` or `engine_lost` follows. If it takes too long, end it."""


class AnswerOperation(Struct, frozen=True):
    """Answer the operation that runs: it was done, unless `failed` says why not."""

    failed: str = ""


class NoteFault(Struct, frozen=True):
    """Log what went wrong without anybody having asked."""

    text: str


OperationAction = (
    AnnounceState | AwaitIdle | ReadLora | AskEngine | StopEngine | StartEngine | AnswerOperation | NoteFault
)


class Operations:
    """The state of one worker. Events return the actions that follow. AwaitIdle, ReadLora and AskEngine come one at a
    time."""

    def __init__(self, model: str, *, by_turns: bool = False) -> None:
        """Create those of a worker whose engine starts. With `by_turns` its model takes turns with others: it serves
        only once it was woken."""
        self._model = model
        self._by_turns = by_turns
        self.state = WorkerState.ASLEEP if by_turns else WorkerState.SERVING
        self._before = WorkerState.SERVING
        """State to which a sleep or a drain that fails goes back."""
        self._level = 2 if by_turns else 1
        """Level of the sleep."""
        self._facts: Ready | None = None
        """What the engine says; None without one."""
        self.loras: dict[str, str] = {}
        """Id → directory of each LoRA that the worker is to serve."""
        self._held: set[str] = set()
        """The LoRAs that the engine has loaded."""
        self._losses: dict[str, int] = {}
        """LoRA → engines that were lost in a row while they loaded it again."""
        self._engine_sleeps = False
        """Whether the engine that lives sleeps."""
        self._leaving = ""
        """The LoRA that is being unloaded: no card names it."""
        self.running: OperateWorker | None = None
        """The operation that runs."""
        self._restoring = False
        """Whether a new engine is being brought to the state of the worker."""
        self._restore_due = False
        """Whether that begins when the operation has ended."""
        self._plan: list[AskEngine] = []
        """What the engine is still to do; the first one is under way."""
        self._step_lost = False
        """Whether the engine that the step under way is for has ended."""
        self._failed = ""
        self._was_ready = False
        """Whether any engine was ready once: only then can the worker be woken."""
        self.stopped = ""
        """Why there is no engine, and none is started. Empty if one is to be there."""
        self._stop_due = ""
        """Why that begins when the step under way has ended. Empty if it does not."""
        self._starts = False
        """Whether a wake waits for an engine that starts."""

    @property
    def serves(self) -> bool:
        """Whether the worker takes requests."""
        starting = self._facts is None or self._restoring or self._restore_due
        return self.state is WorkerState.SERVING and not starting

    @property
    def is_busy(self) -> bool:
        """Whether an operation would be refused for now alone."""
        starting = self._facts is None and not self.stopped
        return self.running is not None or starting or self._restoring

    @property
    def shown_state(self) -> str:
        """The state for the address book: draining, drained, asleep or waking; empty while it serves or starts."""
        return _SHOWN[self.state]

    @property
    def shown_loras(self) -> tuple[str, ...]:
        """The ids of the LoRAs for the card."""
        return tuple(sorted(each for each in self.loras if each in self._held and each != self._leaving))

    @property
    def known_loras(self) -> tuple[str, ...]:
        """The ids of the LoRAs that the worker serves, or will when it is awake."""
        return tuple(sorted(each for each in self.loras if each != self._leaving))

    # --- an operation from outside

    def refusal(self, asked: OperateWorker, unanswered: WorkerOperation | None = None) -> str:
        """Return why an operation cannot begin. Empty if it can. `unanswered` is the operation whose answer is still to
        come, if there is one: it may be done, and wait until discovery has the card."""
        if unanswered is None and self.running is not None:
            unanswered = self.running.operation
        why = f"{unanswered} is running; try again when it has ended" if unanswered else self._refusal(asked)
        return f"{asked.operation}: {why}" if why else ""

    def _refusal(self, asked: OperateWorker) -> str:
        operation, facts = asked.operation, self._facts
        if self._restoring or (facts is None and not self._needs_no_engine(operation)):
            return "the engine is starting"
        if facts is not None and operation not in ("drain", "resume") and operation not in facts.operations:
            return "this engine cannot do it"
        asleep, drained = self.state is WorkerState.ASLEEP, self.state is WorkerState.DRAINED
        match operation:
            case "sleep":
                if asleep:
                    return "the worker is asleep already"
                if facts is not None and "wake" not in facts.operations:
                    return "this engine could not wake again"
                return "" if asked.level in (1, 2) else f"level {asked.level}: there are 1 and 2"
            case "wake":
                return "" if asleep else "the worker is awake"
            case "drain":
                return f"the worker is {self.state.value} already" if asleep or drained else ""
            case "resume":
                return "the worker is asleep; wake it" if asleep else "" if drained else "the worker serves already"
            case "clear" if asleep:
                return "the worker is asleep, and has no cache"
            case "clear":
                return ""
            case "load_lora" | "unload_lora" if asleep:
                return "the worker is asleep; wake it first"
            case "load_lora":
                return self._lora_fault(asked)
            case "unload_lora":
                return "" if self._id_of(asked.name) else f"there is no LoRA {asked.name[:128]!r}"

    def _needs_no_engine(self, operation: WorkerOperation) -> bool:
        """Return whether the worker can do it, or refuse it, although there is no engine."""
        gives_way = self._by_turns and operation == "sleep" and self.state is WorkerState.SERVING
        return gives_way or bool(self.stopped)

    def _id_of(self, name: str) -> str:
        """Return the id of the LoRA with a name. Empty if there is none."""
        return next((each for each in self.loras if name_of_lora(each) == name), "")

    def _lora_fault(self, asked: OperateWorker) -> str:
        if not is_lora_name(asked.name):
            return f"name: {asked.name[:128]!r} is not {NAME_RULE}"
        if asked.name == self._model:
            return f"name: {asked.name} is the name of the model"
        if len(self.loras) >= MOST_LORAS and not self._id_of(asked.name):
            return f"{MOST_LORAS} LoRAs are loaded; unload one first"
        if not asked.path.startswith("/") or "\0" in asked.path:
            return "path: not an absolute path"
        if len(asked.path) > MOST_PATH_CHARACTERS:
            return f"path: longer than {MOST_PATH_CHARACTERS} characters"
        return ""

    def begin(self, asked: OperateWorker) -> list[OperationAction]:
        """Begin an operation that `refusal` has nothing against."""
        assert not self.refusal(asked)
        self.running, self._failed = asked, ""
        match asked.operation:
            case "sleep" | "drain":
                self._before = self.state
                self._level = asked.level if asked.operation == "sleep" else self._level
                self.state = WorkerState.DRAINING
                return [AnnounceState(), AwaitIdle(within_s=asked.drain_s)]
            case "resume":
                return self._finish()
            case "wake":
                self.state = WorkerState.WAKING
                if self.stopped:
                    self.stopped, self._starts = "", True
                    return [AnnounceState(), StartEngine()]
                return [AnnounceState(), *self._follow([AskEngine("wake"), *self._loads()])]
            case "clear":
                return self._follow([AskEngine("clear")])
            case "load_lora":
                return [ReadLora(asked.path)]
            case "unload_lora":
                self._leaving = self._id_of(asked.name)
                return [AnnounceState(), AwaitIdle(self._leaving)]

    # --- what became of the actions

    def on_idle(self, failed: str = "") -> list[OperationAction]:
        """The wait is over: nothing runs, unless `failed` says why something still does."""
        assert self.running is not None
        if failed or self.running.operation == "drain":
            self._failed = failed
            return self._finish()
        if self.running.operation == "unload_lora":
            held = self._leaving in self._held  # an engine that started meanwhile does not hold it
            return self._follow([AskEngine("unload_lora", self._leaving)] if held else [])
        self.state = WorkerState.FALLING_ASLEEP
        if self._facts is None and self._by_turns:
            return self._stop("it was sent to sleep while it started")
        unloads = [AskEngine("unload_lora", name) for name in sorted(self._held)] if self._level == 2 else []
        return self._follow([*unloads, AskEngine("sleep", level=self._level)])

    def on_lora_read(self, digest: str, failed: str = "") -> list[OperationAction]:
        """The files were read, unless `failed` says why not."""
        assert self.running is not None
        if failed:
            self._failed = f"load_lora: {failed}"
            return self._finish()
        name, loaded = make_lora_id(self.running.name, digest), self._id_of(self.running.name)
        if not loaded:
            return self._follow([AskEngine("load_lora", name, self.running.path)])
        if loaded == name:
            self.loras[name] = self.running.path  # the next engine reads them there
        else:
            self._failed = f"load_lora: {self.running.name} is loaded already, from other files; unload it first"
        return self._follow([])

    def on_engine(self, failed: str = "", *, lost: bool = False) -> list[OperationAction]:
        """The engine has answered; `lost`: it never will, and no engine is asked before the next `engine_ready`."""
        step, rest = self._plan[0], self._plan[1:]
        if lost or self._step_lost:  # also where its answer came just before its end
            if not self._step_lost:
                self._forget_engine()
            if self._by_turns and self.state is WorkerState.FALLING_ASLEEP:  # what it held is free
                return self._stop(failed or "it was lost as it fell asleep")
            if self._restoring and self._stop_due:
                return [*self._count_lost(step), *self._stop(self._stop_due)]
            self._failed = failed or "the engine was lost"
            return [*self._count_lost(step), *self._follow([])]
        if not failed:
            match step.operation:
                case "load_lora":
                    self._held.add(step.name)
                    self._losses.pop(step.name, None)
                    self.loras.setdefault(step.name, step.path)
                case "unload_lora":
                    self._held.discard(step.name)
                case "sleep" | "wake":
                    self._engine_sleeps = step.operation == "sleep"
                case _:
                    pass
            return self._follow(rest)
        if step.operation == "load_lora" and step.name in self.loras:  # again, after a loss or a sleep
            del self.loras[step.name]
            return [NoteFault(f"the LoRA {name_of_lora(step.name)} is gone: {failed}"), *self._follow(rest)]
        if self._restoring:
            self.state = WorkerState.DRAINED
            return [NoteFault(f"the worker does not go back to sleep: {failed}"), *self._follow(self._loads())]
        self._failed = failed
        return self._follow(self._loads() if self.state is WorkerState.FALLING_ASLEEP else [])

    def _count_lost(self, step: AskEngine) -> list[OperationAction]:
        """An engine was lost while it did this. Give up a LoRA that several engines in a row did not survive: otherwise
        none would ever serve."""
        if step.operation != "load_lora" or step.name not in self.loras:
            return []
        self._losses[step.name] = self._losses.get(step.name, 0) + 1
        if self._losses[step.name] < MOST_LOSSES:
            return []
        del self.loras[step.name], self._losses[step.name]
        return [NoteFault(f"the LoRA {name_of_lora(step.name)} is gone: {MOST_LOSSES} engines ended while loading it")]

    def engine_ready(self, facts: Ready) -> list[OperationAction]:
        """An engine has started."""
        if self.stopped:  # it will be ended
            return []
        self._facts = facts
        self._was_ready, self._stop_due = True, ""
        if self._starts:
            self._starts = False
            return self._follow(self._loads())
        if self.running is not None or self._restoring:
            self._restore_due = True
            return []
        return self._restore()

    def engine_lost(self, reason: str = "", in_a_row: int = 0) -> list[OperationAction]:
        """The engine has ended, and with it all that it held. It is the last one of `in_a_row`; 0 if it was stopped."""
        self._forget_engine()
        if self._starts and in_a_row:  # else it is one that was stopped before
            self._starts = False
            self._failed = reason or "the engine was lost"
            return self._stop(self._failed)
        if not (self._by_turns and self._was_ready and in_a_row >= MOST_STARTS) or self.stopped:
            return []
        why = f"{in_a_row} engines in a row were lost: {reason}"
        if self._restoring:
            self._stop_due = why
        if self._restoring or self.running is not None or self.state not in (WorkerState.SERVING, WorkerState.ASLEEP):
            return []
        self.state = WorkerState.ASLEEP
        return [NoteFault(f"the worker sleeps without an engine: {why}"), *self._stop(why)]

    def _forget_engine(self) -> None:
        self._facts = None
        self._held.clear()
        self._engine_sleeps = self._restore_due = False
        self._step_lost = True

    def _stop(self, why: str) -> list[OperationAction]:
        """End what runs, with the worker asleep and without an engine."""
        self._forget_engine()
        self.stopped, self._stop_due, self._plan, self._level = why, "", [], 2
        return [StopEngine(), *self._finish()]

    # --- steps

    def _loads(self) -> list[AskEngine]:
        return [AskEngine("load_lora", name, path) for name, path in self.loras.items() if name not in self._held]

    def _restore(self) -> list[OperationAction]:
        self._restore_due, self._restoring = False, True
        if self._engine_sleeps:  # it was lost before an operation put the next one to sleep
            return self._follow([])
        asleep = self.state is WorkerState.ASLEEP
        loads = [] if asleep and self._level == 2 else self._loads()
        return self._follow([*loads, *([AskEngine("sleep", level=self._level)] if asleep else [])])

    def _follow(self, plan: list[AskEngine]) -> list[OperationAction]:
        """Go on with a plan; at its end, end the operation."""
        self._plan, self._step_lost = plan, self._facts is None
        return [plan[0]] if plan else self._finish()

    def _finish(self) -> list[OperationAction]:
        ended, failed, self.running, self._failed = self.running, self._failed, None, ""
        self._restoring = False
        answer: list[OperationAction] = [] if ended is None else [AnswerOperation(failed)]
        match ended and ended.operation:
            case "sleep":
                self.state = self._before if failed else WorkerState.ASLEEP
            case "drain":
                self.state = self._before if failed else WorkerState.DRAINED
            case "wake":
                self.state = WorkerState.ASLEEP if failed else WorkerState.SERVING
            case "resume":
                self.state = WorkerState.SERVING
            case "unload_lora":
                if not failed:
                    del self.loras[self._leaving]
                    self._losses.pop(self._leaving, None)
                self._leaving = ""
            case _:
                pass
        return [AnnounceState(), *answer, *(self._restore() if self._restore_due else [])]

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert len(self.loras) <= MOST_LORAS
        assert set(self.shown_loras) <= self.loras.keys()
        assert self.running is None or not self._restoring
        between = self.state in (WorkerState.DRAINING, WorkerState.FALLING_ASLEEP, WorkerState.WAKING)
        assert not between or self.running is not None
        assert not self._plan or self.running is not None or self._restoring
        assert not self._leaving or self.running is not None
        assert not self.serves or self._facts is not None
        assert self._facts is not None or not (self._held or self._engine_sleeps)
        assert len({name_of_lora(each) for each in self.loras}) == len(self.loras)
        assert not self.serves or not self._engine_sleeps
        assert not self.stopped or (self._by_turns and self._facts is None and self.state is WorkerState.ASLEEP)
        assert not self._starts or (self._facts is None and self.state is WorkerState.WAKING)
