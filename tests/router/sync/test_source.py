"""The recovery of one event stream from every fault, and from any sequence of them."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.index.kv_events import DecodedBatch
from services.router.sync.source import (
    STALE_FAILURES,
    Action,
    ApplyBatch,
    ClearBlocks,
    RequestReplay,
    RequestSnapshot,
    Silence,
    SourceSync,
)
from shared.messages.load import KvState


def batch(sequence: int, *, start: int = 0, rank: int = 0) -> DecodedBatch:
    """The batch of a sequence number; engines that start later have later clocks."""
    return DecodedBatch(1000.0 * start + sequence, rank, [], 0)


def source(
    *, snapshots: bool = True, replays: bool = True, epochs: bool = True, held: int = 100, stored: bool = False
) -> SourceSync:
    return SourceSync(snapshots=snapshots, replays=replays, epochs=epochs, held_limit_batches=held, stored=stored)


def live(applied: int = 4) -> SourceSync:
    """A source with snapshots that is live, as of `applied`."""
    found = source()
    found.start()
    found.snapshot_restored(1, 1, {0: applied})
    assert found.state == "live"
    return found


def test_a_source_starts_from_a_snapshot_and_applies_the_batches_that_came_meanwhile() -> None:
    found = source()
    assert found.start() == [RequestSnapshot(1, 0.0)]
    assert found.report_received(KvState(0, 1, 3)) == []
    for sequence in (3, 4, 5, 6):
        assert found.batch_received(sequence, batch(sequence)) == []
    assert found.snapshot_restored(1, 1, {0: 4}) == [ApplyBatch(batch(5)), ApplyBatch(batch(6))]
    assert (found.state, found.applied, found.partial) == ("live", 6, False)
    assert found.batch_received(7, batch(7)) == [ApplyBatch(batch(7))]


def test_a_gap_is_replayed_and_the_batches_that_came_meanwhile_follow() -> None:
    found = live()
    assert found.batch_received(7, batch(7)) == [RequestReplay(2, 5, 0.0)]
    assert found.batch_received(8, batch(8)) == []
    answers: list[tuple[int, DecodedBatch | None]] = [(5, batch(5)), (6, batch(6)), (7, batch(7))]
    assert found.replay_received(2, answers) == [ApplyBatch(batch(sequence)) for sequence in (5, 6, 7, 8)]
    assert (found.state, found.applied, found.gaps) == ("live", 8, 1)


def test_a_gap_too_old_to_replay_is_closed_by_a_snapshot() -> None:
    found = live()
    found.batch_received(90, batch(90))
    actions = found.replay_received(2, [(80, batch(80)), (81, batch(81))])
    assert actions == [RequestSnapshot(3, 0.2)], "known blocks stay until the snapshot is here"
    found.batch_received(91, batch(91))
    assert found.snapshot_started(3) == [ClearBlocks()]
    assert found.snapshot_restored(3, 1, {0: 90}) == [ApplyBatch(batch(91))]


def test_the_loss_of_the_last_batches_is_detected_by_the_second_report_that_is_ahead() -> None:
    found = live()
    assert found.report_received(KvState(0, 1, 6)) == []  # the batches may still be on their way
    assert found.report_received(KvState(0, 1, 6)) == [RequestReplay(2, 5, 0.0)]
    assert found.replay_received(2, [(5, batch(5)), (6, batch(6))]) == [ApplyBatch(batch(5)), ApplyBatch(batch(6))]
    assert found.report_received(KvState(0, 1, 6)) == []


def test_a_report_that_is_only_slower_than_the_events_requests_nothing() -> None:
    found = live()
    for sequence in range(5, 9):
        found.batch_received(sequence, batch(sequence))
        assert found.report_received(KvState(0, 1, sequence - 1)) == []
    assert found.gaps == 0


def test_a_new_epoch_clears_and_takes_a_snapshot() -> None:
    found = live()
    found.report_received(KvState(0, 1, 4))
    assert found.report_received(KvState(0, 2, -1)) == [ClearBlocks(), RequestSnapshot(2, 0.2)]
    assert found.snapshot_restored(2, 2, {0: -1}) == []
    assert found.batch_received(0, batch(0, start=1)) == [ApplyBatch(batch(0, start=1))]


def test_a_sequence_that_goes_backwards_clears_and_starts_over() -> None:
    found = live()
    found.batch_received(5, batch(5))
    actions = found.batch_received(0, batch(0, start=1))
    assert [type(action) for action in actions] == [ClearBlocks, RequestSnapshot]
    assert found.report_received(KvState(0, 2, 0)) == []
    assert found.batch_received(1, batch(1, start=1)) == []
    assert found.snapshot_restored(2, 2, {0: 0}) == [ApplyBatch(batch(1, start=1))]


def test_being_ahead_of_two_reports_means_that_we_applied_batches_that_were_never_sent() -> None:
    found = live(applied=9)
    assert found.report_received(KvState(0, 1, 7)) == []  # the report may be older than the batch
    assert found.report_received(KvState(0, 1, 7)) == [ClearBlocks(), RequestSnapshot(2, 0.2)]


def test_held_batches_of_another_epoch_than_the_snapshots_are_not_applied() -> None:
    found = source()
    found.start()
    found.report_received(KvState(0, 1, 3))
    assert found.batch_received(4, batch(4)) == []
    assert found.snapshot_restored(1, 2, {0: 3}) == []
    assert found.applied == 3


def test_a_source_without_snapshots_is_rebuilt_from_replay_and_is_partial_if_batches_are_missing() -> None:
    found = source(snapshots=False, epochs=False)
    assert found.start() == [RequestReplay(1, 0, 0.0)]
    assert found.replay_received(1, [(0, batch(0)), (1, batch(1))]) == [
        ClearBlocks(),
        ApplyBatch(batch(0)),
        ApplyBatch(batch(1)),
    ]
    assert not found.partial
    late = source(snapshots=False, epochs=False)
    late.start()
    late.batch_received(42, batch(42))
    applies = [ApplyBatch(batch(number)) for number in (40, 41, 42)]
    assert late.replay_received(1, [(40, batch(40)), (41, batch(41))]) == [ClearBlocks(), *applies]
    assert late.partial


def test_without_an_epoch_a_restart_after_a_replay_is_detected_by_the_clock() -> None:
    found = source(snapshots=False, epochs=False)
    found.start()
    found.replay_received(1, [(sequence, batch(sequence)) for sequence in range(5)])
    assert found.batch_received(4, batch(4)) == []  # on its way while we requested
    assert found.batch_received(4, batch(4, start=1))[0] == ClearBlocks()


def test_a_source_without_snapshots_and_replay_is_cleared_at_every_gap() -> None:
    found = source(snapshots=False, replays=False, epochs=False)
    assert found.start() == [ClearBlocks()]
    assert found.batch_received(0, batch(0)) == [ApplyBatch(batch(0))]
    assert not found.partial
    assert found.batch_received(5, batch(5)) == [ClearBlocks(), ApplyBatch(batch(5))]
    assert found.partial
    found.validate()


def test_failed_requests_are_repeated_after_growing_delays() -> None:
    found = source()
    pauses = [action.after_s for action in found.start() if isinstance(action, RequestSnapshot)]
    for ticket in range(1, 12):
        pauses += [action.after_s for action in found.request_failed(ticket) if isinstance(action, RequestSnapshot)]
    assert pauses[:4] == [0.0, 0.2, 0.4, 0.8]
    assert pauses[-1] == 10.0
    assert found.request_failed(3) == [], "an answer to an older request"


def test_if_a_snapshot_fails_a_stream_that_reaches_back_to_the_first_batch_takes_its_place() -> None:
    found = source(stored=True)
    found.start()
    found.batch_received(3, batch(3))
    assert found.request_failed(1) == [RequestReplay(2, 0, 0.0)]
    found.batch_received(4, batch(4))
    replay: list[tuple[int, DecodedBatch | None]] = [(number, batch(number)) for number in range(4)]
    assert found.replay_received(2, replay) == [ClearBlocks(), *(ApplyBatch(batch(number)) for number in range(5))]
    assert (found.state, found.applied, found.partial) == ("live", 4, False)


def test_a_stream_that_does_not_reach_back_or_has_a_hole_leaves_known_blocks_until_a_snapshot_comes() -> None:
    answers: tuple[list[tuple[int, DecodedBatch | None]], ...] = (
        [],
        [(7, batch(7)), (8, batch(8))],
        [(0, batch(0)), (1, batch(1)), (3, batch(3))],
    )
    for answer in answers:
        found = source(stored=True)
        found.start()
        asked = found.request_failed(1)
        assert asked == [RequestReplay(2, 0, 0.0)]
        assert found.replay_received(2, answer) == [RequestSnapshot(3, 0.2)]
        assert found.request_failed(3) == [RequestReplay(4, 0, 0.0)]
        assert found.request_failed(4) == [RequestSnapshot(5, 0.4)]


def test_a_batch_that_cannot_be_read_is_skipped() -> None:
    found = live()
    assert found.batch_received(5, None) == []
    assert found.batch_received(6, batch(6)) == [ApplyBatch(batch(6))]


def test_a_batch_dropped_at_the_limit_of_held_batches_is_a_gap_later() -> None:
    found = source(held=2)
    found.start()
    found.report_received(KvState(0, 1, 4))
    for sequence in range(5, 9):
        found.batch_received(sequence, batch(sequence))
        found.validate()
    assert found.snapshot_restored(1, 1, {0: 4}) == [ApplyBatch(batch(5)), ApplyBatch(batch(6))]
    assert found.batch_received(9, batch(9)) == [RequestReplay(2, 7, 0.0)]


def test_known_blocks_stay_while_the_source_does_not_answer_and_are_given_up_in_the_end() -> None:
    found = live()
    found.batch_received(5, batch(5))
    asked = found.digest_differed()
    failures = 0
    while not any(isinstance(action, ClearBlocks) for action in asked):
        (request,) = asked
        assert isinstance(request, RequestSnapshot)
        asked = found.request_failed(request.ticket)
        failures += 1
    assert failures == STALE_FAILURES


def test_a_batch_that_comes_twice_or_late_is_not_taken_for_a_restart() -> None:
    found = live()
    found.report_received(KvState(0, 1, 4))
    for sequence in (5, 6, 6, 5):
        found.batch_received(sequence, batch(sequence))
    assert (found.state, found.applied, found.resyncs) == ("live", 6, 1)
    assert found.batch_received(0, batch(0, start=1))[0] == ClearBlocks(), "a new engine's clock is later"


def test_without_epochs_only_the_same_batch_is_a_repeat() -> None:
    found = source(snapshots=False, epochs=False)
    found.start()
    found.replay_received(1, [])
    for sequence in (0, 1):
        found.batch_received(sequence, batch(sequence))
    assert found.batch_received(1, batch(1)) == []
    assert found.batch_received(0, batch(0))[0] == ClearBlocks(), "its clock may have been set back"


def test_snapshots_of_several_ranks_are_taken_in_turn_and_each_rank_continues_from_its_own() -> None:
    found = source()
    found.start()
    found.report_received(KvState(0, 1, 2))
    for sequence in range(3, 8):
        found.batch_received(sequence, batch(sequence, rank=sequence % 2))
    applied = found.snapshot_restored(1, 1, {0: 3, 1: 6})
    assert applied == [ApplyBatch(batch(4)), ApplyBatch(batch(6)), ApplyBatch(batch(7, rank=1))]
    assert [found.sequence_of(rank) for rank in (0, 1)] == [7, 7]
    later = source()
    later.start()
    later.snapshot_restored(1, 1, {0: 3, 1: 6})
    assert [later.sequence_of(rank) for rank in (0, 1)] == [3, 6]
    later.digest_differed()
    assert later.sequence_of(1) is None


def test_a_batch_that_cannot_be_read_makes_a_source_without_snapshots_partial() -> None:
    found = source(snapshots=False, epochs=False)
    found.start()
    found.replay_received(1, [(0, batch(0))])
    assert not found.partial
    found.batch_received(1, None)
    assert found.partial
    snapshots = live()
    snapshots.batch_received(5, None)
    assert not snapshots.partial, "a digest shows it, and a snapshot closes the gap"


class StreamWorld:
    """An engine that keeps five batches, a lossy connection, and a router that carries out the actions of
    `SourceSync`. With `stored` a stream has all batches that were published, also of earlier starts."""

    def __init__(self, *, snapshots: bool, epochs: bool, stored: bool = False) -> None:
        self.source = source(snapshots=snapshots, epochs=epochs, held=4, stored=stored)
        self.stored = stored
        self.stream: list[tuple[int, DecodedBatch | None]] = []
        """What a replay from the stream has: the batches since the sequence last went backwards."""
        self.starts = 1
        self.ring: list[DecodedBatch] = []
        self.sequence = -1
        self.applied: list[DecodedBatch] = []
        """What the index would hold: a snapshot counts as all batches up to it."""
        self.requests: list[RequestSnapshot | RequestReplay] = []
        self.do(self.source.start())

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ClearBlocks():
                    self.applied.clear()
                case ApplyBatch(found):
                    self.applied.append(found)
                case _:
                    self.requests = [action]
        self.source.validate()

    def all(self) -> list[DecodedBatch]:
        return [batch(sequence, start=self.starts) for sequence in range(self.sequence + 1)]

    def publish(self, *, lost: bool) -> None:
        self.sequence += 1
        if self.stream and self.stream[-1][0] >= self.sequence:
            self.stream.clear()
        self.stream.append((self.sequence, batch(self.sequence, start=self.starts)))
        if not lost:
            self.do(self.source.batch_received(self.sequence, batch(self.sequence, start=self.starts)))

    def restart(self) -> None:
        self.starts += 1
        self.sequence = -1

    def answer(self, *, fails: bool) -> None:
        if not self.requests:
            return
        request = self.requests.pop()
        if fails:
            self.do(self.source.request_failed(request.ticket))
        elif isinstance(request, RequestSnapshot):
            self.do(self.source.snapshot_started(request.ticket))
            self.applied = self.all()
            self.do(self.source.snapshot_restored(request.ticket, self.starts, {0: self.sequence}))
        elif self.stored:
            kept = [each for each in self.stream if each[0] >= request.first]
            self.do(self.source.replay_received(request.ticket, kept))
        else:
            oldest = max(request.first, self.sequence - 4, 0)
            answers: list[tuple[int, DecodedBatch | None]] = [
                (sequence, batch(sequence, start=self.starts)) for sequence in range(oldest, self.sequence + 1)
            ]
            self.do(self.source.replay_received(request.ticket, answers))

    def report(self) -> None:
        self.do(self.source.report_received(KvState(0, self.starts, self.sequence)))


STEPS = st.lists(st.sampled_from(["publish", "lose", "answer", "fail", "report", "distrust", "restart"]), max_size=60)


@settings(max_examples=400)
@given(STEPS, st.booleans())
@example(["publish", "fail", "restart", "answer", "lose"], True)
def test_after_any_faults_a_quiet_source_is_applied_exactly_once_and_in_order(steps: list[str], stored: bool) -> None:
    world = StreamWorld(snapshots=True, epochs=True, stored=stored)
    for step in steps:
        match step:
            case "publish" | "lose":
                world.publish(lost=step == "lose")
            case "answer" | "fail":
                world.answer(fails=step == "fail")
            case "report":
                world.report()
            case "distrust":
                world.do(world.source.digest_differed())
            case _:
                world.restart()
    for turn in range(8):
        world.report()
        world.answer(fails=False)
        # A stream may have but what an engine before the restart has sent, as much as the new one: digests tell.
        if stored and turn == 3 and world.source.state == "live" and world.applied != world.all():
            world.do(world.source.digest_differed())
    assert world.source.state == "live"
    assert world.applied == world.all()


@settings(max_examples=200)
@given(STEPS)
def test_a_source_without_snapshots_or_epochs_keeps_no_block_of_an_earlier_engine_once_a_batch_comes(
    steps: list[str],
) -> None:
    world = StreamWorld(snapshots=False, epochs=False)
    for step in steps:
        match step:
            case "publish" | "lose":
                world.publish(lost=step == "lose")
            case "answer" | "fail":
                world.answer(fails=step == "fail")
            case _:
                world.report()
    for _ in range(8):
        world.report()
        world.answer(fails=False)
    assert world.source.state == "live"
    everything = world.all()
    assert world.applied == everything[len(everything) - len(world.applied) :]
    assert len(world.applied) == len(everything) or world.source.partial


def test_a_source_is_silent_if_requests_compute_blocks_for_a_minute_without_a_batch() -> None:
    silence = Silence(limit_s=60.0)
    silence.prefill_seen(0.0, 1.0)
    silence.prefill_seen(59.0, 60.0)
    assert not silence.silent
    silence.prefill_seen(60.5, 61.0)
    assert silence.silent
    silence.batch_received(61.5)
    assert not silence.silent


def test_an_idle_source_is_not_silent_however_long_it_idles() -> None:
    silence = Silence(limit_s=60.0)
    silence.batch_received(10.0)
    silence.prefill_seen(9.9, 10.1)  # its batch came before its first token
    silence.batch_received(5000.0)
    silence.prefill_seen(4999.9, 5000.1)
    assert not silence.silent


def test_one_lost_batch_before_a_long_pause_does_not_make_a_source_silent() -> None:
    silence = Silence(limit_s=60.0)
    silence.prefill_seen(0.0, 1.0)
    silence.batch_received(5000.0)
    silence.prefill_seen(4999.9, 5000.1)
    assert not silence.silent


def test_without_a_limit_no_source_is_silent() -> None:
    silence = Silence(limit_s=0.0)
    for second in range(1000):
        silence.prefill_seen(second, second + 1)
    assert not silence.silent


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 100.0), st.floats(0.0, 20.0))))
def test_it_is_silent_only_if_no_batch_came_for_the_limit(steps: list[tuple[bool, float, float]]) -> None:
    silence, now_s, heard_s = Silence(limit_s=60.0), 0.0, 0.0
    for heard, pause_s, took_s in steps:
        now_s += pause_s
        if heard:
            silence.batch_received(now_s)
            heard_s = now_s
        else:
            silence.prefill_seen(now_s - took_s, now_s)
        silence.validate()
        assert not silence.silent or now_s - heard_s >= 60.0
