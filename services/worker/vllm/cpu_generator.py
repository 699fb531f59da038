"""Random numbers on a CPU whose last draw vLLM can take back.

vLLM draws a token in every step of a prompt, also in those that compute only a part of it, and takes such a draw back
by setting its generator's offset. Torch has no offset on a CPU: vLLM 0.32 and 0.33 end there with "CPU Generator does
not use offset" as soon as a request with a seed needs more than one step for its prompt. All requests of a worker have
seeds.
"""

from __future__ import annotations

import torch


class RewindableGenerator(torch.Generator):  # type: ignore[misc]
    """A generator that begins again, on a CPU, if its offset is set: only prompts have draws that are taken back, and
    no token of the answer was drawn before."""

    def get_offset(self) -> int:
        return 0 if self.device.type == "cpu" else super().get_offset()

    def set_offset(self, offset: int) -> None:
        if self.device.type == "cpu":
            self.manual_seed(self.initial_seed())
        else:
            super().set_offset(offset)


def install() -> None:
    """Have vLLM make its generators in this process with this class."""
    torch.Generator = RewindableGenerator
