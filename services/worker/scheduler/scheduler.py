"""The scheduler: which tokens of which sequences the next step computes. Pure.

Continuous batching with chunked prefill over a paged KV cache with prefix reuse.

                            schedule: blocks are there            advance: a stop token, a length
    submit ──▶ waiting ─────────────────────────────▶ running ─────────────────────────────────▶ ended
                │  ▲ ▲                                   │
                │  │ └───────────────────────────────────┘
                ▼  │    schedule: preempted, blocks ran out
            onboarding: passed over until its blocks are loaded, or until it has waited long enough

    waiting, onboarding, running ── cancel, deadline, cannot fit ──▶ ended          (a full queue: submit ──▶ ended)
    waiting, onboarding ── never admitted in the time that its frontend gave ──▶ ended
    running ── advance: numbers that are not finite ──▶ waiting, alone; the second time ──▶ ended

A running sequence prefills while more than one of its tokens is uncomputed, and decodes while one is. One that is asked
for an embedding ends where others draw their first token; for a mean it takes no blocks from others. Each step:

1. Expired attempts end: those whose deadline has passed, and those that should have been admitted by now.
2. Every decoding sequence gets its one token. Where a block is missing, the lowest ranked running sequence gives its
   blocks back and waits again (its tokens are kept, its KV is computed anew, its stored blocks stay findable while
   nobody needs their room). Draws are numbered by position, so a seed draws the same tokens after a preemption.
3. What is left of the step's token budget, but at least one block, goes to prefills: running ones first, then
   newcomers. So neither decodes nor prefills starve, and no step takes much longer than `step_s`.

Rank: higher `priority` first, then first come first served; the head of the queue is never overtaken within its
priority by a smaller prompt. All blocks of the known tokens are taken at admission, so that half-done prefills cannot
block each other; one block for each running sequence is left free for it to grow into.

Numbers that are not finite fail their own sequence, and no other. The cause may be a block that it was given. So all
its full blocks are forgotten, here and at the kvbm, and it is computed once more from its tokens alone. Where that
fails, too, it ends with an error. A device or weights that are broken fail everything, but so may a client's prompts.
So after `MOST_NOT_FINITE` such ends without one token drawn between them the next step computes a probe: a single token
that no client chose, in a block of its own. The engine ends where the probe's numbers are not finite either.

Where two sequences prefill the same prefix, the second takes over the first one's blocks chunk by chunk as they are
stored. Every attempt that was submitted ends with exactly one Part that has a finish reason.

While a kvbm is there, blocks come from it (`onboarding`) and are offered to it (`offloading`). A sequence asks for them
when there is room for it, so that what comes has a place. Those behind one that onboards are admitted before it, but
only into room that it will not need. Copies never take the last blocks that running sequences may grow into; what is
held for one that onboards is given back for them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence as Seq

from services.worker.limits import Limits
from services.worker.messages import EngineLoad, Submit
from services.worker.runner import Drawn, Work
from services.worker.scheduler.kv_offloading import Offloading
from services.worker.scheduler.kv_onboarding import Onboarding, Wanted
from services.worker.scheduler.outcome import Outcome
from services.worker.scheduler.sequence import Sequence
from services.worker.scheduler.step_budget import StepBudget
from services.worker.scheduler.throughput import Pace
from shared.blocks import BlockPool, Content
from shared.errors import ModelError
from shared.hashing import ContentKey
from shared.messages import NOT_BEGUN, FinishReason, Part, Sampling

_NEVER = float("inf")
MOST_NOT_FINITE = 16
"""Sequences in a row that end because their numbers are not finite, before a probe is computed."""
_PROBE_TOKEN = 0
_PROBED = Sampling(max_tokens=1, temperature=0.0)


class Scheduler:
    """Between `schedule` and `advance` a step is under way; commands come outside of it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = BlockPool(limits.capacity_blocks)
        self._budget = StepBudget(
            step_s=limits.step_s,
            least_tokens=limits.block_size,
            most_tokens=limits.max_step_tokens,
            first_tokens_per_s=limits.first_tokens_per_s,
        )
        self._pace = Pace()
        self._onboarding = Onboarding(
            self._pool, block_size=limits.block_size, look_ahead=limits.look_ahead, wait_s=limits.wait_s
        )
        self._offloading = Offloading(self._pool, limits.offload, limits.offers_limit)
        self._living: dict[tuple[str, int], Sequence] = {}
        self._waiting: list[Sequence] = []
        """By rank."""
        self._running: list[Sequence] = []
        """By rank."""
        self._prefilling: list[Sequence] = []
        """Those of them with more than one token uncomputed, by rank."""
        self._waiting_tokens = 0
        """Uncomputed tokens of `_waiting`."""
        self._arrivals = 0
        self._preemptions = 0
        self._recomputed = 0
        self._not_finite = 0
        self._not_finite_in_a_row = 0
        self._discards: list[ContentKey] = []
        """Blocks that the kvbm is not to give to others, where there is one."""
        self._earliest_end_s = _NEVER
        """Not later than any `ends_by_s`."""
        self._step: list[Sequence] | None = None
        self._probe: Work | None = None
        """The last work of the step under way, where that has one."""
        self._stalled = False
        """Nothing could be computed: all wait for the kvbm, or for blocks that copies hold; nothing changed since."""
        self._outcome = Outcome()

    # --- commands

    def submit(self, submit: Submit, now_s: float) -> None:
        """Take an attempt. One that lives here already is ignored."""
        assert self._step is None
        if (submit.request, submit.attempt) in self._living:
            return
        sequence = Sequence.of(
            submit,
            arrival=self._arrivals,
            now_s=now_s,
            model=self._limits.model,
            block_size=self._limits.block_size,
            eos_token_ids=self._limits.eos_token_ids,
            context_length=self._limits.context_length,
        )
        self._arrivals += 1
        reason = self._unfit(sequence)
        if reason:
            self._tell(sequence, "error", reason)
        elif sequence.produced >= submit.sampling.max_tokens:
            self._tell(sequence, "length")
        else:
            self._living[sequence.name] = sequence
            self._earliest_end_s = min(self._earliest_end_s, sequence.ends_by_s)
            self._enqueue(sequence)
            self._look(now_s)
        self._stalled = False

    def cancel(self, request: str, attempt: int) -> None:
        """End an attempt and free its blocks. Unknown ones are ignored."""
        assert self._step is None
        sequence = self._living.get((request, attempt))
        if sequence is not None:
            self._end(sequence, "cancelled")
        self._stalled = False

    # --- a step

    def schedule(self, now_s: float) -> list[Work]:
        """What to compute now; empty only if no attempt is left, or all of them wait for the kvbm."""
        assert self._step is None
        self._expire(now_s)
        self._onboarding.give_up(now_s)
        self._look(now_s)
        self._step = []
        self._schedule_decodes()
        if self._in_doubt:
            self._schedule_probe()
        self._schedule_prefills()
        works = [sequence.work for sequence in self._step]
        if self._probe is not None:
            works.append(self._probe)
        self._stalled = not works
        return works

    def advance(self, drawn: Seq[Drawn | None], elapsed_s: float) -> Outcome:
        """The step was computed: one entry of `drawn` per work. Returns all that happened since the last call. Raises
        ModelError where nothing that is computed is finite any more."""
        step, self._step = self._step, None
        assert step is not None
        assert len(drawn) == len(step) + (self._probe is not None)
        self._measured(sum([sequence.work.end - sequence.work.start for sequence in step]), len(step), elapsed_s)
        size = self._limits.block_size
        for sequence, draw in zip(step, drawn, strict=False):  # a probe is beyond them
            work = sequence.work
            assert (draw is not None) == (work.end == len(sequence.tokens))
            if draw is not None and draw.suspect:
                self._distrust(sequence, draw.error)
                continue
            work.start = work.end
            if work.start // size > sequence.stored:
                self._store_full_blocks(sequence)
            if draw is not None:
                self._not_finite_in_a_row = 0
                if draw.error:
                    self._end(sequence, "error", draw.error)
                elif draw.embedding:
                    self._end(sequence, "stop", embedding=draw.embedding)
                else:
                    self._take_token(sequence, draw)
        if self._probe is not None:
            self._probed(self._probe, drawn[-1])
        self._prefilling = [sequence for sequence in self._prefilling if sequence.uncomputed > 1]
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def untold(self) -> Outcome:
        """What has happened since the last `advance`, while no step is under way."""
        assert self._step is None
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    # --- blocks exchanged with a kvbm; each of these may also be called while a step is under way

    def exchanging(self, on: bool) -> None:
        """Whether a kvbm is there. Off: nobody waits for it any more (those that did become `unwanted`, and still end
        with `settled` once the last of what is loading for them is `loaded`), and nothing is offered."""
        self._onboarding.turn(on)
        self._offloading.turn(on)
        self._discards.clear()
        self._stalled = False

    def wanted(self) -> list[Wanted]:
        """What to fetch, new since the last call: at the latest after each `schedule`."""
        waiting = self._onboarding.waiting
        wanted = self._onboarding.wanted()
        if self._onboarding.waiting < waiting:
            self._stalled = False
        return wanted

    def unwanted(self) -> list[int]:
        """Numbers of `wanted` that wait no longer, new since the last call; none of them is settled yet. Copies that
        have not begun are not worth making, and every slot given by `make_room` is still to be told as `loaded`."""
        return self._onboarding.unwanted()

    def make_room(self, number: int, first: int, count: int) -> list[int]:
        """Device slots for blocks first … first + count - 1 of `Wanted.keys`, leading ones only: fewer, or none, where
        there is no room, it is not wanted any more, or the blocks before them did not all get a slot."""
        slots, evicted = self._onboarding.make_room(number, first, count, len(self._running))
        self._outcome.events.extend(evicted)
        self._stalled = False
        return slots

    def loaded(self, number: int, index: int, slot: int, good: bool, disk: bool) -> None:
        """The copy of block `index` of `Wanted.keys` into this slot has ended, `good` or not; each slot of `make_room`
        exactly once, in any order, also after the attempt has ended."""
        stored = self._onboarding.loaded(number, index, slot, good, disk)
        self._outcome.events.extend(stored)
        for event in stored:
            self._offloading.came(event.content)
        self._stalled = False

    def settled(self, number: int, took_s: float) -> None:
        """Nothing more comes for it, and all its slots were `loaded`: each of `wanted` exactly once. `took_s`: a round
        trip, from the question to the kvbm's first answer, or until none was awaited any more; 0: not known."""
        self._onboarding.settled(number, took_s)
        self._stalled = False

    def offers(self, most: int) -> list[Content]:
        """At most so many blocks that the kvbm may want, parents first; each is offered once."""
        return self._offloading.offers(most)

    def hold(self, keys: Seq[ContentKey]) -> list[int | None]:
        """The device slots with these blocks, each held for a copy until `let_go`; None: not there any more, or its
        room is needed."""
        return self._offloading.hold(keys, len(self._running))

    def let_go(self, slots: Seq[int]) -> None:
        """The copies that read these slots have ended: each hold exactly once, parents before children."""
        self._offloading.let_go(slots)
        self._stalled = False

    def discard(self, keys: Seq[ContentKey]) -> None:
        """The kvbm may have these blocks, and they are or may be wrong."""
        if self._onboarding.on:
            self._discards.extend(keys)

    def discards(self) -> list[ContentKey]:
        """Blocks that are or may be wrong, new since the last call: the kvbm is to give them to nothing any more."""
        discards, self._discards = self._discards, []
        return discards

    @property
    def wait_until_s(self) -> float | None:
        """When `schedule` has something to do though no step is due: an attempt's time is over, or somebody has waited
        long enough for the kvbm. None: never."""
        until_s = min(self._earliest_end_s, self._onboarding.until_s) if self._living else _NEVER
        return None if until_s == _NEVER else until_s

    # --- questions

    @property
    def busy(self) -> bool:
        """Whether a step is due: something can be computed, or is still to be told."""
        return bool(
            self._running
            or ((self._waiting or self._in_doubt) and not self._stalled)
            or self._outcome.parts
            or self._outcome.events
        )

    @property
    def digest(self) -> int:
        return self._pool.digest

    def snapshot(self) -> list[Content]:
        """Every block that can be found, parents first."""
        return self._pool.snapshot()

    def load(self) -> EngineLoad:
        """Counts as of now."""
        blocks = self._pool.statistics()
        return EngineLoad(
            waiting=len(self._waiting),
            running=len(self._running),
            waiting_tokens=self._waiting_tokens + sum(s.uncomputed for s in self._prefilling),
            held_blocks=blocks.held + blocks.loading,
            cached_blocks=blocks.cached,
            prefill_tokens_per_s=self._pace.tokens_per_s,
            step_s=self._pace.step_s,
            preemptions=self._preemptions,
            recomputed=self._recomputed,
            not_finite=self._not_finite,
            onboarding=self._onboarding.waiting,
            late_onboardings=self._onboarding.late,
            offered_blocks=self._offloading.offered_blocks,
            dropped_offers=self._offloading.dropped_blocks,
        )

    # --- scheduling

    def _look(self, now_s: float) -> None:
        """The first of those that wait may find their blocks with the kvbm, as far as there is room for them all by
        `_admit`'s measure: what comes sooner has nowhere to go. Who is left out asks when there is room."""
        if not self._onboarding.on:
            return
        room, near = self._pool.available - len(self._running), 0
        for sequence in self._waiting[: self._limits.look_ahead]:
            # The most that one which was considered before may take, as it would be looked up in each step again.
            takes = sequence.blocks_needed if sequence.looked_up else self._room(sequence)
            room -= self._onboarding.room_for(sequence) or takes
            if room < 0:
                break
            near += 1
        tokens_per_s = self._pace.tokens_per_s or self._limits.first_tokens_per_s
        self._onboarding.look(self._waiting[:near], tokens_per_s, now_s)

    def _room(self, sequence: Sequence) -> int:
        """How many of the available blocks its admission would take."""
        return sequence.blocks_needed - self._pool.held_prefix(sequence.reusable_keys)

    def _schedule_decodes(self) -> None:
        assert self._step is not None
        size = self._limits.block_size
        for sequence in list(self._running):
            work, length = sequence.work, len(sequence.tokens)
            if length - work.start > 1:
                continue  # it prefills, or was preempted just now
            if (length - 1) % size == 0 and length > len(work.blocks) * size and not self._grow(sequence):
                continue
            work.end = length
            self._step.append(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """One more block for a decode, if need be from those that wait for the kvbm, then from the lowest ranked;
        False: that was the sequence itself. It waits again where copies hold the rest."""
        while not self._pool.available:
            if self._onboarding.give_back():
                continue
            lowest = self._running[-1]
            if lowest is sequence and len(sequence.blocks) == self._pool.capacity:
                self._end(sequence, "error", f"the KV cache of {self._pool.capacity} blocks is full")
                return False
            self._preempt(lowest)
            if lowest is sequence:
                return False
        self._allocate(sequence, 1)
        return True

    @property
    def _in_doubt(self) -> bool:
        """Whether a probe is due."""
        return self._not_finite_in_a_row >= MOST_NOT_FINITE

    def _schedule_probe(self) -> None:
        """It takes a block and a sequence's place for this step, where they are free now; else it waits for a later
        one."""
        if self._pool.available and len(self._running) < self._limits.max_running:
            [slot], evicted = self._pool.allocate(1)
            self._outcome.events.extend(evicted)
            self._probe = Work(self._arrivals, array("I", [_PROBE_TOKEN]), 0, 1, [slot], _PROBED, 1)
            self._arrivals += 1

    def _schedule_prefills(self) -> None:
        assert self._step is not None
        probes = int(self._probe is not None)
        places = self._limits.max_running - probes
        left = max(self._budget.tokens - len(self._step) - probes, self._limits.block_size)
        for sequence in self._prefilling:
            if left <= 0:
                return
            self._reuse(sequence)
            left -= self._add_work(sequence, left)
        passed = owed = 0
        while left > 0 and passed < len(self._waiting) and len(self._running) < places:
            sequence = self._waiting[passed]
            if blocks := self._onboarding.room_for(sequence):
                passed, owed = passed + 1, owed + blocks
            elif self._admit(sequence, owed):
                left -= self._add_work(sequence, left)
            else:
                return

    def _admit(self, sequence: Sequence, owed: int) -> bool:
        """From waiting to running, if its blocks are there, the running ones keep room to grow, and those before it
        the `owed` blocks."""
        if self._room(sequence) + owed + len(self._running) > self._pool.available:
            return False
        self._dequeue(sequence)
        sequence.begin_by_s = _NEVER
        self._reuse(sequence)
        self._allocate(sequence, sequence.blocks_needed - len(sequence.blocks))
        insort(self._running, sequence, key=_rank)
        insort(self._prefilling, sequence, key=_rank)
        return True

    def _reuse(self, sequence: Sequence) -> None:
        """Take over the blocks behind the computed ones that the cache has by now."""
        size = self._limits.block_size
        if sequence.computed != sequence.stored * size:
            return  # in the middle of a block
        before = sequence.stored
        slots = self._pool.acquire_prefix(sequence.reusable_keys[before:])
        sequence.stored += len(slots)
        sequence.work.start += len(slots) * size
        for blank in sequence.blocks[before : sequence.stored]:
            self._pool.release(blank)
        sequence.blocks[before : sequence.stored] = slots
        if not sequence.begun:
            sequence.count_cached(before)

    def _add_work(self, sequence: Sequence, most: int) -> int:
        """Put the sequence into the step with at most `most` tokens; returns how many."""
        assert self._step is not None
        start, size = sequence.computed, self._limits.block_size
        end = min(start + most, len(sequence.tokens))
        if end < len(sequence.tokens) and 4 * (end % size) <= end - start:
            end -= end % size  # whole blocks, where that costs little: they are stored, and reused by others, at once
        sequence.work.end = end
        self._step.append(sequence)
        return end - start

    def _preempt(self, sequence: Sequence) -> None:
        self._preemptions += 1
        self._stop(sequence)
        sequence.looked_up = False
        self._enqueue(sequence)

    # --- after a step

    def _measured(self, tokens: int, works: int, elapsed_s: float) -> None:
        if tokens > works:
            self._budget.measured(tokens, elapsed_s)
            self._pace.measured(tokens, elapsed_s)
        elif works:
            self._pace.decoded(elapsed_s)

    def _store_full_blocks(self, sequence: Sequence) -> None:
        for index in range(sequence.stored, sequence.computed // self._limits.block_size):
            content = sequence.content(index)
            if sequence.alone:  # what is there may have come from where the wrong one did
                self._outcome.events.extend(self._pool.forget(content.key))
            slot, events = self._pool.store(sequence.blocks[index], content)
            sequence.blocks[index] = slot
            self._outcome.events.extend(events)
            if events and self._offloading.queues:
                self._offloading.stored(events[0].content)
            sequence.stored += 1

    def _distrust(self, sequence: Sequence, error: str) -> None:
        """Its numbers were not finite: nobody uses its blocks any more, and it begins once more, or ends."""
        keys = sequence.keys[: sequence.stored]
        for key in reversed(keys):
            self._outcome.events.extend(self._pool.forget(key))
        self.discard(keys)
        if not sequence.alone:
            self._recomputed += 1
            sequence.alone = sequence.looked_up = True
            self._stop(sequence)
            self._enqueue(sequence)
            return
        self._not_finite += 1
        self._not_finite_in_a_row += 1
        self._end(sequence, "error", error)

    def _probed(self, probe: Work, drawn: Drawn | None) -> None:
        """The probe's block is given back. Where its numbers are finite, the sequences that failed were at fault."""
        assert drawn is not None
        self._probe = None
        self._pool.release(probe.blocks[0])
        if drawn.suspect and self._in_doubt:  # a token that another one drew in this step says as much as the probe
            raise ModelError(f"{drawn.error}: {MOST_NOT_FINITE} sequences in a row, and a single token after them, too")
        self._not_finite_in_a_row = 0

    def _take_token(self, sequence: Sequence, drawn: Drawn) -> None:
        tokens, token = sequence.tokens, drawn.token
        first = len(tokens) - sequence.prompt_tokens
        tokens.append(token)
        finish: FinishReason | None = None
        if token in sequence.stop_tokens:
            finish = "stop"
        elif len(tokens) >= sequence.most_tokens:
            finish = "length"
        part = Part(
            sequence.request,
            sequence.attempt,
            first,
            token.to_bytes(4, "little"),
            finish,
            sequence.cached_tokens,
            None if drawn.logprob is None else (drawn.logprob,),
            "",
            sequence.cached_host_tokens,
            sequence.cached_disk_tokens,
        )
        self._outcome.parts[sequence.frontend].append(part)
        if sequence.begun and finish is None:
            self._outcome.advanced.append(sequence.number)
            return
        self._outcome.notable.append(part)
        sequence.begun = True
        if finish is not None:
            self._drop(sequence)

    # --- ends

    def _unfit(self, sequence: Sequence) -> str:
        """Why a newcomer is not taken; empty: it is."""
        limits, length = self._limits, len(sequence.tokens)
        if not 0 < sequence.submit.prompt_tokens <= length:
            return f"{length} tokens of which {sequence.submit.prompt_tokens} are the prompt"
        if length >= limits.context_length + bool(sequence.submit.sampling.pooling):
            return f"{length} tokens leave no room in a context of {limits.context_length}"
        if sequence.blocks_needed > limits.capacity_blocks:
            return f"{length} tokens do not fit into {limits.capacity_blocks} blocks of {limits.block_size}"
        if len(self._waiting) >= limits.max_waiting:
            return f"overloaded: {len(self._waiting)} attempts wait"
        if self._waiting and self._waiting_tokens + length > limits.max_waiting_tokens:
            return f"overloaded: {self._waiting_tokens} tokens wait"
        return ""

    def _expire(self, now_s: float) -> None:
        if now_s < self._earliest_end_s:
            return
        for sequence in [s for s in self._living.values() if s.ends_by_s <= now_s]:
            if sequence.deadline_s <= now_s:
                self._end(sequence, "deadline")
            else:
                self._end(sequence, "error", f"{NOT_BEGUN}: the worker computes {len(self._running)} others")
        self._earliest_end_s = min((s.ends_by_s for s in self._living.values()), default=_NEVER)

    def _end(self, sequence: Sequence, finish: FinishReason, error: str = "", embedding: bytes = b"") -> None:
        self._tell(sequence, finish, error, embedding)
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Out of every list; its blocks are free or cached."""
        del self._living[sequence.name]
        if sequence.blocks:
            self._stop(sequence)
        else:
            self._dequeue(sequence)
            self._onboarding.leave(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """It runs no more."""
        self._running.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self._release(sequence)

    def _tell(self, sequence: Sequence, finish: FinishReason, error: str = "", embedding: bytes = b"") -> None:
        """The end of an attempt, without a token."""
        part = Part(
            request=sequence.request,
            attempt=sequence.attempt,
            first=sequence.produced,
            tokens=b"",
            finish=finish,
            cached_tokens=sequence.cached_tokens,
            error=error,
            cached_host_tokens=sequence.cached_host_tokens,
            cached_disk_tokens=sequence.cached_disk_tokens,
            embedding=embedding,
        )
        self._outcome.parts[sequence.frontend].append(part)
        self._outcome.notable.append(part)

    # --- the queue and the blocks

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_rank)
        self._waiting_tokens += sequence.uncomputed

    def _dequeue(self, sequence: Sequence) -> None:
        found = self._waiting.pop(bisect_left(self._waiting, sequence.rank, key=_rank))
        assert found is sequence
        self._waiting_tokens -= sequence.uncomputed

    def _allocate(self, sequence: Sequence, count: int) -> None:
        slots, evicted = self._pool.allocate(count)
        sequence.blocks.extend(slots)
        self._outcome.events.extend(evicted)

    def _release(self, sequence: Sequence) -> None:
        """Last block first, so that leaves are evicted before their parents."""
        for slot in reversed(sequence.blocks):
            self._pool.release(slot)
        sequence.blocks.clear()
        sequence.work.start = sequence.stored = 0
        if not sequence.begun:
            sequence.forget_cached()

    def validate(self) -> None:
        """Raises AssertionError where the scheduler contradicts itself. O(everything); call it between steps."""
        self._pool.validate()
        self._onboarding.validate()
        self._offloading.validate()
        assert sorted(self._waiting, key=_rank) == self._waiting
        assert sorted(self._running, key=_rank) == self._running
        assert sorted(self._prefilling, key=_rank) == self._prefilling
        assert set(self._prefilling) <= set(self._running)
        assert len(self._running) <= self._limits.max_running
        assert {s.name for s in (*self._waiting, *self._running)} == self._living.keys()
        assert len(self._living) == len(self._waiting) + len(self._running)
        assert self._waiting_tokens == sum(s.uncomputed for s in self._waiting)
        held: set[int] = set()
        for sequence in self._waiting:
            assert not sequence.blocks
            assert sequence.computed == 0
        for sequence in self._running:
            held.update(sequence.blocks)
            assert len(sequence.blocks) == len(set(sequence.blocks))
            assert len(sequence.blocks) * self._limits.block_size >= sequence.computed
            assert sequence.stored == sequence.computed // self._limits.block_size
            assert sequence.uncomputed >= 1
            assert (sequence.uncomputed > 1) == (sequence in self._prefilling)
            assert sequence.ends_by_s >= self._earliest_end_s
            assert sequence.begin_by_s == _NEVER
            for index, slot in enumerate(sequence.blocks):
                content = self._pool.content(slot)
                known = content is not None or self._pool.is_forgotten(slot)
                assert known == (index < sequence.stored), f"block {index} of {sequence.name}"
                assert content is None or content.key == sequence.keys[index]
        assert not (self._stalled and self._running)
        held.update(
            self._offloading.holds(), *self._onboarding.holds(), () if self._probe is None else self._probe.blocks
        )
        blocks = self._pool.statistics()
        assert len(held) == blocks.held + blocks.loading, "a block is held by nobody"


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
