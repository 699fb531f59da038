"""Runner, which computes an engine's steps: native, simulated or echo. Work and Drawn are its input and output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from services.worker.contracts.messages import EngineOperation, MemoryUse, Ready
from services.worker.contracts.mover import Mover
from shared.messages.frames import PromptLogprobs, TokenLogprob
from shared.messages.generate import Image, Sampling


class Work(Struct):
    """One sequence's share of a step. A sequence has one Work for life, which the scheduler advances between steps.

    history   | computed before (blocks hold their KV) | computed now          | later
              0                                        start                   end
    """

    sequence: int
    """Number that names the sequence while it lives in the engine."""
    history: Sequence[int]
    """All known token ids: the prompt, then the output."""
    start: int
    end: int
    blocks: Sequence[int]
    """The sequence's slots, in order; they cover all positions before `end`."""
    sampling: Sampling
    prompt_tokens: int
    """Where in `history` the output begins."""
    barred: Sequence[int] = ()
    """Distinct token ids that may not be drawn before the output has `sampling.min_tokens` tokens."""
    kept: object = None
    """State that the runner keeps from one step with this sequence to the next."""
    lora: str = ""
    """Id of the LoRA that computes it, which is loaded. Empty if there is none."""
    images: Sequence[Image] = ()
    """The images of the prompt, by their start. Their embeddings stand in for those of their tokens. Their keys are
    those of embeddings: other ones for each tenant salt."""
    scored: int = 1
    """How many leading prompt tokens need no log-probability any longer. Nothing precedes the first, so it has none."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids to compute now, at positions start … end - 1."""
        return self.history[self.start : self.end]

    @property
    def ends(self) -> bool:
        """Whether this step yields a token or an embedding, as a chunk in the middle of a prefill does not."""
        return self.end == len(self.history)

    @property
    def draws(self) -> bool:
        """Whether this step yields a token, drawn from the last position's logits, and not an embedding."""
        return self.end == len(self.history) and not self.sampling.pooling

    @property
    def scoring(self) -> range:
        """The positions of this step whose logits give a log-probability that is due: that of the prompt's next token.
        Empty if `sampling.prompt_logprobs` asks for none."""
        if self.sampling.prompt_logprobs < 0:
            return range(0)
        return range(max(self.start, self.scored - 1), min(self.end, self.prompt_tokens - 1))

    @property
    def draw_index(self) -> int:
        """Index in the output of the token to draw; it fixes the random number together with the seed."""
        return self.end - self.prompt_tokens

    @property
    def barred_now(self) -> Sequence[int]:
        """Token ids that this step may not draw, unless the grammar allows nothing else."""
        return self.barred if self.barred and self.draw_index < self.sampling.min_tokens else ()


class Drawn(Struct, frozen=True, gc=False):
    """What a step gives for one work: a drawn token, an embedding, or only log-probabilities of the prompt."""

    token: int
    """The token, if the work draws."""
    logprob: TokenLogprob | None = None
    """The token's log-probability, where `sampling.logprobs` ≥ 0."""
    error: str = ""
    """Why there is no token after all; the sequence ends with this error."""
    embedding: bytes = b""
    """The embedding as Part carries it; there is no token then."""
    suspect: bool = False
    """The error is that numbers were not finite. Any block that they were computed from may be wrong."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probabilities of the prompt tokens after the positions `Work.scoring`. None if that is empty."""


class EmbeddingStore(Protocol):
    """Embeddings of images outside of this process. It belongs to one thread, which waits for it."""

    def fetch_or_encode(self, key: bytes, encode: Callable[[], bytes]) -> tuple[bytes, bool]:
        """Return the bytes of an image's embeddings, and whether they were stored already. Otherwise they are those of
        `encode`, and are stored now, if that can be done."""
        ...

    def store_owed(self) -> None:
        """Store what could not be stored when it was encoded, a little at a time."""
        ...

    @property
    def owes(self) -> bool:
        """Whether `store_owed` has something to store."""
        ...


class EmbeddingLookups(Protocol):
    """An EmbeddingStore as an engine's loop uses it: no method waits."""

    def fileno(self) -> int:
        """A descriptor that is readable while `take_found` has something to return."""
        ...

    def look_up(self, key: bytes) -> None:
        """Begin to look for an image's embeddings; `take_found` has the answer, some time later."""
        ...

    def take_found(self) -> list[tuple[bytes, bytes | None]]:
        """Return the answers that have come since the last call: an image's key and its embeddings, or None if this
        process is to encode it."""
        ...

    def keep(self, key: bytes, embeddings: bytes) -> None:
        """Store what this process has encoded, if that can be done."""
        ...

    def close(self) -> None: ...


class Runner(Protocol):
    """Computes steps. Owns the KV memory of `capacity_blocks` slots; knows no scheduling."""

    @property
    def facts(self) -> Ready: ...

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        """Compute a step. Return one entry per work, None for a work that neither ends nor scores positions. Where the
        numbers of a work are not finite, its entry is `suspect`, and the other entries are not affected. Raise
        ModelError if the device fails."""
        ...

    def operate(self, operation: EngineOperation, name: str, path: str, level: int) -> str:
        """Do an operation that `facts.operations` names, between steps. Return why it was not done, empty if it
        was. At `clear` there is nothing to do. A runner that sleeps computes nothing until `wake`, and its KV is lost;
        its mover is detached then, and stays the same."""
        ...

    def memory_use(self) -> MemoryUse | None:
        """Return what takes the device's memory; None if it is the host's."""
        ...

    def mover(self, clock: Callable[[], float]) -> Mover:
        """Return the mover between this runner's KV memory and a kvbm's pool; `clock` is the engine's. Called at most
        once, before the first attempt; closed before the runner. Raise ConfigError if the runner has no KV to
        exchange."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Overlaps(Protocol):
    """A Runner whose device computes a step while the thread goes on."""

    meanwhile: Callable[[Callable[[], bool]], None] | None
    """Called once in each step, while the device computes it, with a function that says whether it still does; the
    step goes on when it returns. None if nothing is called."""


class AttachedPool(Struct, frozen=True):
    """The pool that an engine is attached to, for its other processes."""

    directory: str
    owner: str
    """The name of the engine's lock, which they share."""
    file: tuple[int, int]
    """The device and inode of the pool's file."""


@runtime_checkable
class CopiesInRanks(Protocol):
    """A Runner whose other processes copy blocks, too."""

    pool_place: Callable[[], AttachedPool] | None
    """Says what the engine is attached to, once it is. Set before `mover` is called."""
