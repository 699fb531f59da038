"""Which part of a model each rank of a tensor-parallel group computes.

    q, k, v, gate, up    rows: whole heads, and a part of the feed-forward width
    o, down              the columns that belong to these; the ranks' products are added up
    output projection    rows: a part of the vocabulary; rank 0 collects the logits
    embedding, norms     whole, at each rank

    9 heads, 3 KV heads, 2 ranks    rank 0: KV head 0, heads 0 … 2       rank 1: KV heads 1, 2, heads 3 … 8
    4 heads, 1 KV head,  2 ranks    rank 0: KV head 0, heads 0, 1        rank 1: KV head 0 again, heads 2, 3

Key-value heads need not divide evenly. A rank with fewer of them gets more of the feed-forward width, so that all have
as many weights of a layer to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    """True if other ranks have the same key-value heads."""
    stores: bool
    """True if this rank stores them: of those that have the same, the first does."""

    def of(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of the decoder that computes this part."""
        return replace(
            config,
            heads=_length(self.heads),
            kv_heads=_length(self.kv_heads),
            intermediate=_length(self.intermediate),
        )


def share_out(config: ModelConfig, ranks: int, *, even: bool = False) -> tuple[Share, ...]:
    """Return the part of each rank; with `even`, as on GPUs, all have as many heads. Raise ModelError if the model
    cannot be shared out."""
    if not _fits(config, ranks, even=even):
        possible = (number for number in range(1, MOST_RANKS + 1) if _fits(config, number, even=even))
        others = ", ".join(map(str, possible))
        raise ModelError(
            f"tensor_parallel is {ranks}, but {config.heads} attention heads and {config.kv_heads} key-value heads"
            f" cannot be shared out like that; possible are {others}"
        )
    copies = max(1, ranks // config.kv_heads)
    holders = ranks // copies
    group = config.heads // config.kv_heads
    kv_heads = [_part(config.kv_heads, rank // copies, holders) for rank in range(ranks)]
    heads = [slice(part.start * group, part.stop * group) for part in kv_heads]
    if copies > 1:
        heads = [_part(config.heads, rank, ranks) for rank in range(ranks)]
    widths = _widths(config, [_length(part) for part in heads], [_length(part) for part in kv_heads])
    return tuple(
        Share(
            heads=heads[rank],
            kv_heads=kv_heads[rank],
            intermediate=widths[rank],
            vocab=_part(config.vocab, rank, ranks),
            copied=copies > 1,
            stores=rank % copies == 0,
        )
        for rank in range(ranks)
    )


def widest(shares: Sequence[Share]) -> Share:
    """Return a share as large as the largest of each part, for which all ranks plan so that they plan the same: widths
    that ranks do not divide differ by a row."""

    def largest(parts: Iterable[slice]) -> slice:
        return slice(0, max(map(_length, parts)))

    return Share(
        heads=largest(share.heads for share in shares),
        kv_heads=largest(share.kv_heads for share in shares),
        intermediate=largest(share.intermediate for share in shares),
        vocab=largest(share.vocab for share in shares),
        copied=shares[0].copied,
        stores=True,
    )


def share_out_evenly(config: ModelConfig, ranks: int) -> tuple[Share, ...]:
    """Return the part of each rank on GPUs. Raise ModelError if ranks on GPUs cannot compute the model."""
    if ranks > 1 and config.query_norm == "whole":
        raise ModelError(
            f"tensor_parallel is {ranks}, but the model norms the queries of all heads as one vector, which is not"
            " built for ranks on GPUs: set tensor_parallel = 1"
        )
    return share_out(config, ranks, even=True)


def _widths(config: ModelConfig, heads: Sequence[int], kv_heads: Sequence[int]) -> list[slice]:
    """Return each rank's part of the feed-forward width: what its heads leave of an equal part of a layer's weights.
    The parts are equal where some heads leave nothing."""
    # A row of the width is one of gate, of up, and a column of down. A head is head_dim rows of q, and columns of o.
    attention = [2 * config.head_dim * (own + kv) / 3 for own, kv in zip(heads, kv_heads, strict=True)]
    equal = (sum(attention) + config.intermediate) / len(heads)
    ends = [round(end) for end in accumulate(equal - own for own in attention)]
    starts = [0, *ends[:-1]]
    if any(end - start < 1 for start, end in zip(starts, ends, strict=True)):
        return [_part(config.intermediate, rank, len(heads)) for rank in range(len(heads))]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def _fits(config: ModelConfig, ranks: int, *, even: bool) -> bool:
    """Whether each rank gets whole heads: some of the key-value heads, or an equal part of the heads of one of them.
    With `even`, also as many of the key-value heads."""
    if ranks > min(config.heads, config.intermediate, config.vocab):
        return False
    if config.kv_heads >= ranks:
        return not even or config.kv_heads % ranks == 0
    return ranks % config.kv_heads == 0 and config.heads % ranks == 0


def _part(whole: int, number: int, parts: int) -> slice:
    return slice(whole * number // parts, whole * (number + 1) // parts)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
