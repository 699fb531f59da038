"""A vision tower on the GPU, of torch's in the same run, and the way of embeddings from a kvbm's pool to the GPU.

    python -m benchmarks.gpu.images [--memory TMPFS] [--quick] [--json]

The tower is CLIP's ViT-L/14 with images of 336 x 336 and LLaVA 1.5's projector, in bfloat16 with random weights: 23 of
its 24 layers count. torch's is the same arithmetic with `scaled_dot_product_attention`, without a compiler; its
embeddings are compared with ours (`apart`, the largest difference, of the largest number). Both begin with pixels on
the device and take turns; times are between CUDA events. `whole` is that of `encode`, from bytes in host memory.

An embedding of 576 x 4,096 bfloat16 is a block of a pool that the mover loads: one at a time, from the request to its
report, and 16 requests at once. The yardstick is one plain copy of 1 GiB from pinned memory.

What could mislead: torch's images are cut to bfloat16 patches before. Without torch its rows are left out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from benchmarks.gpu import llama, part
from benchmarks.gpu.model import random_tile
from benchmarks.gpu.moving import EndedBatch, arena, pool, scattered
from services.worker.native.bfloat16 import from_bfloat16
from services.worker.native.vision_config import FixedSize, VisionConfig, vision_shapes
from services.worker.transfer.block_shape import BlockShape
from shared.messages.cards import ImageInput

DECODER = 4096
VIT_L = VisionConfig(
    kind="clip_vision_model",
    hidden=1024,
    intermediate=4096,
    heads=16,
    image_size=336,
    patch_size=14,
    epsilon=1e-5,
    activation="quick_gelu",
    features=(23,),
    drops_first=True,
    projector_activation="gelu",
    projector_bias=True,
    prepared=FixedSize(
        resize=336,
        filter="BICUBIC",
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        scale=1 / 255,
    ),
    input=ImageInput(32_000, 576, 336, 336, 336, "BICUBIC"),
)
BATCHES = (1, 16)
EMBEDDING_BYTES = 576 * DECODER * 2
POOL_BYTES = 1 << 30
TURNS = 200
PLAIN = "one plain copy of 1 GiB"


class TowerRow(Struct, frozen=True):
    """The time of one tower's turn."""

    tower: str
    batch: int
    ms: float
    least_ms: float
    images_per_s: float


class FetchRow(Struct, frozen=True):
    """The rate of embeddings from a pool to the GPU."""

    how: str
    ms: float
    """The median time of one, or of all in a row."""
    gb_per_s: float
    share: float
    """The rate as a share of the pinned one."""


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("images", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for the pool")


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure towers, then copies."""
    apart: list[float] = []
    towers = part.attempted("towers", partial(_towers, 5 if flags.quick else 30, apart))
    fetches = part.attempted("embeddings", partial(_fetches, flags.memory))
    times = {(row.tower, row.batch): row.ms for row in towers}
    figures: dict[str, float] = {}
    for name, batch in (("tower of ViT-L/14 at 336, batch 16, speed", 16), ("the same, batch 1, speed", 1)):
        if ("torch", batch) in times:
            figures[name] = times["torch", batch] / times["ours", batch]
    if towers:
        figures["images a second, batch 16"] = 16e3 / times["ours", 16]
    figures |= {row.how: row.share for row in fetches if row.how != PLAIN}
    return part.PartReport(figures, [*towers, *fetches], {"apart": max(apart, default=-1.0)})


# --- towers


def random_weights(config: VisionConfig, decoder: int) -> dict[str, NDArray[np.float32]]:
    """Return weights of a tower whose numbers stay near one."""
    tile, at = from_bfloat16(random_tile(1.0)), 0
    made: dict[str, NDArray[np.float32]] = {}
    for name, shape in vision_shapes(config, decoder).items():
        if len(shape) == 1:
            made[name] = np.full(shape, float("norm" in name and name.endswith("weight")), np.float32)
            continue
        count = int(np.prod(shape))
        at = at if at + count <= len(tile) else 7
        made[name] = tile[at : at + count].reshape(shape) * np.float32(float(np.prod(shape[1:])) ** -0.5)
        at += count
    return made


def _towers(rounds: int, apart: list[float]) -> list[TowerRow]:
    """Measure both towers in turn. The difference of their embeddings is added to `apart`."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    from services.worker.native.cuda.vision_tower import CudaVisionTower

    llama.device_memory()
    stream = cp.cuda.Stream(non_blocking=True)
    weights = random_weights(VIT_L, DECODER)
    tower = CudaVisionTower(VIT_L, DECODER, weights, "bfloat16", stream, most_images=max(BATCHES))
    draw = np.random.default_rng(5)
    size = VIT_L.image_size
    images = [draw.integers(0, 256, (size, size, 3), np.uint8).tobytes() for _ in range(max(BATCHES))]
    embeddings = cp.asnumpy(tower.encode(images))
    theirs: TorchTower | None = None
    try:
        theirs = TorchTower(VIT_L, weights, images)
        apart.append(float(np.abs(theirs.embeddings() - embeddings).max() / np.abs(embeddings).max()))
    except Exception as wrong:  # noqa: BLE001 - no torch, or one that cannot: ours is measured all the same
        print(f"torch's tower failed: {type(wrong).__name__}: {wrong}", file=sys.stderr, flush=True)
        theirs = None
    rows: list[TowerRow] = []
    for batch in BATCHES:
        ways: dict[str, Callable[[], float]] = {
            "ours": partial(_ours_ms, tower, stream, batch),
            "ours, whole": partial(_whole_ms, tower, stream, images[:batch]),
        }
        if theirs is not None:
            ways["torch"] = partial(theirs.ms, batch)
        took: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 3):
            for name, way in ways.items():
                ms = way()
                if number >= 3:  # warm
                    took[name].append(ms)
        rows += [TowerRow(name, batch, median(ms), min(ms), batch * 1e3 / median(ms)) for name, ms in took.items()]
    tower.close()
    return rows


