"""services/worker/vllm/connector/rank_mover.py: a batch ends when all ranks say so, and is as good as the worst."""

from __future__ import annotations

from services.worker.contracts.mover import Copied, Copy
from services.worker.vllm.connector.orders import STEP_ORDERS, CancelOrder, DetachPool, EndLoad, LoadBlocks, SaveBlocks
from services.worker.vllm.connector.rank_mover import RankMover

COPIES = [Copy(1, 2, generation=(1 << 64) - 1, checksum=7), Copy(3, 4)]


def test_orders_come_in_order_and_survive_the_way() -> None:
    mover = RankMover(2)
    mover.save(1, COPIES, 2.5)
    mover.load(2, COPIES)
    mover.cancel(1)
    mover.cancel(9)
    mover.detach()
    orders = mover.take_orders()
    assert orders == [SaveBlocks(1, COPIES, 2.5), LoadBlocks(2, COPIES), CancelOrder(1), DetachPool()]
    orders.append(EndLoad("r", [1, 2], [2]))
    assert STEP_ORDERS.decode(STEP_ORDERS.encode(orders)) == orders
    assert mover.take_orders() == []


def test_a_batch_ends_with_its_last_rank() -> None:
    mover = RankMover(3)
    mover.load(1, COPIES)
    mover.report(0, [Copied(1, [True, True], 10, 0.1, paths={"memmove": 2})])
    mover.report(2, [Copied(1, [True, False], 10, 0.3, damaged=[1])])
    assert mover.ended() == []
    mover.report(1, [Copied(1, [True, True], 10, 0.2, failed="the GPU is lost")])
    [merged] = mover.ended()
    assert merged.good == [True, False]
    assert (merged.moved_bytes, merged.took_s, merged.failed) == (30, 0.3, "the GPU is lost")
    assert (merged.paths, merged.damaged) == ({"memmove": 2}, [1])
    assert mover.ended() == []


def test_with_one_rank_its_checksums_stay() -> None:
    mover = RankMover(1)
    mover.save(1, COPIES, 1.0)
    mover.report(0, [Copied(1, [True, True], 10, 0.1, checksums=[5, 6])])
    assert mover.ended()[0].checksums == [5, 6]
