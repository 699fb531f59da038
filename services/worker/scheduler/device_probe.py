"""DeviceProbe: when sequence after sequence fails with numbers that are not finite, is the device broken? Pure.

A device or weights that are broken fail every sequence, but so may the prompts of one client. So after
`MOST_NOT_FINITE` sequences have failed without one token drawn between them, the next step computes a probe: a single
token that no client chose, in a block of its own. The engine ends where the probe's numbers are not finite either.

A sequence that fails gives up all of its blocks and is computed once more from its tokens alone, since nothing says
which block was wrong. So no client can end an engine.
"""

from __future__ import annotations

from array import array

from services.worker.contracts.runner import Drawn, Work
from shared.errors import ModelError
from shared.messages.generate import Sampling

MOST_NOT_FINITE = 16
"""Number of sequences in a row that may fail with numbers that are not finite before a probe is computed."""
_PROBE_TOKEN = 0
_PROBE_SAMPLING = Sampling(max_tokens=1, temperature=0.0)


class DeviceProbe:
    """Counts failed sequences; at most one probe is in a step."""

    def __init__(self) -> None:
        self.work: Work | None = None
        """The probe of the step under way, which is the last of the step's works."""
        self.failed = 0
        """Sequences that failed since the start."""
        self.failed_in_a_row = 0
        """Sequences that failed since a token was last drawn. The scheduler sets it to 0 with each token."""

    @property
    def due(self) -> bool:
        """Whether the next step must compute a probe."""
        return self.failed_in_a_row >= MOST_NOT_FINITE

    @property
    def slots(self) -> list[int]:
        """The block of the probe under way, if there is one."""
        return [] if self.work is None else list(self.work.blocks)

    def count_failed(self) -> None:
        """A sequence has failed: its numbers were not finite although no other sequence's block was used."""
        self.failed += 1
        self.failed_in_a_row += 1

    def begin(self, number: int, slot: int) -> None:
        """Make the probe's work, in the block `slot`; `number` names it as a sequence's does."""
        self.work = Work(number, array("I", [_PROBE_TOKEN]), 0, 1, [slot], _PROBE_SAMPLING, 1)

    def end(self, drawn: Drawn | None) -> None:
        """The probe was computed. Where its numbers are finite, the failed sequences were at fault. Raise ModelError
        if they are not."""
        assert drawn is not None
        self.work = None
        if drawn.suspect and self.due:  # a token that a sequence drew in this step proves as much as a good probe
            raise ModelError(
                f"{drawn.error}: {MOST_NOT_FINITE} sequences failed in a row, and so did a single token after them; "
                "the device or the weights are broken"
            )
        self.failed_in_a_row = 0
