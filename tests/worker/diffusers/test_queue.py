from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from services.worker.contracts.messages import Submit
from services.worker.diffusers.queue import MOST_WRITTEN, PIECE_BYTES, PictureQueue, compatible
from shared.messages.frames import NOT_BEGUN, Part
from shared.messages.generate import Picture, Sampling

PICTURE = Picture("a mill", 64, 64, 4, 0)


def submit(number: int, picture: Picture = PICTURE, **more: Any) -> Submit:
    tokens = b"\0\0\0\0" * picture.steps
    fields: dict[str, Any] = {"time_left_s": 60.0, "number": number, "picture": picture} | more
    return Submit(f"r{number}", 1, "f1", tokens, picture.steps, Sampling(1), **fields)


def queue(*, running: int = 4, together: int = 2) -> PictureQueue:
    return PictureQueue(most_running=running, most_together=together)


def parts(one: PictureQueue) -> list[Part]:
    found = one.take_outcome().parts
    return [part for each in found.values() for part in each]


def begin(one: PictureQueue, now_s: float = 0.0) -> tuple[int, int]:
    """The number of the next group, and of its pictures."""
    taken = one.take_group(now_s)
    assert taken is not None
    return taken[0], len(taken[1])


def test_pictures_of_the_same_kind_are_computed_together_and_others_are_not() -> None:
    one = queue(together=3)
    kinds: list[dict[str, Any]] = [
        {},
        {"width": 128},
        {"prompt": "b", "seed": 9},
        {"steps": 5},
        {"guidance": 2.0},
        {"negative": "x"},
    ]
    for number, kind in enumerate(kinds):
        one.add(submit(number, replace(PICTURE, **kind)), 0)
    assert [begin(one)[1] for _ in range(3)] == [2, 1, 1]
    assert one.take_group(0.0) is None, "four run"
    assert compatible(PICTURE, Picture("other", 64, 64, 4, 7, format="webp"))


def test_the_first_by_priority_and_then_by_arrival_begins() -> None:
    one = queue(running=1)
    for number, priority in ((1, 0), (2, 5), (3, 5)):
        one.add(submit(number, priority=priority), 0)
    group, _ = begin(one)
    one.record_step(group, 1, [b""])
    assert [part.request for part in parts(one)] == ["r2"]


def test_groups_take_turns_a_step_each() -> None:
    one = queue(together=1)
    for number in range(3):
        one.add(submit(number), 0)
    groups = [begin(one)[0] for _ in range(3)]
    assert [one.next_turn() for _ in range(6)] == groups * 2


def test_a_picture_of_a_batch_for_which_there_is_no_file_ends_alone() -> None:
    one = queue()
    for number in (1, 2):
        one.add(submit(number), 0)
    group, _ = begin(one)
    one.leave_turn(group)
    one.finish(group, ["it is black", b"file"], 1.0)
    one.validate()
    while one.sends:
        one.send_piece()
    ends = {part.request: (part.finish, part.error) for part in parts(one)}
    assert ends == {"r1": ("error", "it is black"), "r2": ("stop", "")}
    assert one.made == 1


