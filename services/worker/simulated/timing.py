"""Timing: how long a simulated engine's step takes. Pure.

By formula, in the terms of a roofline:

    step = fixed + max(weights + row x rows, token x rows)      the matmuls: reading weights, or arithmetic
                 + pair x Σ query-key pairs of prefills         attention, quadratic in the prompt
                 + kv_token x Σ tokens that decodes attend to   reading their KV

where `rows` are all tokens computed in the step. The defaults are an 8B Llama shape (32 layers, hidden 4096, 8 KV heads
of 128, 15 GB of bf16 weights) on one H200. Measured there: the matmuls of a step take 3.92 ms for 1 to 8 rows, 4.08 for
32, 4.18 for 64 and 4.57 for 128, and run at 609 to 621 TFLOP/s from 256 rows on; memory is read at 4.63 TB/s. Derived:
24.4 µs a row of arithmetic (2 x 7.5e9 FLOP), 28 ns a KV token (131,072 bytes). Assumed, not measured: attention at
400 TFLOP/s (4 x 4096 x 32 FLOP a pair), and 0.5 ms in addition to the model.

Or by a table of measured times. A step's prefills are looked up as one of all their tokens, at the context at which it
has as many query-key pairs. With several prompts that is below 0, as they do not attend to one another. Its decodes are
looked up as their number at their mean context. A step with both reads the weights once: it takes the sum, less the
shortest decode step of the table.

Copies of blocks to and from a kvbm's pool run during the steps and slow none. Measured on that GPU: 51 to 54 GB/s a
direction, by DMA; steps during copies took 1 to 9 % longer, which is left out here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from services.worker.config import SimulatedConfig
from services.worker.contracts.runner import Work
from services.worker.simulated.mover import SimulatedMover
from shared.errors import ConfigError
from shared.measured_times import MeasuredTimes, Point


class Timing:
    """Seconds that steps and copies take."""

    def __init__(self, config: SimulatedConfig, table: Table | None = None) -> None:
        """With a table the formula's terms are not used. `config.speed` divides the seconds in both cases."""
        self._config = config
        self._table = table

    def step_s(self, works: Sequence[Work]) -> float:
        """Return the seconds of a step; 0 if nothing is computed."""
        if not works:
            return 0.0
        step = _Totals(works)
        seconds = self._formula_s(step) if self._table is None else self._table.step_s(step)
        return seconds / self._config.speed

    def mover(self, block_size: int, clock: Callable[[], float]) -> SimulatedMover:
        """Return a mover that takes the time of copying blocks of `block_size` tokens to and from a kvbm's pool."""
        config = self._config
        return SimulatedMover(block_size * config.kv_token_bytes, config.copy_bytes_per_s * config.speed, clock)

    def _formula_s(self, step: _Totals) -> float:
        config, rows = self._config, step.prefilled + step.decodes
        matmuls_s = max(config.weights_s + config.row_s * rows, config.token_s * rows)
        attention_s = config.pair_s * step.pairs + config.kv_token_s * step.attended
        return config.fixed_s + matmuls_s + attention_s


class _Totals:
    """Sums over a step's works."""

    def __init__(self, works: Sequence[Work]) -> None:
        decodes = [work.end for work in works if work.end - work.start == 1]
        self.prefilled = 0
        self.pairs = 0
        """Pairs of a query and a key in prefills: each token attends to all before it and to itself."""
        self.decodes = len(decodes)
        self.attended = sum(decodes)
        """Sum over decodes of the tokens attended to."""
        if self.decodes == len(works):
            return
        for work in works:
            count = work.end - work.start
            if count != 1:
                self.prefilled += count
                self.pairs += count * work.start + count * (count + 1) // 2


class Table:
    """Measured seconds on two grids: prefills by (tokens, context before them), decodes by (batch, context of each).

    In TOML, every combination of the values that occur:

        prefill = [[16, 0, 0.005], [8192, 0, 0.25], [16, 8192, 0.005], [8192, 8192, 0.35]]
        decode = [[1, 0, 0.004], [64, 0, 0.0045], [1, 4096, 0.0045], [64, 4096, 0.012]]
    """

    def __init__(self, prefill: MeasuredTimes, decode: MeasuredTimes) -> None:
        self._prefill = prefill
        self._decode = decode
        self._shared_s = min(decode.at(1, 0), prefill.at(1, 0))
        """What each step takes for its weights and its start. A step with prefills and decodes takes it once."""

    @staticmethod
    def parse(content: bytes, name: str, *, busy: bool = False) -> Table:
        """Read a table in TOML, or the JSON of `headrace profile`; with `busy` that one's times while all workers of
        the machine compute. Raise ConfigError, which begins with `name`."""
        try:
            points: _Times
            if content.lstrip().startswith(b"{"):
                profile = msgspec.json.decode(content, type=_ProfileFile)
                points = (busy and profile.busy) or profile
            else:
                points = msgspec.toml.decode(content, type=_TableFile)
            return Table(MeasuredTimes(points.prefill, "prefill"), MeasuredTimes(points.decode, "decode"))
        except ValueError as wrong:  # msgspec's and UTF-8's too
            raise ConfigError(f"{name}: {wrong}") from None

    def step_s(self, step: _Totals) -> float:
        """Return the seconds of a step's prefills and decodes, as the module says."""
        seconds = 0.0
        if step.prefilled:
            seconds += self._prefill_s(step.prefilled, step.pairs / step.prefilled - (step.prefilled + 1) / 2)
        if step.decodes:
            decodes_s = self._decode.at(step.decodes, step.attended / step.decodes)
            seconds += max(0.0, decodes_s - self._shared_s) if step.prefilled else decodes_s
        return seconds

    def _prefill_s(self, tokens: int, context: float) -> float:
        """Return the seconds of prefills. Fewer tokens than were measured take their part of what goes beyond
        `shared_s`. With a context below 0 they take less than without one, by what as many tokens more would cost."""
        if context < 0:
            alone_s = self._prefill_s(tokens, 0.0)
            return max(self._shared_s, 2 * alone_s - self._prefill_s(tokens, -context))
        least = self._prefill.least
        if tokens >= least:
            return self._prefill.at(tokens, context)
        return self._shared_s + tokens / least * (self._prefill.at(least, context) - self._shared_s)


class _Times(Struct):
    prefill: list[Point]
    decode: list[Point]


class _ProfileFile(_Times):
    """The part of a profile that is needed here."""

    busy: _Times | None = None


class _TableFile(_Times, forbid_unknown_fields=True):
    pass
