"""Which part of a model each rank of a tensor-parallel group computes. Pure.

    q, k, v, gate, up    rows: whole heads, and a part of the feed-forward width
    o, down              the columns that belong to these; the ranks' products are added up
    output projection    rows: a part of the vocabulary; rank 0 collects the logits
    embedding, norms     whole, at each rank

    9 heads, 3 KV heads, 2 ranks    rank 0: KV head 0, heads 0 … 2       rank 1: KV heads 1, 2, heads 3 … 8
    4 heads, 1 KV head,  2 ranks    rank 0: KV head 0, heads 0, 1        rank 1: KV head 0 again, heads 2, 3

Key-value heads need not divide evenly: rank 0 also schedules and samples, so it gets the smaller part.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from services.worker.native.config import ModelConfig
from shared.errors import ModelError

MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a model, as ranges of whole heads, or of rows."""

    heads: slice
    kv_heads: slice
    intermediate: slice
    vocab: slice
    copied: bool
    """Whether other ranks have the same key-value heads."""
    stores: bool
    """Whether it is this rank that stores them. Of those that have the same, the first does."""

    def of(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of the decoder that computes this part."""
        return replace(
            config,
            heads=_length(self.heads),
            kv_heads=_length(self.kv_heads),
            intermediate=_length(self.intermediate),
        )


def share_out(config: ModelConfig, ranks: int) -> tuple[Share, ...]:
    """Return the part of each rank. Raise ModelError if the model cannot be shared out between so many."""
    if not _fits(config, ranks):
        others = ", ".join(str(number) for number in range(1, MOST_RANKS + 1) if _fits(config, number))
        raise ModelError(
            f"tensor_parallel is {ranks}, but {config.heads} attention heads and {config.kv_heads} key-value heads"
            f" cannot be shared out between so many ranks; possible are {others}"
        )
    copies = max(1, ranks // config.kv_heads)
    holders = ranks // copies
    group = config.heads // config.kv_heads
    found: list[Share] = []
    for rank in range(ranks):
        kv_heads = _part(config.kv_heads, rank // copies, holders)
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        if copies > 1:
            heads = _part(config.heads, rank, ranks)
        found.append(
            Share(
                heads=heads,
                kv_heads=kv_heads,
                intermediate=_part(config.intermediate, rank, ranks),
                vocab=_part(config.vocab, rank, ranks),
                copied=copies > 1,
                stores=rank % copies == 0,
            )
        )
    return tuple(found)


def _fits(config: ModelConfig, ranks: int) -> bool:
    """Whether each rank gets whole heads: some of the key-value heads, or an equal part of the heads of one of them."""
    if ranks > min(config.heads, config.intermediate, config.vocab):
        return False
    return config.kv_heads >= ranks or (ranks % config.kv_heads == 0 and config.heads % ranks == 0)


def _part(whole: int, number: int, parts: int) -> slice:
    return slice(whole * number // parts, whole * (number + 1) // parts)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
