"""PictureQueue: which pictures an engine computes, and which of them together. Pure.

    Submit ──add──▶ waiting ──take_group──▶ running: steps ──leave_turn──▶ its files are written ──finish──┐
                       │                       │                                   │                       ▼
                       │                       │                                   │        sending: pieces of the file
                       ▼                       ▼                                   ▼                       ▼
                     ended: cancelled, too late, or not begun in time           ended                    ended

A group is computed as one batch: pictures of the same size, number of steps and guidance, each with noise of its own. A
picture that is made from images is a group by itself. A group does not change once it has begun, but ends when none of
its pictures is wanted any longer. Groups take turns, a step each, so that a picture of few steps does not wait for one
of many. If a group of several fails, as for want of memory, each of its pictures waits again and is computed alone.

While groups run, another one begins only with all that waits for its batch, or with a whole batch: a full queue would
otherwise be computed in small batches for ever, since each place that gets free would be taken at once.

A file is sent in pieces of PIECE_BYTES, one a report, so that no frame nears the payload limit of a NATS server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from services.worker.contracts.messages import Begun, EngineLoad, Submit
from services.worker.scheduler.outcome import Outcome
from shared.messages.frames import NOT_BEGUN, FinishReason, Part, PicturePiece
from shared.messages.generate import Picture

PIECE_BYTES = 256 << 10
"""Most bytes of a file in one report."""

MOST_WRITTEN = 4
"""Groups whose files are being written, at which no other one begins."""

Name = tuple[str, int]
"""An attempt's name: (request, attempt)."""


class _Attempt(Struct):
    submit: Submit
    arrived_s: float
    deadline_s: float
    begin_by_s: float | None
    begun_s: float = 0.0
    """When its group began. 0 before."""
    group: int = 0
    """The number of its group. 0 before."""
    step: int = 0
    failed_together: bool = False
    """Whether a group of several has failed that it was part of."""
    told: bool = False
    """True once it has had a part."""
    file: bytes | None = None
    """Its file, once it is complete."""
    sent: int = 0
    """The bytes of it that were sent."""

    @property
    def picture(self) -> Picture:
        assert self.submit.picture is not None, "the shell has checked it"
        return self.submit.picture

    @property
    def is_alone(self) -> bool:
        """Whether no other picture is computed with it."""
        return self.failed_together or bool(self.picture.images)


def compatible(one: Picture, other: Picture) -> bool:
    """Return whether two pictures can be computed in one batch."""
    return _kind(one) == _kind(other)


def _kind(picture: Picture) -> tuple[object, ...]:
    size = (picture.width, picture.height, picture.frames)
    return (*size, picture.steps, picture.guidance, bool(picture.negative))


