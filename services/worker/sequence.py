"""One attempt as the scheduler sees it (pure)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from services.worker.engine import Submit
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
    """

    number: int
    """Order of arrival."""
    submit: Submit
    deadline_s: float
    block_size: int
    root: ContentKey
    tokens: array[int]
    keys: list[ContentKey]
    """Content keys of the full blocks of `tokens`."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    stored: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache by the time the first token was drawn."""
    begun: bool = False
    """A token was drawn in this attempt, so that `cached_tokens` stands."""

    @staticmethod
    def of(submit: Submit, *, number: int, now_s: float, model: str, block_size: int) -> Sequence:
        """Hashes the tokens once."""
        root = root_key(model, submit.lora, submit.salt)
        return Sequence(
            number=number,
            submit=submit,
            deadline_s=now_s + submit.time_left_s,
            block_size=block_size,
            root=root,
            tokens=token_array(submit.tokens),
            keys=content_keys(root, submit.tokens, block_size),
        )

    @property
    def name(self) -> tuple[str, int]:
        return self.submit.request, self.submit.attempt

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first: the higher priority, then the earlier arrival."""
        return -self.submit.priority, self.number

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def produced(self) -> int:
        """Length of the request's whole output so far."""
        return len(self.tokens) - self.submit.prompt_tokens

    @property
    def blocks_needed(self) -> int:
        """Blocks that cover all tokens."""
        return -(-len(self.tokens) // self.block_size)

    @property
    def reusable_keys(self) -> list[ContentKey]:
        """Keys of the blocks that may come from the cache: at least the last token is always computed."""
        return self.keys[: (len(self.tokens) - 1) // self.block_size]

    def content(self, index: int) -> Content:
        """What block `index`, a full one, holds."""
        start = index * self.block_size
        return Content(
            key=self.keys[index],
            parent=self.keys[index - 1] if index else None,
            tokens=pack_tokens(self.tokens[start : start + self.block_size]),
            lora=self.submit.lora,
            salt=self.submit.salt,
        )

    def append(self, token: int) -> None:
        """A drawn token."""
        self.begun = True
        self.tokens.append(token)
        if len(self.tokens) % self.block_size == 0:
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(content_key(parent, pack_tokens(self.tokens[-self.block_size :])))