def _ours_ms(tower: Any, stream: Any, batch: int) -> float:
    return llama.timed_ms(stream, lambda: tower.compute(batch))


def _whole_ms(tower: Any, stream: Any, images: list[bytes]) -> float:
    begun_s = time.perf_counter()
    tower.encode(images)
    stream.synchronize()
    return (time.perf_counter() - begun_s) * 1e3


class TorchTower:
    """A tower of the same arithmetic in torch, bfloat16."""

    def __init__(self, config: VisionConfig, weights: Mapping[str, NDArray[np.float32]], images: list[bytes]) -> None:
        """Copy weights and images to the device. Raise ImportError without torch."""
        self._torch: Any = importlib.import_module("torch")
        self._of: Any = importlib.import_module("torch.nn.functional")
        self._config = config
        self._weights = {name: self._placed(array) for name, array in weights.items()}
        for number in range(config.layers):  # q, k and v as one product, as a served tower has them
            stem = f"vision_tower.encoder.layers.{number}.self_attn."
            for kind in ("weight", "bias"):
                joined = [self._weights[f"{stem}{name}_proj.{kind}"] for name in "qkv"]
                self._weights[f"{stem}qkv.{kind}"] = self._torch.cat(joined)
        size, patch = config.image_size, config.patch_size
        side = size // patch
        pixels = np.stack([np.frombuffer(image, np.uint8).reshape(size, size, 3) for image in images])
        mean, deviation = (np.asarray(each, np.float32) for each in (config.prepared.mean, config.prepared.std))
        floats = (pixels.astype(np.float32) * np.float32(config.prepared.scale) - mean) / deviation
        cut = floats.reshape(len(images), side, patch, side, patch, 3).transpose(0, 1, 3, 5, 2, 4)
        self._patches = self._placed(np.ascontiguousarray(cut.reshape(len(images), side * side, -1)))

    def _placed(self, array: NDArray[np.float32]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(array)).to("cuda", self._torch.bfloat16)

    def embeddings(self) -> NDArray[np.float32]:
        """Return the embeddings of all images."""
        with self._torch.inference_mode():
            found: NDArray[np.float32] = self._computed(len(self._patches)).float().cpu().numpy()
        return found

    def ms(self, batch: int) -> float:
        """Return the milliseconds of a turn, between events."""
        torch = self._torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.inference_mode():
            begin.record()
            self._computed(batch)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _computed(self, batch: int) -> Any:
        torch, config, of = self._torch, self._config, self._weights
        stem = "vision_tower.embeddings."
        hidden = self._patches[:batch] @ of[f"{stem}patch_embedding.weight"].reshape(config.hidden, -1).T
        first = of[f"{stem}class_embedding"].expand(batch, 1, -1)
        hidden = torch.cat([first, hidden], dim=1) + of[f"{stem}position_embedding.weight"]
        hidden = self._norm("vision_tower.pre_layrnorm", hidden)
        for number in range(config.layers):
            hidden = self._layer(f"vision_tower.encoder.layers.{number}.", hidden)
        projected = self._of.gelu(self._linear("multi_modal_projector.linear_1", hidden[:, 1:]))
        return self._linear("multi_modal_projector.linear_2", projected)

    def _layer(self, stem: str, hidden: Any) -> Any:
        batch, rows, width = hidden.shape
        joined = self._linear(f"{stem}self_attn.qkv", self._norm(f"{stem}layer_norm1", hidden))
        q, k, v = joined.view(batch, rows, 3, self._config.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = self._of.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, rows, width)
        hidden = hidden + self._linear(f"{stem}self_attn.out_proj", mixed)
        wide = self._linear(f"{stem}mlp.fc1", self._norm(f"{stem}layer_norm2", hidden))
        return hidden + self._linear(f"{stem}mlp.fc2", wide * self._torch.sigmoid(1.702 * wide))

    def _norm(self, name: str, x: Any) -> Any:
        weight, shift = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return self._of.layer_norm(x, (x.shape[-1],), weight, shift, self._config.epsilon)

    def _linear(self, name: str, x: Any) -> Any:
        return self._of.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))


