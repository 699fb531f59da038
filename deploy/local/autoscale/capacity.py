"""How many workers a load needs, by the times of one worker that `plan` simulates too. Pure.

    prompts take      u = rate x p                     of a worker's time; p is the time of one prompt
    sequences at once B = rate x output x d(B) ÷ (1 - u)     d(B) is the time of a step with B of them
    time a token      d(B) ÷ (1 - u)
    waiting           P(wait > t) = C x exp(-(n - load) x t ÷ s)      Erlang's C of n workers, s = p + d(B)

`plan` simulates a fleet for minutes; this takes a millisecond, because it is asked every few seconds. What it gets
wrong shows as a queue, which decider.py counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, sqrt
from typing import Literal, get_args

from msgspec import Struct

from shared.measured_times import MeasuredTimes

WorkerRole = Literal["aggregated", "prefill", "decode"]
Workers = Mapping[WorkerRole, int]
ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)
FULL = 0.9
"""The largest share of its time for which a worker is planned to be busy with prompts."""
LATE = 0.1
"""The share of first tokens that may be late."""
STEP_S: Mapping[WorkerRole, float] = {"aggregated": 0.25, "prefill": 0.05}
"""The longest step with parts of prompts, in seconds, as workers have it by default. Those that decode what others have
computed are planned as if they computed no prompts."""
LEAST_STEP_TOKENS = 16
"""The tokens of a prompt that a step computes, whatever the time."""
SPARE = 1.28
"""Standard deviations above the mean number of sequences for which there is room: nine times of ten."""


class RequestMix(Struct, frozen=True):
    """One request, in the mean."""

    prompt_tokens: float
    cached_tokens: float
    """The part of the prompt that was found cached."""
    output_tokens: float

    @property
    def context(self) -> float:
        """The tokens that a sequence attends to, half-way through its answer."""
        return self.prompt_tokens + self.output_tokens / 2


class ScaleGoals(Struct, frozen=True):
    """What the workers should reach, in seconds."""

    ttft_s: float
    """The time to the first token of nine requests of ten."""
    itl_s: float
    """The mean time between two tokens of an answer."""


class WorkerTimes(Struct, frozen=True):
    """The times of one worker."""

    prefill: MeasuredTimes
    """(tokens, context before them, seconds)"""
    decode: MeasuredTimes
    """(sequences, context of each, seconds)"""
    overhead_s: float
    """The part of a first token that no step takes."""
    kv_tokens: float
    """The tokens of KV for which there is room."""
    max_running: int

    def prompt_s(self, mix: RequestMix, longest_s: float) -> float:
        """Return the time of one prompt, in as many steps of at most `longest_s` as a worker makes of it."""
        tokens = max(1.0, mix.prompt_tokens - mix.cached_tokens)

        def seconds(step: float) -> float:
            """Return the time of a step of the prompt, with the context that steps have in the mean."""
            return self.prefill.at(step, mix.cached_tokens + (tokens - step) / 2)

        if seconds(tokens) <= longest_s:
            return seconds(tokens)
        step, more = min(tokens, LEAST_STEP_TOKENS), tokens
        while more - step > 1:
            middle = (step + more) / 2
            step, more = (middle, more) if seconds(middle) <= longest_s else (step, middle)
        whole, rest = divmod(tokens, step)
        return whole * seconds(step) + seconds(rest)

    def step_s(self, sequences: float, context: float) -> float:
        """Return the time of a step that only decodes."""
        return self.decode.at(max(1.0, sequences), context)


def workers_needed(
    role: WorkerRole, rate: float, mix: RequestMix, times: WorkerTimes, goals: ScaleGoals, most: int
) -> int:
    """Return the fewest workers of a role that reach the goals at `rate` requests a second, at most `most`. 0 if there
    are no requests. A goal for first tokens that no number of workers reaches counts as twice the time of a lone
    prompt."""
    if rate <= 0 or most < 1:
        return 0
    prompt_s = times.prompt_s(mix, STEP_S[role]) if role in STEP_S else 0.0
    numbers = range(1, most)
    return next((number for number in numbers if _reaches(number, role, rate, mix, prompt_s, times, goals)), most)


def _reaches(
    number: int,
    role: WorkerRole,
    rate: float,
    mix: RequestMix,
    prompt_s: float,
    times: WorkerTimes,
    goals: ScaleGoals,
) -> bool:
    each = rate / number
    left = 1.0 - each * prompt_s
    if left < 1.0 - FULL:
        return False
    step_s = 0.0
    if role != "prefill":
        room = min(times.max_running, times.kv_tokens / max(1.0, mix.context))
        sequences = _sequences(each * mix.output_tokens / left, mix.context, times, room)
        if number * sequences + SPARE * sqrt(number * sequences) > number * max(1.0, room):
            return False
        step_s = times.step_s(sequences, mix.context)
        lone_s = times.step_s(1.0, mix.context)
        if step_s / left > max(goals.itl_s, 1.1 * lone_s):
            return False
    if role == "decode":
        return True
    served_s = prompt_s + step_s
    load = rate * served_s
    if load >= FULL * number:
        return False
    patience_s = goals.ttft_s - served_s - times.overhead_s
    patience_s = patience_s if patience_s > 0 else served_s
    return _erlang_c(number, load) * exp(-(number - load) * patience_s / served_s) <= LATE


def _sequences(demand: float, context: float, times: WorkerTimes, room: float) -> float:
    """Return how many sequences a worker has at once: the number at which it draws `demand` tokens a second of its
    time for steps. More than `room` if there is no such number below."""
    sequences = 0.0
    for _ in range(50):
        after = demand * times.step_s(sequences, context)
        if after > room or after - sequences < 0.01:
            return after
        sequences = after
    return sequences


def _erlang_c(workers: int, load: float) -> float:
    """Return the share of requests that wait, where `load` workers are busy in the mean."""
    blocked = 1.0
    for number in range(1, workers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1.0 - load / workers * (1.0 - blocked))
