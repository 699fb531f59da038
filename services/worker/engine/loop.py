"""EngineLoop: commands in, one step, reports out. It sleeps while there is nothing to do: until a command or an answer
of the kvbm comes, a copy ends, or a time has come.

    the loop     commands, begin │ launch │ exchange blocks, sleep, exchange … │ draw, finish, reports │ commands …
    the device                            │ computes the step ──────────────────────│

Blocks are exchanged while a device computes: what the kvbm and other engines say is handled, copies that have ended are
taken up, and new attempts wait for the next step. All else that comes meanwhile is handled after the step. On a CPU,
which the loop computes on itself, and without a step, everything is done between steps.

The wait for the device has slices of 1 ms and ends before the step's expected end. One sleep until that end made itself
true: a long first step made all later ones as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from services.worker.contracts.messages import EngineCommand, KvbmAsks, KvbmLink, Shutdown, TakeOver
from services.worker.contracts.runner import EmbeddingLookups, Overlaps, Runner
from services.worker.engine.channel import EngineEnd
from services.worker.engine.core import EngineCore, comes_meanwhile
from services.worker.kv_connector.contract import KvbmAsk
from services.worker.kv_connector.socket_client import SocketClient
from services.worker.scheduler.encoder_cache import EncodesImages

USE_INTERVAL_S = 1.0
"""Seconds between two reports of the device's memory, and of what was asked of the kvbm, while steps are computed."""
EXCHANGE_S = 0.002
"""Seconds before the expected end of a step at which the last exchange begins: it and the wait before it are over when
the step is."""
SLICE_S = 0.001
"""Most seconds that the loop sleeps while a step is computed: nothing wakes it when the device is done, and a step can
end long before it is expected to."""


class EngineLoop:
    """Drives a core with a runner and a clock."""

    def __init__(
        self,
        channel: EngineEnd,
        core: EngineCore,
        runner: Runner,
        clock: Callable[[], float],
        kvbm: SocketClient | None = None,
        store: EmbeddingLookups | None = None,
    ) -> None:
        """`kvbm` is the connection of a core that exchanges blocks, `store` has the embeddings of images; the channel
        watches the descriptors of both."""
        self._channel = channel
        self._core = core
        self._runner = runner
        self._clock = clock
        self._kvbm = kvbm
        self._store = store
        self._use_due_s = 0.0
        """When the device's memory and what was asked of the kvbm are reported next."""
        self._idle = False
        """There was nothing to do in the last round."""
        self._begun_s = 0.0
        """When the step under way began."""
        self._commands: deque[EngineCommand] = deque()
        """Commands that came while a step was computed."""
        if core.exchanges and isinstance(runner, Overlaps):
            runner.meanwhile = self._exchange

    def run(self) -> None:
        """Run until Shutdown. Raise what the runner raises."""
        self._channel.send(self._core.opening())
        self._report_use()
        while self._handle_commands():
            self._step()
        self._report_asks()

    def _handle_commands(self) -> bool:
        """Handle the commands that have come. Return False if Shutdown was among them."""
        self._commands.extend(self._channel.receive(self._limit_s()))
        self._hear_kvbm()
        self._take_embeddings()
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Shutdown):
                return False
            assert not isinstance(command, TakeOver), "it serves already"
            for answer in self._core.handle(command, self._clock()):
                self._channel.send(answer)
            self._operate()
        return True

    def _operate(self) -> None:
        """Have the runner do the operation that is due."""
        due = self._core.due_operation()
        if due is not None:
            failed = self._runner.operate(due.operation, due.name, due.path, due.level)
            for report in self._core.operated(failed, self._clock()):
                self._channel.send(report)
            self._report_use()

    def _limit_s(self) -> float | None:
        """Return how long to wait for commands."""
        if not self._idle:
            return 0.0
        until_s = [self._core.wait_until_s, None if self._kvbm is None else self._kvbm.wait_until_s]
        due_s = min([one_s for one_s in until_s if one_s is not None], default=None)
        return None if due_s is None else max(0.0, due_s - self._clock())

    def _hear_kvbm(self) -> None:
        if self._kvbm is not None:
            now_s = self._clock()
            for news in self._kvbm.poll(now_s):
                self._core.handle(news, now_s)

    def _take_embeddings(self) -> None:
        """Take up what was found in the store for images."""
        if self._store is not None:
            assert isinstance(self._runner, EncodesImages)
            for key, stored in self._store.take_found():
                found = stored is not None and self._runner.take_embeddings(key, stored)
                self._core.looked_up(key, found=found)

    def _serve_images(self) -> bool:
        """Look up images in the store, and encode the one that is due for other workers. Return whether there was
        one."""
        if self._store is None:
            return False
        assert isinstance(self._runner, EncodesImages)
        due = self._core.due_image(self._clock())
        if due is not None:
            self._runner.encode_image(due.key, due.pixels)
            self._core.encoded(due)
        for report in self._core.take_encoded():
            self._channel.send(report)
        for key in self._core.take_lookups():
            self._store.look_up(key)
        return due is not None

    def _tell(self, messages: Iterable[KvbmAsk | KvbmLink]) -> bool:
        """Ask the kvbm, and report the link. Return whether there was an answer at once, after which the connector may
        have more to say."""
        answered = False
        for message in messages:
            if isinstance(message, KvbmLink):
                self._channel.send(message)
            elif self._kvbm is not None:
                now_s = self._clock()
                for news in self._kvbm.send(message, now_s):
                    self._core.handle(news, now_s)
                    answered = True
        return answered

    def _step(self) -> None:
        now_s = self._clock()
        reports, works = self._core.begin(now_s)
        for report in reports:
            self._channel.send(report)
        answered = self._tell(self._core.step_connector(now_s))
        encoded = self._serve_images()
        self._idle = works is None and not self._core.busy and not answered and not encoded
        if works is not None:
            self._begun_s = self._clock()
            drawn = self._runner.step(works) if works else []
            ended_s = self._clock()
            for report in self._core.finish(drawn, ended_s - self._begun_s):
                self._channel.send(report)
            if ended_s >= self._use_due_s:
                self._report_use()
        elif self._idle:
            self._report_asks()
        probed = self._core.take_probed()
        if probed is not None:
            self._channel.send(probed)
        self._operate()

    def _exchange(self, computing: Callable[[], bool]) -> None:
        """Exchange blocks while the device computes a step, until shortly before its end."""
        until_s = self._begun_s + self._core.expected_s - EXCHANGE_S
        while True:
            self._hear_kvbm()
            self._tell(self._core.exchange(self._clock()))
            now_s, due_s = self._clock(), self._core.exchange_due_s
            if now_s >= until_s or not computing():
                return
            limit_s = min(SLICE_S, until_s - now_s, inf if due_s is None else due_s - now_s)
            for command in self._channel.receive(max(0.0, limit_s)):
                if comes_meanwhile(command, after_others=bool(self._commands)):
                    self._core.handle(command, self._clock())
                else:
                    self._commands.append(command)

    def _report_use(self) -> None:
        self._use_due_s = self._clock() + USE_INTERVAL_S
        self._report_asks()
        use = self._runner.memory_use()
        if use is not None:
            self._channel.send(use)

    def _report_asks(self) -> None:
        if self._kvbm is not None and (asks := self._kvbm.take_asked()):
            self._channel.send(KvbmAsks(asks))
