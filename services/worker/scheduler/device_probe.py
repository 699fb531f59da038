"""DeviceProbe: tokens that no client chose are computed, to find a device that is broken. Pure.

An idle device is probed now and then, since one that is lost or hangs looks like one that has nothing to do: the shell
asks for it, and waits for the end of the step. It does not matter what is computed.

A device or weights that are broken fail every sequence, but so may the prompts of one client. So after
`MOST_NOT_FINITE` sequences have failed without one token drawn between them, the next step computes a probe: a single
token. The engine ends where the probe's numbers are not finite either.

A probe has blocks of its own for one step, which never enter the prefix cache.

A sequence that fails gives up all of its blocks and is computed once more from its tokens alone, since nothing says
which block was wrong. So no client can end an engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from services.worker.contracts.runner import Drawn, Work
from shared.errors import ModelError
from shared.messages.generate import Sampling

MOST_NOT_FINITE = 16
"""Number of sequences in a row that may fail with numbers that are not finite before a probe is computed."""
_PROBE_PROMPT = (0,)
_PROBE_SAMPLING = Sampling(max_tokens=1, temperature=0.0)


class DeviceProbe:
    """Counts failed sequences; at most one probe is in a step."""

    def __init__(self) -> None:
        self.work: Work | None = None
        """The probe of the step under way, which is the last of the step's works."""
        self.asked: Sequence[int] = ()
        """The prompt of a probe that was asked for and has not ended. Empty if there is none."""
        self.failed = 0
        """Sequences that failed since the start."""
        self.failed_in_a_row = 0
        """Sequences that failed since a token was last drawn. The scheduler sets it to 0 with each token."""

    @property
    def suspects(self) -> bool:
        """Whether MOST_NOT_FINITE sequences have failed in a row, so that a probe must be computed."""
        return self.failed_in_a_row >= MOST_NOT_FINITE

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the next probe."""
        return self.asked or _PROBE_PROMPT

    @property
    def slots(self) -> list[int]:
        """The blocks of the probe under way, if there is one."""
        return [] if self.work is None else list(self.work.blocks)

    @property
    def tokens(self) -> int:
        """How many tokens the step under way computes for a probe."""
        return 0 if self.work is None else len(self.work.history)

    def count_failed(self) -> None:
        """A sequence has failed: its numbers were not finite although no other sequence's block was used."""
        self.failed += 1
        self.failed_in_a_row += 1

    def begin(self, number: int, slots: list[int]) -> None:
        """Make the probe's work, in the blocks `slots`; `number` names it as a sequence's does."""
        history = array("I", self.prompt)
        self.work = Work(number, history, 0, len(history), slots, _PROBE_SAMPLING, len(history))

    def end(self, drawn: Drawn | None) -> None:
        """The probe was computed. Where its numbers are finite, the failed sequences were at fault. Raise ModelError
        if they are not, and sequences have failed."""
        assert drawn is not None
        self.work, self.asked = None, ()
        if drawn.suspect and self.suspects:  # a token that a sequence drew in this step proves as much as a good probe
            raise ModelError(
                f"{drawn.error}: {MOST_NOT_FINITE} sequences failed in a row, and so did a single token after them; "
                "the device or the weights are broken"
            )
        if not drawn.suspect:
            self.failed_in_a_row = 0