def test_a_file_is_sent_in_pieces_and_the_last_one_ends_the_attempt() -> None:
    one = queue()
    one.add(submit(1), 0)
    group, _ = begin(one, 2.0)
    one.record_step(group, 1, [b"preview"])
    file = bytes(range(256)) * (PIECE_BYTES // 128) + b"end"
    one.finish(group, [file], 5.0)
    while one.sends:
        one.send_piece()
    outcome = one.take_outcome()
    first, *pieces = outcome.parts["f1"]
    assert first.picture is not None
    assert (first.picture.step, first.picture.preview, first.finish) == (1, b"preview", None)
    found = b""
    for part in pieces:
        assert part.picture is not None
        assert part.picture.first == len(found)
        assert len(part.picture.content) <= PIECE_BYTES
        found += part.picture.content
    assert found == file
    assert [part.finish for part in pieces] == [None, None, "stop"]
    assert outcome.boundary_parts == [first, pieces[-1]]
    assert (outcome.begun[0].queued_s, outcome.begun[0].prefill_s) == (2.0, 3.0)
    assert len(one) == 0


def test_while_groups_run_a_full_queue_waits_for_room_for_a_whole_batch() -> None:
    one = queue(running=4, together=4)
    one.add(submit(1), 0)
    first, _ = begin(one)
    for number in range(2, 7):
        one.add(submit(number), 0)
    assert one.take_group(0.0) is None, "four of the five would fit into a batch, and there is room for three"
    one.leave_turn(first)
    assert begin(one)[1] == 4
    one.finish(first, [b"file"], 1.0)
    assert one.take_group(0.0) is None


def test_no_group_begins_while_many_write_their_files() -> None:
    one = queue(running=1, together=1)
    groups = []
    for number in range(MOST_WRITTEN + 1):
        one.add(submit(number), 0)
        if (taken := one.take_group(0.0)) is not None:
            groups.append(taken[0])
            one.leave_turn(taken[0])
    assert len(groups) == MOST_WRITTEN
    one.finish(groups[0], [b"file"], 1.0)
    begin(one)


def test_an_attempt_that_is_cancelled_leaves_its_group_going_for_the_others() -> None:
    one = queue()
    for number in (1, 2):
        one.add(submit(number), 0)
    group, count = begin(one)
    assert count == 2
    one.cancel(("r1", 1))
    assert one.is_wanted(group)
    one.record_step(group, 1, [b"", b""])
    assert [(part.request, part.finish) for part in parts(one)] == [("r1", "cancelled"), ("r2", None)]
    one.cancel(("r2", 1))
    assert not one.is_wanted(group)


def test_what_is_late_ends_with_its_reason() -> None:
    one = queue(running=1)
    one.add(submit(1), 0)
    begin(one)
    one.add(submit(2, wait_left_s=3.0), 0)
    one.add(submit(3, time_left_s=5.0), 0)
    assert one.due_s() == 3.0
    one.expire(3.0)
    [unbegun] = parts(one)
    assert unbegun.error.startswith(NOT_BEGUN)
    one.expire(5.0)
    assert [(part.request, part.finish) for part in parts(one)] == [("r3", "deadline")]
    assert one.due_s() == 60.0


def test_each_picture_of_a_group_that_fails_is_computed_alone_and_then_fails_by_itself() -> None:
    one = queue()
    for number in (1, 2):
        one.add(submit(number, wait_left_s=1.0), 0)
    group, count = begin(one)
    assert count == 2
    one.record_step(group, 1, [b"", b""])
    one.fail(group, "OutOfMemoryError: no memory")
    one.expire(2.0)  # both have begun in time
    groups = [begin(one) for _ in range(2)]
    assert [count for _, count in groups] == [1, 1]
    assert [part.finish for part in parts(one)] == [None, None]
    one.fail(groups[0][0], "OutOfMemoryError: no memory")
    one.leave_turn(groups[1][0])
    one.finish(groups[1][0], [b"file"], 3.0)
    one.send_piece()
    ends = {part.request: (part.finish, part.error) for part in parts(one)}
    assert ends == {"r1": ("error", "OutOfMemoryError: no memory"), "r2": ("stop", "")}
    assert one.running == len(one) == 0


def test_a_picture_that_is_made_from_images_is_computed_alone() -> None:
    one = queue(together=3)
    for number, images in ((1, ()), (2, (b"png",)), (3, (b"png",)), (4, ())):
        one.add(submit(number, replace(PICTURE, images=images)), 0)
    assert [begin(one)[1] for _ in range(3)] == [2, 1, 1]


def test_the_load_counts_steps_that_are_left() -> None:
    one = queue(running=1)
    for number in (1, 2):
        one.add(submit(number, Picture("a", 64, 64, 20, 0)), 0)
    group, _ = begin(one)
    one.record_step(group, 3, [b""])
    load = one.load(block_size=16, steps_per_s=2.0)
    assert (load.waiting, load.running, load.waiting_tokens, load.held_blocks) == (1, 1, 37, 2)
    assert (load.prefill_tokens_per_s, load.picture_steps, load.pictures) == (2.0, 1, 0)


class QueueMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order, each attempt ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue(running=3)
        self.now_s = 0.0
        self.steps: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.added = 0
        self.ends: list[str] = []

    @rule(
        width=st.sampled_from([64, 128]),
        images=st.sampled_from([(), (b"png",)]),
        left_s=st.floats(1, 20),
        wait_s=st.none() | st.floats(0, 5),
    )
    def add(self, width: int, images: tuple[bytes, ...], left_s: float, wait_s: float | None) -> None:
        self.added += 1
        more = {"time_left_s": left_s, "wait_left_s": wait_s}
        self.queue.add(submit(self.added, Picture("a", width, 64, 2, 0, images=images), **more), self.now_s)

    @rule(number=st.integers(1, 20))
    def cancel(self, number: int) -> None:
        self.queue.cancel((f"r{number}", 1))

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.queue.expire(self.now_s)

    @rule()
    def begin(self) -> None:
        if (taken := self.queue.take_group(self.now_s)) is not None:
            self.steps[taken[0]], self.sizes[taken[0]] = 0, len(taken[1])

    @rule(fails=st.booleans())
    def step(self, fails: bool) -> None:
        group = self.queue.next_turn()
        if group is None:
            return
        self.steps[group] += 1
        if fails:
            self.queue.fail(group, "broken")
        elif not self.queue.is_wanted(group):
            self.queue.drop(group)
        elif self.steps[group] > 2:
            self.queue.leave_turn(group)
            self.queue.finish(group, [b"x" * (PIECE_BYTES + 1)] * self.sizes[group], self.now_s)
        else:
            self.queue.record_step(group, self.steps[group], [b""] * self.sizes[group])

    @rule()
    def send(self) -> None:
        self.queue.send_piece()

    @invariant()
    def holds(self) -> None:
        self.queue.validate()
        self.ends += [part.request for part in parts(self.queue) if part.finish is not None]
        assert len(self.ends) == len(set(self.ends))
        assert len(self.ends) + len(self.queue) == self.added


TestQueueMachine = QueueMachine.TestCase
