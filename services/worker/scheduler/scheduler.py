"""The scheduler: which tokens of which sequences the next step computes. Pure.

Continuous batching with chunked prefill over a paged KV cache with prefix reuse.

                            schedule: blocks are there            advance: a stop token, a length
    submit ──▶ waiting ─────────────────────────────▶ running ─────────────────────────────────▶ ended
                │  ▲ ▲                                   │
                │  │ └───────────────────────────────────┘
                ▼  │    schedule: preempted, blocks ran out
            onboarding: passed over until its blocks are loaded, or until it has waited long enough

    waiting, onboarding, running ── cancel, deadline, cannot fit ──▶ ended          (a full queue: submit ──▶ ended)
    running ── advance: the first token of an attempt that only prefills ──▶ storing, or ended if its blocks are shared
    storing ── schedule: see `hand_over`; cancel ──▶ ended
    waiting, onboarding ── not admitted in the time that its frontend gave ──▶ ended
    running ── advance: numbers that are not finite ──▶ waiting, alone; the second time ──▶ ended

A running sequence prefills while more than one of its tokens is uncomputed, and decodes while one is. A sequence that
is asked for an embedding ends where others draw their first token; for a mean it reuses no cached blocks. One that is
asked for log-probabilities of its prompt reuses only blocks before the first that is due. Each chunk reports its own,
so that none is computed again after a preemption. Each step:

1. Expired attempts end: those whose deadline has passed, and those that should have been admitted by now.
2. Every decoding sequence gets its one token. Where a block is missing, the lowest ranked running sequence is
   preempted: it gives its blocks back and waits again. Its tokens are kept, its KV is computed again, and its stored
   blocks stay in the prefix cache until their room is needed. Draws are numbered by position, so a seed draws the same
   tokens after a preemption.
3. What is left of the step's token budget, but at least 16 tokens or one block, goes to prefills by rank: running ones
   and what ranks before one of them, then newcomers. So neither decodes nor prefills starve, and no step takes much
   longer than `step_s`; one that computes a single prompt and nothing else, than `lone_step_s`.

All blocks of the known tokens are taken at admission, so that half-done prefills cannot block each other; one block
for each running sequence is left free for it to grow into. `waiting_queue` explains the rank.

Numbers that are not finite fail their own sequence, and no other. The cause may be a cached block that it used, or the
cached embeddings of an image. So all its full blocks are forgotten, here and at the kvbm, and the embeddings here, and
it is computed once more from its tokens and images alone. If that fails, too, it ends with an error. `device_probe`
decides whether the device is at fault.

Where two sequences prefill the same prefix, the second takes over the first one's blocks chunk by chunk as they are
stored. Every attempt that was submitted ends with exactly one Part that has a finish reason.

While a kvbm is there, the KV cache manager lets waiting sequences fetch blocks from it (`kv_onboarding`). Sequences
after one that waits for the kvbm are admitted before it, but only into room that it will not need. Copies never take
the last blocks that running sequences may grow into; blocks held for a waiting sequence are reclaimed for running ones.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from services.worker.contracts.messages import EngineLoad, Submit
from services.worker.contracts.runner import Drawn, Work
from services.worker.limits import SchedulerLimits
from services.worker.scheduler.device_probe import DeviceProbe
from services.worker.scheduler.hand_over import HandOvers
from services.worker.scheduler.kv_cache_manager import KVCacheManager
from services.worker.scheduler.kv_onboarding import MOST_EXPECTED
from services.worker.scheduler.outcome import Outcome
from services.worker.scheduler.queue_clock import Cause, describe_wait
from services.worker.scheduler.sequence import Sequence, rank_of
from services.worker.scheduler.step_images import StepImages
from services.worker.scheduler.throughput import StepBudget
from services.worker.scheduler.waiting_queue import WaitingQueue
from shared.messages.frames import NOT_BEGUN, FinishReason, Part, PromptLogprobs

_NEVER = float("inf")
PREFETCH_MOST_S = 120.0
"""Most seconds for which blocks of an expected prompt are loaded."""


class Scheduler:
    """Between `schedule` and `advance` a step is under way; commands come outside of it, unless they say otherwise."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.loras: set[str] = set()
        """Ids of the loaded LoRAs. Attempts with another one are refused."""
        self.closed = ""
        """Why all new attempts are refused, and the device is not probed unless that is asked for. Empty if neither is
        so."""
        self.kv_cache = KVCacheManager(limits)
        """The blocks of the device, which the KV connector uses, too."""
        self._onboarding = self.kv_cache.onboarding
        self.budget = StepBudget(
            step_s=limits.step_s,
            short_step_s=limits.short_step_s,
            lone_step_s=limits.lone_step_s,
            least_tokens=limits.least_step_tokens,
            most_tokens=limits.max_step_tokens,
            first_tokens_per_s=limits.first_tokens_per_s,
        )
        """How many tokens a step may compute, and how long it will take."""
        self._expected: dict[tuple[str, int], Sequence] = {}
        """Attempts for which blocks were to be loaded beforehand, the newest at the end, at most MOST_EXPECTED."""
        self._living: dict[tuple[str, int], Sequence] = {}
        """Attempts that wait or run."""
        self.hand_overs = HandOvers(self.kv_cache)
        """Attempts that only prefill and have their first token, while the kvbm stores their blocks."""
        self._queue = WaitingQueue(most_sequences=limits.max_waiting, most_tokens=limits.max_waiting_tokens)
        self._running: list[Sequence] = []
        """Sequences that hold blocks, by rank."""
        self._prefilling: list[Sequence] = []
        """Running sequences with more than one token uncomputed, by rank."""
        self._arrivals = 0
        self._preemptions = 0
        self._recomputed = 0
        self.probe = DeviceProbe()
        """What probes the device."""
        self._earliest_end_s = _NEVER
        """Not later than any `ends_by_s`."""
        self._step: list[Sequence] | None = None
        self._step_began_s = 0.0
        self.step_tokens = 0
        """Tokens that the step under way computes for sequences, or the last one computed."""
        self.images = StepImages()
        """Which image a step encodes."""
        self._stalled_at: tuple[int, int] | None = None
        """`_changes` when a step could compute nothing. None if the last step did, or a command came since. While these
        numbers stay, all sequences wait for the kvbm, for images, or for blocks that copies hold."""
        self._outcome = Outcome()

    # --- commands

    def submit(self, submit: Submit, now_s: float) -> None:
        """Take an attempt, also while a step is under way. One that lives here already is ignored."""
        if self._knows(submit):
            return
        expected = self._expected.pop((submit.request, submit.attempt), None)
        sequence = Sequence.of(submit, self._limits, self._arrivals, now_s, expected)
        self._arrivals += 1
        reason = self._unfit(sequence)
        if reason:
            self._report_end(sequence, "error", reason)
        elif sequence.produced >= submit.sampling.max_tokens:
            self._report_end(sequence, "length")
        else:
            self._living[sequence.name] = sequence
            if submit.prefill_only:
                self._set_due(sequence, now_s)
            elif not sequence.produced and self._limits.overtaking and self.budget.throughput.tokens_per_s:
                self._set_due(sequence, now_s, self._limits.overtaking)
            self._earliest_end_s = min(self._earliest_end_s, sequence.ends_by_s)
            self._queue.add(sequence, now_s)
            self._consider_onboarding(now_s)
        self._onboarding.arrived(sequence)
        self._stalled_at = None

    def _set_due(self, sequence: Sequence, now_s: float, times: float = 1.0) -> None:
        """Let a prompt be due after its arrival by `times` the time that it takes alone, and no later than leaves as
        much before it ends unanswered."""
        later_s = times * self.kv_cache.uncached_tokens(sequence) / self._tokens_per_s
        sequence.due_s = min(now_s + later_s, max(now_s, sequence.ends_by_s - later_s))

    def _knows(self, submit: Submit) -> bool:
        """Return whether the attempt lives here."""
        name = submit.request, submit.attempt
        return name in self._living or name in self.hand_overs.names

    def prefetch(self, submit: Submit, sharer: str, now_s: float) -> None:
        """Load the blocks of a prompt that the worker `sharer` is computing, for an attempt that is expected. Advice:
        where it cannot be followed nothing happens, and it ends by itself. Comes also while a step is under way."""
        if not self._onboarding.enabled or self._knows(submit):
            return
        sequence = Sequence.of(submit, self._limits, self._arrivals, now_s)
        self._arrivals += 1
        if not self._unfit(sequence):
            self._set_due(sequence, now_s)
            self._expected[sequence.name] = sequence
            if len(self._expected) > MOST_EXPECTED:
                del self._expected[next(iter(self._expected))]
            until_s = min(sequence.deadline_s, now_s + PREFETCH_MOST_S)
            self._onboarding.prefetch(sequence, sharer, until_s, now_s)

    def cancel(self, request: str, attempt: int) -> None:
        """End an attempt and free its blocks. Unknown ones are ignored."""
        assert self._step is None
        self._expected.pop((request, attempt), None)
        self._onboarding.end_prefetch(request, attempt)
        sequence = self._living.get((request, attempt))
        if sequence is not None:
            self._end(sequence, "cancelled")
        elif (stored := self.hand_overs.pop((request, attempt))) is not None:
            self._report_end(stored, "cancelled")
        self._stalled_at = None

    def ask_probe(self, prompt: Seq[int]) -> None:
        """Have the next step compute a probe of this prompt, as soon as there is room for it. `probe.asked` is empty
        when it has ended."""
        self.probe.asked = prompt
        self._stalled_at = None

    def clear(self) -> None:
        """Forget all cached blocks. Running attempts wait again, and compute theirs once more."""
        assert self._step is None
        for sequence in list(self._running):
            self._outcome.add_note(sequence.number, "begins again: an operator has all cached blocks forgotten")
            self._requeue(sequence)
        self.kv_cache.clear()
        self._stalled_at = None

    # --- a step

    def schedule(self, now_s: float) -> list[Work]:
        """Begin a step: return what to compute. It is empty only if no attempt is left, or all of them wait for the
        kvbm or for images."""
        assert self._step is None
        self._expire(now_s)
        for sequence in self.hand_overs.take_ended(now_s):
            self._report_end(sequence, "handed_over")
        self._onboarding.give_up(now_s)
        self._consider_onboarding(now_s)
        self._step, self._step_began_s = [], now_s
        self.images.begin()
        self.kv_cache.notes.now_s = now_s
        self._schedule_decodes()
        if self._probe_due:
            self._schedule_probe()
        self._queue.set_cause(self._schedule_prefills(), now_s)
        works = [sequence.work for sequence in self._step]
        self.step_tokens = sum([work.end - work.start for work in works])
        if self.probe.work is not None:
            works.append(self.probe.work)
        self._stalled_at = None if works else self._changes
        return works

    def advance(self, drawn: Seq[Drawn | None], elapsed_s: float) -> Outcome:
        """End the step: it was computed, with one entry of `drawn` per work. Return all that happened since the last
        call. Raise ModelError if the device is found to be broken."""
        step, self._step = self._step, None
        assert step is not None
        assert len(drawn) == len(step) + (self.probe.work is not None)
        size, probe, ended_s = self._limits.block_size, self.probe, self._step_began_s + elapsed_s
        self.budget.record_step(self.step_tokens + self.images.tokens, len(step), elapsed_s, ended_s)
        for sequence, draw in zip(step, drawn, strict=False):  # a probe is beyond them
            work = sequence.work
            ends = work.end == len(sequence.tokens)
            if draw is None:
                assert not ends
                assert not work.scoring
            elif draw.suspect:
                self._distrust(sequence, draw.error)
                continue
            elif draw.prompt_logprobs is not None:
                self._report_prompt(sequence, draw.prompt_logprobs)
            work.start = work.end
            if work.start // size > sequence.stored:
                self.kv_cache.cache_full_blocks(sequence)
            if draw is not None and ends:
                probe.failed_in_a_row = 0
                if draw.error:
                    self._end(sequence, "error", draw.error)
                elif draw.embedding:
                    self._end(sequence, "stop", embedding=draw.embedding)
                else:
                    self._append_token(sequence, draw, ended_s)
        if probe.work is not None:
            self.kv_cache.free_blocks(probe.slots)
            probe.end(drawn[-1])
        if self._prefilling:
            self._prefilling = [sequence for sequence in self._prefilling if sequence.uncomputed > 1]
        return self.drain()

    @property
    def steady_steps(self) -> int:
        """How many steps, the one under way included, will do nothing but draw one token for each running sequence: no
        sequence ends, no block becomes full or is needed, and nothing else is to be reported. 0 if that is not known.
        It holds while no command comes and the next step begins before `wait_until_s`."""
        step, size = self._step, self._limits.block_size
        if (
            not step
            or len(step) != len(self._running)
            or self._prefilling
            or self._queue.sequences
            or self._probe_due
            or self.probe.work is not None
            or self.hand_overs.names
            or self._onboarding.enabled
            or self.kv_cache.has_events
            or self._outcome.parts
            or self._outcome.notes
            or any(not s.begun or s.stop_tokens or s.work.images for s in step)
        ):
            return 0
        return min(min(size - s.work.start % size, s.most_tokens - s.work.end) for s in step) - 1

    def pass_steps(self, drawn: Seq[Seq[int]], elapsed_s: Iterable[float], now_s: float) -> None:
        """End the step under way and those that follow, at most `steady_steps`, and begin the one after them. `drawn`
        are the tokens of each sequence, `now_s` is when the last of them ended, before `wait_until_s`. Virtual fleets
        know tokens and times of such steps beforehand, and need no report of them. With `advance` and `schedule`, which
        leave the same, a simulation can take four times as long."""
        assert self._step is not None
        assert now_s < self._earliest_end_s, "an attempt's time may be over"
        for sequence, tokens in zip(self._step, drawn, strict=True):
            sequence.tokens.extend(tokens)
            sequence.work.start += len(tokens)
            sequence.work.end += len(tokens)
        for each_s in elapsed_s:
            self.budget.throughput.record_decode(each_s)
        self._step_began_s = now_s

    def drain(self) -> Outcome:
        """Return what has happened since the last call, or since the last `advance`, while no step is under way."""
        assert self._step is None
        outcome, self._outcome = self._outcome, Outcome()
        outcome.events.extend(self.kv_cache.drain_events())
        return outcome

    @property
    def wait_until_s(self) -> float | None:
        """When `schedule` has something to do though no step is due: an attempt's time is over, or a sequence has
        waited long enough for the kvbm. None means never."""
        earliest_end_s = self._earliest_end_s if self._living else _NEVER
        until_s = min(earliest_end_s, self._onboarding.until_s, self.hand_overs.until_s)
        return None if until_s == _NEVER else until_s

    # --- questions

    @property
    def living(self) -> int:
        """How many attempts live."""
        return len(self._living) + len(self.hand_overs.names)

    def uses_lora(self, lora: str) -> bool:
        """Whether an attempt with this LoRA lives."""
        return any(sequence.submit.lora == lora for sequence in self._living.values())

    @property
    def busy(self) -> bool:
        """Whether a step is due: something can be computed, or is still to be reported."""
        return bool(
            ((self._running or self._queue.sequences or self._probe_due) and not self._stalled)
            or self._outcome.parts
            or self.kv_cache.has_events
            or self.hand_overs.any_ends
        )

    @property
    def decodes(self) -> bool:
        """Whether sequences run, and all of them decode."""
        return bool(self._running) and not self._prefilling

    def load(self) -> EngineLoad:
        """Return the counts as of now."""
        blocks, offloading = self.kv_cache.statistics(), self.kv_cache.offloading
        encoder = self.images.cache
        return EngineLoad(
            waiting=len(self._queue.sequences),
            running=len(self._running),
            waiting_tokens=self._queue.tokens + sum([s.uncomputed for s in self._prefilling]),
            held_blocks=blocks.held + blocks.loading,
            cached_blocks=blocks.cached,
            prefill_tokens_per_s=self.budget.throughput.tokens_per_s,
            step_s=self.budget.throughput.step_s,
            preemptions=self._preemptions,
            overtaken=self._queue.overtaken,
            recomputed=self._recomputed,
            not_finite=self.probe.failed,
            onboarding=self._onboarding.waiting,
            late_onboardings=self._onboarding.late,
            shared_blocks=self.kv_cache.shared_blocks,
            prefetched_blocks=self._onboarding.prefetched,
            offered_blocks=offloading.offered_blocks,
            dropped_offers=offloading.dropped_blocks,
            encoder_hits=encoder.hits,
            encoded_images=encoder.encoded,
            fetched_images=encoder.fetched,
            encoder_entries=len(encoder),
            encoder_bytes=encoder.size_bytes,
            image_s=encoder.image_s,
        )

    # --- scheduling

    @property
    def _probe_due(self) -> bool:
        """Whether the next step must compute a probe."""
        return bool(self.probe.asked) or (self.probe.suspects and not self.closed)

    @property
    def _stalled(self) -> bool:
        """Whether nothing has changed since a step could compute nothing."""
        return self._stalled_at == self._changes

    @property
    def _changes(self) -> tuple[int, int]:
        """How often something changed for which sequences may wait."""
        return self.kv_cache.changes, self.images.changes

    @property
    def _tokens_per_s(self) -> float:
        return self.budget.throughput.tokens_per_s or self._limits.first_tokens_per_s

    def _consider_onboarding(self, now_s: float) -> None:
        if self._queue.sequences:
            self.kv_cache.consider(self._queue.sequences, self._tokens_per_s, now_s)

    def _schedule_decodes(self) -> None:
        assert self._step is not None
        size = self._limits.block_size
        for sequence in list(self._running):
            work, length = sequence.work, len(sequence.tokens)
            if length - work.start > 1:
                continue  # it prefills, or was preempted just now
            if work.images and self.images.fit(work.images, work.start, length) == work.start:
                continue  # its last token is one of an image that is not there
            if (length - 1) % size == 0 and length > len(work.blocks) * size and not self._grow(sequence):
                continue
            work.end = length
            self._step.append(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Give a decoding sequence one more block; if need be, preempt the lowest ranked ones. Return False if that
        was the sequence itself: copies hold the other blocks, or it has ended, since it fills the device alone."""
        while not self.kv_cache.grow(sequence):
            lowest = self._running[-1]
            if lowest is sequence and len(sequence.blocks) == self._limits.capacity_blocks:
                self._end_without_room(sequence)
                return False
            self._preempt(lowest, sequence)
            if lowest is sequence:
                return False
        return True

    def _schedule_probe(self) -> None:
        """Begin a probe. It takes blocks and a sequence's place for this step; without them it waits for a later
        step."""
        blocks = -(-len(self.probe.prompt) // self._limits.block_size)
        if len(self._running) < self._limits.max_running and (slots := self.kv_cache.allocate_blocks(blocks)):
            self.probe.begin(self._arrivals, slots)
            self._arrivals += 1

    def _schedule_prefills(self) -> Cause | None:
        """Fill the step with prefills. Return what the head of the queue waits for, if it waits."""
        assert self._step is not None
        if not (self._prefilling or self._queue.sequences):
            return None
        places = self._limits.max_running - int(self.probe.work is not None)
        others = len(self._step) + self.probe.tokens
        alone = not others and len(self._prefilling) + len(self._queue.sequences) == 1
        tokens = self.budget.lone_tokens if alone else self.budget.tokens
        left = max(tokens - others, self._limits.least_step_tokens)
        self._admit_before_prefills(places)
        for sequence in self._prefilling:
            if left <= 0:
                return "tokens"
            self.kv_cache.reuse_cached(sequence)
            left -= self._add_work(sequence, left)
        waiting, passed, reserved = self._queue.sequences, 0, 0
        while left > 0 and passed < len(waiting) and len(self._running) < places:
            sequence = waiting[passed]
            if blocks := self._onboarding.blocks_reserved(sequence):
                passed, reserved = passed + 1, reserved + blocks
            elif self._admit(sequence, reserved):
                left -= self._add_work(sequence, left)
            else:
                return "blocks"
        if passed == len(waiting):
            return None
        return "tokens" if left <= 0 else "places"

    def _admit_before_prefills(self, places: int) -> None:
        """Admit what ranks before a running prefill, so that it is computed first."""
        waiting, passed, reserved = self._queue.sequences, 0, 0
        while self._prefilling and passed < len(waiting) and len(self._running) < places:
            sequence = waiting[passed]
            if sequence.rank > self._prefilling[-1].rank:
                return
            if blocks := self._onboarding.blocks_reserved(sequence):
                passed, reserved = passed + 1, reserved + blocks
            elif not self._admit(sequence, reserved):
                return

    def _admit(self, sequence: Sequence, reserved: int) -> bool:
        """Move a sequence from waiting to running, if its blocks are there, the running ones keep room to grow, and
        those before it in the queue the `reserved` blocks."""
        while not self.kv_cache.has_room_for(sequence, reserved):
            if not self._onboarding.reclaim(prefetches_only=True):
                return False
        self._queue.remove(sequence)
        sequence.begin_by_s = _NEVER
        now_s = self._step_began_s
        waited_s = self._queue.waited_s(sequence, now_s)
        if sequence.admitted_s is None:
            sequence.admitted_s, sequence.waited_s = now_s, waited_s
        else:
            self._outcome.add_note(
                sequence.number, f"goes on after {describe_wait(now_s - sequence.queued_s, waited_s)}"
            )
        self.kv_cache.admit(sequence)
        insort(self._running, sequence, key=rank_of)
        insort(self._prefilling, sequence, key=rank_of)
        return True

    def _add_work(self, sequence: Sequence, most: int) -> int:
        """Put the sequence into the step with at most `most` tokens; return how many, an image that it has encoded
        counted. It stays out of the step if it waits for an image."""
        assert self._step is not None
        start, size, encodes = sequence.computed, self._limits.block_size, self.images.tokens
        end = min(start + most, len(sequence.tokens))
        if end < len(sequence.tokens) and 4 * (end % size) <= end - start:
            end -= end % size  # whole blocks, where that costs little: they are stored, and reused by others, at once
        if sequence.work.images and (end := self.images.fit(sequence.work.images, start, end)) == start:
            return 0
        sequence.work.end = end
        self._step.append(sequence)
        return end - start + self.images.tokens - encodes

    def _preempt(self, sequence: Sequence, grows: Sequence) -> None:
        self._preemptions += 1
        other = "it" if grows is sequence else f"request {grows.request}"
        self._outcome.add_note(
            sequence.number,
            f"preempted, since {other} needed a block and none was free: it gives its {len(sequence.blocks)} blocks"
            f" back, and its {len(sequence.tokens)} tokens are computed again where the cache has lost them",
        )
        self._requeue(sequence)

    def _end_without_room(self, sequence: Sequence) -> None:
        self._end(sequence, "error", f"the KV cache of {self._limits.capacity_blocks} blocks is full")

    def _requeue(self, sequence: Sequence) -> None:
        """Let a running sequence give its blocks back and wait again. It ends if all of the device has no room for
        what it has drawn."""
        if len(sequence.tokens) > self._limits.capacity_blocks * self._limits.block_size:
            self._end_without_room(sequence)
            return
        self._stop(sequence)
        sequence.looked_up = False
        self._queue.add(sequence, self._step_began_s)

    # --- after a step

    def _distrust(self, sequence: Sequence, error: str) -> None:
        """The sequence's numbers were not finite: no sequence uses its blocks any longer, and it begins once more, or
        ends."""
        self.kv_cache.forget(sequence)
        self.images.distrust(sequence.work.images)
        if not sequence.no_reuse:
            self._recomputed += 1
            sequence.no_reuse = True
            self._outcome.add_note(sequence.number, f"begins again without cached blocks: {error}")
            self._requeue(sequence)
            return
        self.probe.count_failed()
        self._end(sequence, "error", error)

    def _report_prompt(self, sequence: Sequence, given: PromptLogprobs) -> None:
        """Report the log-probabilities that a step has given of a prompt. They are never computed again here."""
        work = sequence.work
        assert (given.first, given.count) == (work.scored, len(work.scoring))
        work.scored += given.count
        part = Part(sequence.request, sequence.attempt, sequence.produced, b"", prompt_logprobs=given)
        self._outcome.prompt_parts.append((sequence.frontend, part))

    def _append_token(self, sequence: Sequence, drawn: Drawn, now_s: float) -> None:
        tokens, token = sequence.tokens, drawn.token
        length = len(tokens)
        tokens.append(token)
        finish: FinishReason | None = None
        if token in sequence.stop_tokens:
            finish = "stop"
        elif length + 1 >= sequence.most_tokens:
            finish = "length"
        elif not sequence.begun and sequence.submit.prefill_only and self.kv_cache.are_handed_over(sequence.keys):
            finish = "handed_over"
        part = Part(
            sequence.request,
            sequence.attempt,
            length - sequence.prompt_tokens,
            token.to_bytes(4, "little"),
            finish,
            sequence.cached_tokens,
            None if drawn.logprob is None else (drawn.logprob,),
            "",
            sequence.cached_host_tokens,
            sequence.cached_disk_tokens,
        )
        if sequence.begun and finish is None:
            self._outcome.parts[sequence.frontend].append(part)
            self._outcome.one_token_attempts.append(sequence.number)
            return
        self._outcome.add_boundary(sequence.frontend, part)
        if not sequence.begun:
            self._begin_answer(sequence)
            self._outcome.begun.append(sequence.begun_report(now_s))
        if finish is not None:
            self._drop(sequence)
        elif sequence.submit.prefill_only:
            self._drop(sequence)
            self.hand_overs.add(sequence, now_s)

    def _begin_answer(self, sequence: Sequence) -> None:
        """From its first token on, a sequence ranks by its arrival: if blocks become few, it is no earlier to give its
        own back than one that came later, and waits for none of those."""
        sequence.begun = True
        if sequence.due_s > sequence.arrived_s:
            self._running.remove(sequence)
            sequence.due_s = sequence.arrived_s
            insort(self._running, sequence, key=rank_of)

    # --- ends

    def _unfit(self, sequence: Sequence) -> str:
        """Return why a new sequence cannot be computed. Empty if it can."""
        limits, length = self._limits, len(sequence.tokens)
        if self.closed:
            return self.closed
        if not 0 < sequence.submit.prompt_tokens <= length:
            return f"{length} tokens of which {sequence.submit.prompt_tokens} are the prompt"
        if sequence.submit.lora and sequence.submit.lora not in self.loras:
            return f"no LoRA {sequence.submit.lora} is loaded"
        if length >= limits.context_length + bool(sequence.submit.sampling.pooling):
            return f"{length} tokens leave no room in a context of {limits.context_length}"
        if sequence.blocks_needed > limits.capacity_blocks:
            return f"{length} tokens do not fit into {limits.capacity_blocks} blocks of {limits.block_size}"
        return self._queue.refusal(length)

    def _expire(self, now_s: float) -> None:
        if now_s < self._earliest_end_s:
            return
        for sequence in [s for s in self._living.values() if s.ends_by_s <= now_s]:
            if sequence.deadline_s <= now_s:
                self._end(sequence, "deadline")
            else:
                self._end(sequence, "error", f"{NOT_BEGUN}: others that the worker computes: {len(self._running)}")
        self._earliest_end_s = min((s.ends_by_s for s in self._living.values()), default=_NEVER)

    def _end(self, sequence: Sequence, finish: FinishReason, error: str = "", embedding: bytes = b"") -> None:
        self._report_end(sequence, finish, error, embedding)
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Remove the sequence from every list; its blocks become free or cached."""
        del self._living[sequence.name]
        if sequence.blocks:
            self._stop(sequence)
        else:
            self._queue.remove(sequence)
            self._onboarding.abandon(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Take the sequence out of the running ones, and free its blocks."""
        self._running.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.kv_cache.free(sequence)

    def _report_end(self, sequence: Sequence, finish: FinishReason, error: str = "", embedding: bytes = b"") -> None:
        """Report the end of an attempt, without a token."""
        self._outcome.add_boundary(sequence.frontend, sequence.last_part(finish, error, embedding))

    def validate(self) -> None:
        """Raise AssertionError if the scheduler contradicts itself. O(everything); call it between steps."""
        self.kv_cache.validate(self._running, self.probe.slots)
        self._queue.validate()
        self.hand_overs.validate()
        assert sorted(self._running, key=rank_of) == self._running
        assert sorted(self._prefilling, key=rank_of) == self._prefilling
        assert set(self._prefilling) <= set(self._running)
        assert len(self._running) <= self._limits.max_running
        waiting = self._queue.sequences
        assert {s.name for s in (*waiting, *self._running)} == self._living.keys()
        assert len(self._living) == len(waiting) + len(self._running)
        for sequence in self._running:
            assert sequence.uncomputed >= 1
            assert (sequence.uncomputed > 1) == (sequence in self._prefilling)
            assert sequence.ends_by_s >= self._earliest_end_s
            assert sequence.begin_by_s == _NEVER
        assert not (self._stalled and any(not sequence.work.images for sequence in self._running))
        self.images.validate()
        assert self._living.keys().isdisjoint(self.hand_overs.names)
        assert len(self._expected) <= MOST_EXPECTED
