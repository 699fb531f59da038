"""Makes the worker half of one rank, over vLLM's tensors: the only module here that knows torch and CuPy."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.worker.kv_connector.pool_attachment import MappedPool, OwnerName
from services.worker.transfer.copier import Copier
from services.worker.transfer.mover import TransferMover
from services.worker.vllm.connector.kv_layout import TensorPlace, block_shape, kv_layout
from services.worker.vllm.connector.orders import RankFacts
from services.worker.vllm.connector.settings import ConnectorSettings
from services.worker.vllm.connector.worker_half import WorkerHalf
from shared.errors import ConfigError

_log = logging.getLogger(__name__)


def worker_half(config: Any, kv_cache: Any, settings: ConnectorSettings, tensors: Mapping[str, Any]) -> WorkerHalf:
    """Return the worker half over `tensors`, vLLM's KV by layer. Raise ConfigError if they do not fit."""
    import vllm
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    names = [name for group in kv_cache.kv_cache_groups for name in group.layer_names if name in tensors]
    if not names:
        raise ConfigError("HeadraceConnector: vLLM named no tensors of KV")
    places = {}
    for name in names:
        tensor = tensors[name]
        if not hasattr(tensor, "data_ptr"):
            raise ConfigError(f"HeadraceConnector: layer {name} has no single tensor")
        places[name] = TensorPlace(
            tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
        )
    first, spec = tensors[names[0]], kv_cache.kv_cache_groups[0].kv_cache_spec
    shape = block_shape(places, kv_cache.num_blocks, block_axis=0)
    layout = kv_layout(
        places,
        kv_cache.num_blocks,
        dtype=f"{config.cache_config.cache_dtype} {first.dtype}",
        backend=f"{_backends(config, names)} {kv_cache.kv_cache_layout or ''} of vLLM {vllm.__version__}",
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        block_size=spec.block_size,
        block_axis=0,
    )
    copier: Copier
    if first.device.type == "cuda":
        try:
            from services.worker.transfer.cuda_copier import CudaCopier
            from services.worker.transfer.device_memory import DeviceMemory
        except ImportError as wrong:
            raise ConfigError(f"HeadraceConnector needs CuPy on a GPU: pip install cupy-cuda13x ({wrong})") from None
        copier = CudaCopier(shape, DeviceMemory(first.device.index), time.monotonic, path=settings.copy_path)
    elif first.device.type == "cpu":
        from services.worker.transfer.host_copier import HostCopier

        copier = HostCopier(shape, dict(tensors))
    else:
        raise ConfigError(f"HeadraceConnector: no copies from device {first.device.type}")
    facts = RankFacts(
        block_bytes=shape.block_bytes,
        blocks=kv_cache.num_blocks,
        form=layout.form,
    )
    rank = get_pp_group().rank_in_group * get_tp_group().world_size + get_tp_group().rank_in_group
    mover = TransferMover(copier, time.monotonic, verify=settings.verify)
    number = _low_descriptor() if first.device.type == "cuda" else None
    directory = Path(settings.pool)
    return WorkerHalf(mover, facts, rank, OwnerName(directory, "", number), MappedPool(directory))


def _low_descriptor() -> int | None:
    """Return a descriptor for the lock that is lower than those of the GPU driver's files, as `shared.pool.lock` says:
    that of the standard input, which is /dev/null in vLLM's processes. None if it is in use."""
    about = os.fstat(0)
    if stat.S_ISCHR(about.st_mode) and about.st_rdev == Path(os.devnull).stat().st_rdev:
        return 0
    _log.warning("standard input is in use: after a crash the GPU may write to the pool some ms after the lock is free")
    return None


def _backends(config: Any, names: list[str]) -> str:
    """Return the names of the attention backends, which know what the bytes mean."""
    layers = config.compilation_config.static_forward_context
    return ",".join(sorted({layers[name].get_attn_backend().get_name() for name in names if name in layers}))
