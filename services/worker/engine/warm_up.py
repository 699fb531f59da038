"""The first tokens of an engine are computed before it is ready, so that no request pays for what only the first does.

That is on a GPU the handle of cuBLAS, its choice of kernels, and their loading; on a CPU the reading of weights that
are mapped. Nothing is scheduled yet: the tokens take the first blocks, which hold nothing, and nothing remembers them.
"""

from __future__ import annotations

from array import array

from services.worker.config import Device
from services.worker.contracts.runner import Runner, Work
from services.worker.limits import MAX_STEP_TOKENS
from shared.errors import ModelError
from shared.messages.generate import Sampling

WARM_TOKENS: dict[Device, int] = {"cpu": 64, "cuda": MAX_STEP_TOKENS}
"""Tokens of the prompt, if the context has room for them: on a GPU those of the largest step, whose kernels differ from
those of small ones; on a CPU as many as the first step of a long prompt computes by default."""
_TOKEN = 0


def warm_up(runner: Runner, device: Device) -> None:
    """Compute a prompt and one token after it, one step each. It does not matter whether the numbers are finite, since
    such a prompt is no text. Raise ModelError if they cannot be computed."""
    facts = runner.facts
    tokens = min(WARM_TOKENS[device], facts.context_length - 1)
    if tokens < 1:
        return
    history = array("I", [_TOKEN]) * tokens
    blocks = list(range(-(-(tokens + 1) // facts.block_size)))
    work = Work(0, history, 0, tokens, blocks, Sampling(max_tokens=2, temperature=0.0), tokens)
    try:
        runner.step([work])
        history.append(_TOKEN)
        work.start, work.end = tokens, tokens + 1
        runner.step([work])
    except Exception as wrong:  # whatever a runner raises: the engine has not started
        raise ModelError(
            f"the first tokens, {tokens} of a prompt and one after it, cannot be computed: {wrong}"
        ) from wrong
