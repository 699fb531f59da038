"""The agent of a NIXL process, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from msgspec.structs import replace

from services.kvbm.peers.nixl_process import nixl_environment
from services.kvbm.pool.host_pool import HostPool
from tests.kvbm.peer_rig import ONLY_WITH_NIXL, PEERS
from tests.kvbm.store_rig import LIMIT_S

THREE_LENDERS = """
import sys
from services.kvbm.peers import nixl_program
from services.kvbm.peers.nixl_messages import Pull

nixl_program.REMOTES_MOST = 2
pool = int(sys.argv[1])
lenders = [nixl_program._Agent(f"lender{number}", pool) for number in range(3)]
reader = nixl_program._Agent("reader", pool)
for number in (0, 1, 0, 2, 1, 0):
    lender = lenders[number]
    remote = reader.remote(lender.metadata)
    assert remote == f"lender{number}", remote
    size, offset = 4096, reader._first
    pull = Pull(lender.metadata, [lender.base + offset + size], [offset], size)
    handle = reader.post(remote, pull, range(1))
    while not reader.is_done(handle):
        lender.progress()
    print(*reader._remotes.values(), flush=True)
nixl_program.os._exit(0)
"""


@ONLY_WITH_NIXL
def test_the_agent_that_was_read_longest_ago_is_forgotten_for_a_further_one_and_read_again_later(
    tmp_path: Path,
) -> None:
    pool = HostPool.open(tmp_path / "pool", 1 << 20)
    try:
        ran = subprocess.run(
            [sys.executable, "-P", "-c", THREE_LENDERS, str(pool.descriptor)],
            env=nixl_environment(replace(PEERS, backend="nixl")),
            pass_fds=(pool.descriptor,),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        pool.close()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "lender0",
        "lender0 lender1",
        "lender1 lender0",
        "lender0 lender2",
        "lender2 lender1",
        "lender1 lender0",
    ]
