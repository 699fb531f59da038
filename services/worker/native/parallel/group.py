"""RankGroup: the ranks of one engine as rank 0 sees them. It starts the others, leads each step, and ends them.

    engine process = rank 0     scheduler, sampler, KV connector; its part of each layer
        │ plan of a step, sums, logits (peers.py)
    rank 1 … n - 1 (rank.py)    their parts of each layer
        all map the model's file, and one memory of KV pages: a block is whole in it, whatever the number of ranks

So a block that is saved or loaded is that of all ranks at once: the pages are rank 0's to copy once the last sum of a
step is there, which each rank adds to after it has written its keys and values.

A rank that is lost ends the group, and with it the engine: nothing of a step can be computed without it.
docs/decisions/0083 gives the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.worker.contracts.messages import Operate
from services.worker.contracts.runner import Work
from services.worker.native.config import ModelConfig
from services.worker.native.decoder import Decoder
from services.worker.native.kv_cache import KvCache
from services.worker.native.lora import LoraStore
from services.worker.native.parallel.operations import RankLimits, do_together, operate_loras_together
from services.worker.native.parallel.peers import Peers, buffer_bytes
from services.worker.native.parallel.plan import encode_operation, encode_plan
from services.worker.native.parallel.processes import RankProcesses, close_ends, connect
from services.worker.native.parallel.rank import RankOrder, RankSizes, rank_cache, rank_decoder, rank_loras
from services.worker.native.parallel.shares import share_out
from services.worker.native.weights import Weights
from services.worker.sharing.host_pages import HostPages
from shared.errors import ModelError
from shared.messages.cards import KvLayout
from shared.processors import usable_processors

START_LIMIT_S = 120.0
"""Most seconds until a rank has mapped the weights."""
STALL_SHARE = 3
"""A peer is lost after `stall_s` divided by this: before the shell would kill an engine without saying why."""
LEAST_LIMIT_S = 1.0
"""The fewest seconds after which it is: a layer of a long prompt takes some time, too."""
RANK_MODULE = "services.worker.native.parallel.rank"
"""The program of a further rank."""


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """How many ranks there are, how long they wait for one another, and which file has their weights."""

    ranks: int
    limit_s: float
    start_limit_s: float = START_LIMIT_S
    weights_file: Path | None = None
    """The file, as all of them can open it. None if the model's directory has them."""


def check_processors(ranks: int) -> None:
    """Raise ModelError if this machine has fewer processors than ranks."""
    processors = usable_processors()
    if ranks > processors:
        raise ModelError(f"tensor_parallel is {ranks}, more than the processors that can be used ({processors})")


class RankGroup:
    """The further ranks' processes, rank 0's end of what they exchange, and its part of the model. It belongs to the
    thread that made it, with which the ranks die."""

    def __init__(
        self, directory: Path, config: ModelConfig, layout: KvLayout, sizes: RankSizes, terms: GroupTerms
    ) -> None:
        """Start the ranks. Raise ModelError."""
        shares = share_out(config, terms.ranks)
        self._config, self._share = config, shares[0]
        self._block_size, self._sizes = layout.block_size, sizes
        self._limits = RankLimits(terms.limit_s)
        self._exchange = HostPages(2 * terms.ranks * buffer_bytes(config.vocab, terms.ranks))
        pages = HostPages(layout.block_bytes * sizes.capacity_blocks)
        ends = connect(terms.ranks)
        self._processes = RankProcesses()
        self._peers = Peers(0, ends[0], self._exchange.array, [share.vocab for share in shares])
        self._peers.limit(terms.start_limit_s)
        self.cache: KvCache = rank_cache(layout, sizes.capacity_blocks, self._share, pages, self._peers)
        """The pages of all ranks; rank 0 writes its heads."""
        self.loras: LoraStore = rank_loras(config, self._share, sizes)
        """Rank 0's part of LoRAs."""
        try:
            for rank in range(1, terms.ranks):
                order = RankOrder(
                    directory=str(directory),
                    weights_file=str(terms.weights_file or ""),
                    rank=rank,
                    layout=layout,
                    sizes=sizes,
                    pages=pages.descriptors()[0],
                    exchange=self._exchange.descriptors()[0],
                    exchange_bytes=self._exchange.size_bytes,
                    sockets=tuple(-1 if end is None else end.fileno() for end in ends[rank]),
                    start_limit_s=terms.start_limit_s,
                    limit_s=terms.limit_s,
                    parent_pid=os.getpid(),
                )
                inherited = [order.pages, order.exchange, *(end for end in order.sockets if end >= 0)]
                self._processes.spawn(RANK_MODULE, msgspec.json.encode(order), inherited)
        except BaseException:
            self.close()
            raise
        finally:
            close_ends(ends[1:])

    def decoder(self, weights: Weights) -> Decoder:
        """Return rank 0's decoder."""
        return rank_decoder(self._config, weights, self._share, self.cache, self._peers, self._sizes)

    def await_ranks(self) -> None:
        """Return when all ranks have started. Raise RankLost; the group has ended then."""
        with self._guard():
            self._peers.meet()
        self._peers.limit(self._limits.step_s)

    @contextmanager
    def step(self, works: Sequence[Work]) -> Iterator[None]:
        """Have all ranks compute a step, of which rank 0 computes its part meanwhile. Raise RankLost; the group has
        ended then."""
        with self._guard():
            self._peers.tell(encode_plan(works, self._block_size))
            yield

    def operate(self, order: Operate, do: Callable[[], str], undo: Callable[[], object]) -> str:
        """Have all ranks do an operation, as `do_together` does. Raise RankLost; the group has ended then."""
        with self._guard():
            self._peers.tell(encode_operation(order))
            return do_together(self._peers, self._limits, do, undo)

    def operate_loras(self, order: Operate) -> str:
        """Load or unload a LoRA in all ranks; return why it was not done, empty if it was. Raise RankLost; the group
        has ended then."""
        with self._guard():
            self._peers.tell(encode_operation(order))
            return operate_loras_together(self.loras, order, self._peers, self._limits)

    @property
    def pids(self) -> list[int]:
        """The processes of rank 1 and higher."""
        return self._processes.pids

    def close(self) -> None:
        """End all ranks, also those that stand still, and wait for their end."""
        self._peers.close()
        self._processes.kill()
        self._exchange.close()

    def _guard(self) -> AbstractContextManager[None]:
        """Return what ends the group where a rank is lost in what all do together."""
        return self._processes.guard(self.close)
