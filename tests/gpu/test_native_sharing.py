"""KV pages that other processes can map: the engine computes the same in them, and another engine copies from them."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from services.worker.config import CudaConfig, Dtype
from services.worker.contracts.mover import Copied, Copy
from services.worker.contracts.sharing import SharedSlots
from services.worker.sharing.block_reader import BlockReader
from services.worker.sharing.block_sharer import BlockSharer
from services.worker.sharing.messages import SharingIdentity
from services.worker.sharing.shares import SharingLimits
from shared.pool.lock import hold_owner
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.native.works import work

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from tests.gpu.models import cuda_runner  # noqa: E402
from tests.gpu.test_native_sleep import PROMPT, SHAPE, answers, free_bytes  # noqa: E402

CAPACITY_BLOCKS = 256
LIMIT_S = 60.0
BLOCKS = [3, 1, 2]


class AllBlocks:
    """Shares the slots that keys are the numbers of."""

    def share(self, keys: Sequence[bytes]) -> list[int]:
        return [int.from_bytes(key, "little") for key in keys]

    def take_back(self, slots: Sequence[int]) -> None: ...


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runner_computes_the_same_in_pages_that_are_shared_and_gives_them_back(tmp_path: Path, dtype: Dtype) -> None:
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    settings = CudaConfig(dtype=dtype, graph_upper_bound=4)
    with closing(cuda_runner(model, settings, capacity_blocks=CAPACITY_BLOCKS)) as runner:
        expected = answers(runner)
    before = free_bytes()
    with closing(cuda_runner(model, settings, capacity_blocks=CAPACITY_BLOCKS, shares_blocks=True)) as runner:
        assert answers(runner) == expected
        memory, use = runner.sharable_memory(), runner.memory_use()
        assert memory.pages is not None
        assert memory.pages.address == memory.shape.regions[0]
        kv_bytes = CAPACITY_BLOCKS * memory.shape.block_bytes
        assert memory.pages.size_bytes >= kv_bytes
        assert use.used >= kv_bytes
    runner._memory.trim()
    assert free_bytes() >= before - (8 << 20)


def test_blocks_go_from_one_engines_pages_to_anothers_and_it_continues_as_if_it_had_computed_them(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    settings = CudaConfig(dtype="bfloat16", graph_upper_bound=4)
    directory = tmp_path / "pool"
    (directory / "owners").mkdir(mode=0o700, parents=True)
    directory.chmod(0o700)
    identity = SharingIdentity("a-model", "a-layout", "bfloat16")
    locks = [hold_owner(directory, name) for name in ("prefill-00000000", "decode-00000000")]
    shares = cuda_runner(model, settings, capacity_blocks=CAPACITY_BLOCKS, shares_blocks=True)
    reads = cuda_runner(model, settings, capacity_blocks=CAPACITY_BLOCKS)
    with closing(shares), closing(reads):
        shares.step([work(PROMPT, BLOCKS)])
        [expected] = shares.step([work([*PROMPT, 9], BLOCKS, start=len(PROMPT))])
        sharer = BlockSharer(directory, shares.sharable_memory, identity, AllBlocks(), SharingLimits())
        share_reader = BlockReader(directory, reads.sharable_memory, identity, time.monotonic)
        sharer.turn("prefill-00000000", time.monotonic())
        share_reader.ask(1, "decode-00000000", "prefill", [slot.to_bytes(16, "little") for slot in BLOCKS])
        answers_: list[SharedSlots] = []
        copied: list[Copied] = []
        until_s = time.monotonic() + LIMIT_S
        while not copied:
            assert time.monotonic() < until_s, answers_
            sharer.turn("prefill-00000000", time.monotonic())
            for answer in share_reader.turn():
                answers_.append(answer)
                share_reader.load(1, 1, [Copy(slot, to) for slot, to in zip(answer.slots, (7, 8, 9), strict=True)])
            select.select([share_reader], [], [], 0.01)
            copied += share_reader.ended()
        assert answers_ == [SharedSlots(1, BLOCKS, last=True)]
        assert copied[0].good == [True] * 3
        assert [path.startswith("peer_") for path in copied[0].paths] == [True]
        assert reads.step([work([*PROMPT, 9], [7, 8, 9], start=len(PROMPT))]) == [expected]
        share_reader.release(1)
        share_reader.close()
        sharer.close()
    for lock in locks:
        lock.close(delete=True)