# --- embeddings from a pool


def _fetches(memory: Path) -> list[FetchRow]:
    """Measure loads of embeddings, one at a time and 16 in a row."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    from services.worker.transfer.cuda_copier import CudaCopier
    from services.worker.transfer.device_memory import DeviceMemory
    from services.worker.transfer.mover import TransferMover

    slots_there = 64
    device = cp.zeros(slots_there * EMBEDDING_BYTES, cp.uint8)
    shape = BlockShape.contiguous(device.data.ptr, EMBEDDING_BYTES, slots_there)
    pinned = _pinned_rate()
    rows: list[FetchRow] = []
    with pool(memory, POOL_BYTES) as (path, geometry), arena(path, geometry, EMBEDDING_BYTES) as slots:
        mover = TransferMover(CudaCopier(shape, DeviceMemory(0), time.perf_counter), time.perf_counter)
        mover.attach(slots)
        asked = EndedBatch(mover)
        copies = scattered(slots, range(slots_there))
        asked.move((), copies, len(copies))  # pins what is not pinned yet
        for how, count in (
            ("embedding of 576 x 4,096 bf16 from the pool, asked for and told", 1),
            ("16 of them in a row", 16),
        ):
            took_s: list[float] = []
            for number in range(TURNS):
                first = number * count % (len(copies) - count)
                begun_s = time.perf_counter()
                asked.move((), copies[first : first + count], 1)
                took_s.append(time.perf_counter() - begun_s)
            rate = count * EMBEDDING_BYTES / median(took_s)
            rows.append(FetchRow(how, median(took_s) * 1e3, rate / 1e9, rate / pinned))
        mover.detach()
        mover.close()
    rows.append(FetchRow(PLAIN, (1 << 30) / pinned * 1e3, pinned / 1e9, 1.0))
    return rows


def _pinned_rate() -> float:
    """Return the bytes a second of one plain copy of 1 GiB from pinned memory, the best of some."""
    import cupy as cp  # pyright: ignore[reportMissingImports]

    size_bytes = 1 << 30
    host, device = cp.cuda.alloc_pinned_memory(size_bytes), cp.zeros(size_bytes, cp.uint8)
    stream, runtime = cp.cuda.Stream(non_blocking=True), cp.cuda.runtime

    def copy() -> None:
        runtime.memcpyAsync(device.data.ptr, host.ptr, size_bytes, runtime.memcpyHostToDevice, stream.ptr)

    return size_bytes / min(llama.timed_ms(stream, copy) for _ in range(6)) * 1e3


if __name__ == "__main__":
    sys.exit(main())