class PictureQueue:
    """All attempts of one engine. Times are seconds on one clock."""

    def __init__(self, *, most_running: int, most_together: int) -> None:
        """`most_running` bounds the pictures of all groups, `most_together` those of one."""
        self._most_running = most_running
        self._most_together = most_together
        self._attempts: dict[Name, _Attempt] = {}
        self._groups: dict[int, list[Name]] = {}
        """The number of a group → its attempts, in the order of the batch. Those that have ended stay in it."""
        self._turns: deque[int] = deque()
        """The groups in the order in which they take turns."""
        self._begun_groups = 0
        self._outcome = Outcome()
        self.made = self.steps = 0

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, submit: Submit, now_s: float) -> None:
        """Add an attempt that waits."""
        begin_by_s = None if submit.wait_left_s is None else now_s + submit.wait_left_s
        self._attempts[submit.request, submit.attempt] = _Attempt(submit, now_s, now_s + submit.time_left_s, begin_by_s)

    def cancel(self, name: Name) -> None:
        """End an attempt at its frontend's wish. Unknown ones are ignored."""
        self._end(name, "cancelled")

    def expire(self, now_s: float) -> None:
        """End the attempts that are too late, and those that did not begin in time."""
        for name, attempt in list(self._attempts.items()):
            if attempt.deadline_s <= now_s:
                self._end(name, "deadline")
            elif not attempt.group and attempt.begin_by_s is not None and attempt.begin_by_s <= now_s:
                self._end(name, "error", f"{NOT_BEGUN}: pictures that are computed: {self.running}")

    def due_s(self) -> float | None:
        """Return when `expire` has something to do, unless attempts come or go. None if never."""
        times = [attempt.deadline_s for attempt in self._attempts.values()]
        times += [
            attempt.begin_by_s
            for attempt in self._attempts.values()
            if attempt.begin_by_s is not None and not attempt.group
        ]
        return min(times, default=None)

    @property
    def running(self) -> int:
        """The number of pictures in groups that take turns, also of those that are not wanted any longer."""
        return sum(len(self._groups[group]) for group in self._turns)

    def take_group(self, now_s: float) -> tuple[int, list[Picture]] | None:
        """Begin the next group: the first attempt that waits, by priority and then by arrival, and those that can be
        computed with it. Return its number and its pictures. None if nothing waits, or there is no room."""
        room = min(self._most_together, self._most_running - self.running)
        if len(self._groups) - len(self._turns) >= MOST_WRITTEN:
            return None
        waiting = [name for name, attempt in self._attempts.items() if not attempt.group]
        if room < 1 or not waiting:
            return None
        waiting.sort(key=lambda name: (-self._attempts[name].submit.priority, self._attempts[name].submit.number))
        names = self._batch_of(waiting)
        if len(names) > room and self._turns:
            return None
        names = names[:room]
        self._begun_groups += 1
        for name in names:
            self._attempts[name].group, self._attempts[name].begun_s = self._begun_groups, now_s
        self._groups[self._begun_groups] = names
        self._turns.append(self._begun_groups)
        return self._begun_groups, [self._attempts[name].picture for name in names]

    def _batch_of(self, waiting: Sequence[Name]) -> list[Name]:
        """Return the first attempt of those that wait, and those that can be computed with it."""
        first = self._attempts[waiting[0]]
        if first.is_alone:
            return [waiting[0]]
        others = ((name, self._attempts[name]) for name in waiting)
        names = [name for name, one in others if not one.is_alone and compatible(first.picture, one.picture)]
        return names[: self._most_together]

    def next_turn(self) -> int | None:
        """Return the group whose turn it is. None if no group runs."""
        if not self._turns:
            return None
        self._turns.rotate(-1)
        return self._turns[-1]

    def is_wanted(self, group: int) -> bool:
        """Return whether any picture of a group is wanted."""
        return any(self._member(group, name) for name in self._groups[group])

    def record_step(self, group: int, step: int, previews: Sequence[bytes]) -> None:
        """Record that a group has ended its step number `step`. `previews` has one for each picture, perhaps empty."""
        self.steps += len(self._groups[group])
        for name, preview in zip(self._groups[group], previews, strict=True):
            if (attempt := self._member(group, name)) is not None:
                attempt.step = min(step, attempt.picture.steps)
                self._add_part(attempt, PicturePiece(attempt.step, preview=preview))

    def leave_turn(self, group: int) -> None:
        """Record that a group's steps have ended; its files are being written meanwhile."""
        self._turns.remove(group)

    def finish(self, group: int, files: Sequence[bytes | str], now_s: float) -> None:
        """Record that a group has ended; `files` has one for each picture, or the reason why there is none. They are
        sent with `send_piece`."""
        for name, file in zip(self._groups[group], files, strict=True):
            if (attempt := self._member(group, name)) is None:
                continue
            if isinstance(file, str):
                self._end(name, "error", file)
            else:
                attempt.file = file
                times = (attempt.begun_s - attempt.arrived_s, now_s - attempt.begun_s)
                self._outcome.begun.append(Begun(attempt.submit.number, *times))
                self.made += 1
        self.drop(group)

    def fail(self, group: int, reason: str) -> None:
        """End a group that cannot be computed. Pictures of a group of several wait to be computed alone instead."""
        names = self._groups[group]
        for name in names:
            if (attempt := self._member(group, name)) is None:
                continue
            if len(names) > 1:
                attempt.failed_together, attempt.group, attempt.step, attempt.begin_by_s = True, 0, 0, None
            else:
                self._end(name, "error", reason)
        self.drop(group)

    def drop(self, group: int) -> None:
        """Forget a group that is not computed any longer."""
        del self._groups[group]
        if group in self._turns:
            self._turns.remove(group)

    @property
    def sends(self) -> bool:
        """Whether a piece of a file is to be sent."""
        return any(attempt.file is not None for attempt in self._attempts.values())

    def send_piece(self) -> None:
        """Add the next piece of one file to the outcome; the last one ends its attempt."""
        found = next((one for one in self._attempts.items() if one[1].file is not None), None)
        if found is None:
            return
        name, attempt = found
        assert attempt.file is not None
        content = attempt.file[attempt.sent : attempt.sent + PIECE_BYTES]
        piece = PicturePiece(attempt.picture.steps, attempt.sent, content)
        attempt.sent += len(content)
        if attempt.sent == len(attempt.file):
            del self._attempts[name]
            self._add_part(attempt, piece, "stop")
        else:
            self._add_part(attempt, piece)

    def take_outcome(self) -> Outcome:
        """Return what happened since the last call."""
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def load(self, *, block_size: int, steps_per_s: float) -> EngineLoad:
        """Return the load. Its tokens are steps of single pictures, and its blocks hold those of pictures that run."""
        waiting = [attempt for attempt in self._attempts.values() if not attempt.group]
        living = [attempt for attempt in self._attempts.values() if attempt.group]
        return EngineLoad(
            waiting=len(waiting),
            running=len(living),
            waiting_tokens=sum(attempt.picture.steps - attempt.step for attempt in self._attempts.values()),
            held_blocks=sum(-(-attempt.picture.steps // block_size) for attempt in living),
            prefill_tokens_per_s=steps_per_s,
            pictures=self.made,
            picture_steps=self.steps,
        )

    def _member(self, group: int, name: Name) -> _Attempt | None:
        """Return an attempt of a group that is still wanted. None if it has ended."""
        attempt = self._attempts.get(name)
        return attempt if attempt is not None and attempt.group == group else None

    def _end(self, name: Name, finish: FinishReason, error: str = "") -> None:
        attempt = self._attempts.pop(name, None)
        if attempt is not None:
            self._add_part(attempt, None, finish, error)

    def _add_part(
        self, attempt: _Attempt, piece: PicturePiece | None, finish: FinishReason | None = None, error: str = ""
    ) -> None:
        submit = attempt.submit
        part = Part(submit.request, submit.attempt, 0, b"", finish, error=error, picture=piece)
        if attempt.told and finish is None:
            self._outcome.add_between(submit.frontend, part, submit.number, 0)
        else:
            self._outcome.add_boundary(submit.frontend, part)
        attempt.told = True

    def validate(self) -> None:
        """Raise AssertionError if the parts contradict each other."""
        assert self.running <= self._most_running
        assert set(self._turns) <= self._groups.keys()
        assert len(self._turns) == len(set(self._turns))
        assert len(self._groups) - len(self._turns) <= MOST_WRITTEN + self._most_running
        for group, names in self._groups.items():
            assert 1 <= len(names) <= self._most_together
            assert 1 <= group <= self._begun_groups
        for name, attempt in self._attempts.items():
            assert (attempt.file is not None) == bool(attempt.group and attempt.group not in self._groups)
            assert attempt.file is None or attempt.sent < len(attempt.file)
            assert not attempt.group or attempt.file is not None or name in self._groups[attempt.group]
