"""Every path between two processes' device memories gives the sharer's bytes, on one GPU, and from one to another."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from tests.gpu.device import cupy_on_a_device
from tests.worker.sharing.sharing_rig import PeerRig
from tests.worker.sharing.test_sharing_processes import await_state

pytestmark = pytest.mark.gpu
cupy = cupy_on_a_device()
GPUS = cupy.cuda.runtime.getDeviceCount()
SHAPES = {  # fragments, bytes of each, slots
    "one fragment": (1, 20480, 300),
    "wide words": (6, 832, 300),
    "words of 4": (5, 836, 300),
    "single bytes": (3, 833, 300),
    "layers of an 8B model": (64, 32768, 70),
}


@pytest.mark.parametrize("device", range(min(2, GPUS)))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", ["rows", "batch", "kernel"])
def test_every_path_gives_the_sharers_bytes_whatever_the_order(
    tmp_path: Path, path: str, shape: str, device: int
) -> None:
    fragments, fragment_bytes, slots = SHAPES[shape]
    settings = {"fragments": fragments, "fragment_bytes": fragment_bytes, "slots": slots, "kind": "cuda"}
    draw = Random(7)
    with ExitStack() as opened:
        rig = PeerRig(tmp_path, opened, **settings)
        sharer, reader = rig.connected({"device": device, "path": path, "layer_major": False})
        before = reader.ask("digests")
        sources, targets = (draw.sample(range(slots), slots - 10) for _ in range(2))
        assert reader.ask("read", 1, sources) == sources
        assert reader.ask("copy", list(zip(sources, targets, strict=True))) is True
        sent = sharer.blocks()
        for source, target in zip(sources, targets, strict=True):
            before[target] = sent[source]
        assert reader.ask("digests") == before
        assert sharer.ask("digests") == sent
        reader.ask("leave")
        await_state(sharer, readers=[], pinned=[])
