"""One attempt as the scheduler sees it. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import inf
from sys import intern

from services.worker.messages import Submit
from services.worker.runner import Work
from shared.blocks import Content
from shared.hashing import ContentKey, content_key, content_keys, pack_tokens, root_key, token_array


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and how far their KV is computed.

        tokens   | prompt                     | output so far      |
                 0         computed      prompt_tokens        len(tokens)
        blocks   | b0 | b1 | b2 | …       cover at least the tokens computed next
                   stored ──┘             leading blocks that the pool knows by key

    On a continuation the tokens begin with output of earlier attempts. The KV of a drawn token is computed one step
    later, so `uncomputed` is 1 between the steps of a decode.

    What a token needs comes first, and here: between two steps it falls out of the CPU's caches, and then every object
    more that a token touches costs it 0.1 µs.
    """

    work: Work
    """What runners see of it, `tokens` and `blocks` included."""
    tokens: array[int]
    request: str
    attempt: int
    frontend: str
    prompt_tokens: int
    number: int
    """`Submit.number`."""
    stop_tokens: frozenset[int]
    """Each ends it."""
    most_tokens: int
    """It ends with this length."""
    submit: Submit
    arrival: int
    """Order of arrival."""
    deadline_s: float
    begin_by_s: float
    """Until when it may wait to be admitted; infinite: its deadline alone ends its wait, or it was admitted."""
    block_size: int
    root: ContentKey
    keys: list[ContentKey]
    """Content keys of the full blocks of the tokens that came, and of those stored since."""
    blocks: list[int]
    stored: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache by the time the first token was drawn."""
    begun: bool = False
    """A token was drawn in this attempt, so that `cached_tokens` stands."""
    cached_host_tokens: int = 0
    """Of these, those that were loaded for it from the kvbm's host memory …"""
    cached_disk_tokens: int = 0
    """… and from its disk."""
    loaded: dict[int, bool] = field(default_factory=dict)
    """Blocks that were loaded for it → whether from disk."""
    looked_up: bool = False
    """The kvbm was considered, since it began to wait."""
    alone: bool = False
    """It uses no block that it did not compute: its numbers were not finite, and some block that it had may be why."""

    @staticmethod
    def of(
        submit: Submit,
        *,
        arrival: int,
        now_s: float,
        model: str,
        block_size: int,
        eos_token_ids: frozenset[int],
        context_length: int,
    ) -> Sequence:
        """Hashes the tokens once."""
        sampling = submit.sampling
        root = root_key(model, submit.lora, submit.salt)
        tokens, blocks = token_array(submit.tokens), list[int]()
        stop_tokens = frozenset[int]() if sampling.ignore_eos else eos_token_ids
        return Sequence(
            work=Work(arrival, tokens, 0, 0, blocks, sampling, submit.prompt_tokens),
            tokens=tokens,
            request=submit.request,
            attempt=submit.attempt,
            frontend=intern(submit.frontend),
            prompt_tokens=submit.prompt_tokens,
            number=submit.number,
            stop_tokens=stop_tokens.union(sampling.stop_token_ids) if sampling.stop_token_ids else stop_tokens,
            most_tokens=min(submit.prompt_tokens + sampling.max_tokens, context_length),
            submit=submit,
            arrival=arrival,
            deadline_s=now_s + submit.time_left_s,
            begin_by_s=inf if submit.wait_left_s is None else now_s + submit.wait_left_s,
            block_size=block_size,
            root=root,
            keys=content_keys(root, submit.tokens, block_size),
            blocks=blocks,
        )

    @property
    def name(self) -> tuple[str, int]:
        return self.request, self.attempt

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first: the higher priority, then the earlier arrival."""
        return -self.submit.priority, self.arrival

    @property
    def ends_by_s(self) -> float:
        """When time ends it, unless it goes on before."""
        return min(self.deadline_s, self.begin_by_s)

    @property
    def computed(self) -> int:
        """Leading tokens whose KV is in the blocks."""
        return self.work.start

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.work.start

    @property
    def produced(self) -> int:
        """Length of the request's whole output so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def blocks_needed(self) -> int:
        """Blocks that cover all tokens."""
        return -(-len(self.tokens) // self.block_size)

    @property
    def reusable_keys(self) -> list[ContentKey]:
        """Keys of the blocks that may come from the cache: at least the last token is always computed, and for a mean
        over all positions each of them."""
        if self.alone or self.work.sampling.pooling == "mean":
            return []
        return self.keys[: (len(self.tokens) - 1) // self.block_size]

    def count_cached(self, first: int) -> None:
        """Blocks first … stored - 1 were found in the cache; of a continuation only the prompt's tokens count."""
        size, prompt = self.block_size, self.prompt_tokens
        self.cached_tokens += min(self.stored * size, prompt) - min(first * size, prompt)
        if self.loaded:
            from_disk = list(map(self.loaded.get, range(first, self.stored)))
            full = max(prompt // size - first, 0)  # of these; the next one has what is left of the prompt, if anything
            left = max(prompt - (first + full) * size, 0)
            for blocks, tokens in ((from_disk[:full], size), (from_disk[full : full + 1], left)):
                self.cached_disk_tokens += tokens * blocks.count(True)
                self.cached_host_tokens += tokens * blocks.count(False)

    def forget_cached(self) -> None:
        """What was found was given back before the first token."""
        self.cached_tokens = self.cached_host_tokens = self.cached_disk_tokens = 0

    def content(self, index: int) -> Content:
        """What block `index` holds: a full one, whose key is known or next."""
        start = index * self.block_size
        packed = self.submit.tokens[4 * start : 4 * (start + self.block_size)]
        if len(packed) < 4 * self.block_size:  # some of it was drawn here
            packed = pack_tokens(self.tokens[start : start + self.block_size])
        parent = self.keys[index - 1] if index else None
        if index == len(self.keys):
            self.keys.append(content_key(parent or self.root, packed))
        return Content(self.keys[index], parent, packed, self.submit.lora, self.submit.salt)
