"""Which connectors vLLM is started with, from the worker's settings; what ours say in vLLM's statistics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Exchanged, KvbmLink

CONNECTOR_MODULE = "services.worker.vllm.connector.connector"
ENCODER_CACHE_MODULE = "services.worker.vllm.encoder_cache.connector"
LINK = "link"
"""The entry of our statistics that has the link to the kvbm."""
STORED = "stored"
"""The entry of our statistics that has the attempts whose blocks are stored, for another worker to go on with."""
PREFETCHED = "prefetched_blocks"
"""The entry of our statistics that has how many blocks were loaded for expected prompts, since the start."""
BY_PARAMS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector")
"""vLLM's connectors that move blocks only for requests with `kv_transfer_params` of theirs, which none of a worker's
has."""
_EXPECTED = "headrace_expected"
"""The entry of `kv_transfer_params` of a request that stands for an expected prompt."""
_HAND_OVER = "headrace_hand_over"
"""The entry of a request's `kv_transfer_params` with the name of an attempt that is handed over."""
_NAME_CHARS = 32
"""Most characters of such a name. A `vllm serve` passes on what its clients send."""


class ConnectorSaid(Struct, frozen=True):
    """What our connector says in vLLM's statistics of a step."""

    exchanged: Exchanged
    link: KvbmLink
    stored: list[str]
    """Names of attempts whose blocks are stored since the last step."""
    prefetched_blocks: int
    """Blocks that were loaded for expected prompts, since the start."""


class ImageCounts(Struct, frozen=True):
    """What has become of images, since the engine started."""

    hits: int = 0
    """Images whose embeddings were there when a step computed their first token."""
    encoded: int = 0
    fetched: int = 0
    """Images whose embeddings came from the kvbm."""
    entries: int = 0
    """Images whose embeddings are there now."""
    size_bytes: int = 0
    """Bytes of these embeddings."""
    image_s: float = 0.0
    """Seconds that it takes to encode an image, as measured lately. 0 if not measured yet."""


def hand_over_params(name: str) -> dict[str, str]:
    """Return the `kv_transfer_params` of a request whose blocks another worker needs; `stored` names it once they are
    stored."""
    return {_HAND_OVER: name}


def hand_over_name(params: object) -> str:
    """Return the name in a request's `kv_transfer_params`. Empty if it is not handed over."""
    name = params.get(_HAND_OVER) if isinstance(params, dict) else None
    return name if isinstance(name, str) and len(name) <= _NAME_CHARS else ""


def kv_transfer(config: WorkerConfig) -> dict[str, Any] | None:
    """Return the fields of vLLM's KVTransferConfig. None means no connector of ours."""
    kvbm = config.kvbm
    if not kvbm.pool or config.role == "encode":
        return None
    given = {
        "pool": kvbm.pool,
        "offload": kvbm.offload,
        "timeout_s": kvbm.timeout_s,
        "blocks_in_flight": kvbm.blocks_in_flight,
        "checksums": kvbm.checksums,
        "verify": kvbm.verify,
        "model_name": config.model_name,
        "lora_names_are_ids": True,  # a LoRA's id names its content
        "image_names_are_keys": True,
        "keep_on_reset": True,  # a worker's weights are never changed in place
    }
    if config.role == "prefill":
        given["collect_s"] = 0.0  # another worker waits for them
    if config.role == "decode":
        given["prefetches"] = True
    if kvbm.wait_s:
        given["wait_s"] = kvbm.wait_s
    return {
        "kv_connector": "HeadraceConnector",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": given,
    }


def ec_transfer(config: WorkerConfig, directory: str) -> dict[str, Any] | None:
    """Return the fields of vLLM's ECTransferConfig for a model that sees. None means no connector of ours. `directory`
    is the engine's own."""
    if not (config.kvbm.pool and config.kvbm.embeddings and config.most_images):
        return None
    return {
        "ec_connector": "HeadraceECConnector",
        "ec_connector_module_path": ENCODER_CACHE_MODULE,
        "ec_role": "ec_producer" if config.role == "encode" else "ec_both",
        "ec_connector_extra_config": {
            "pool": config.kvbm.pool,
            "model_name": config.model_name,
            "timeout_s": config.kvbm.timeout_s,
            "reports": directory,
        },
    }


def by_params(connector: str | None, settings: Mapping[str, Any]) -> str:
    """Return the first connector of a user's KVTransferConfig, alone or in a chain, that would never move a block.
    Empty if there is none."""
    chain = settings.get("connectors")
    links = [each for each in chain if isinstance(each, Mapping)] if isinstance(chain, list) else []
    names = (connector, *(each.get("kv_connector") for each in links))
    return next((name for name in names if name in BY_PARAMS), "")


def expected_params() -> dict[str, bool]:
    """Return the `kv_transfer_params` of a request that stands for an expected prompt."""
    return {_EXPECTED: True}


def is_expected(params: object) -> bool:
    """Return whether a request with these `kv_transfer_params` stands for an expected prompt."""
    return isinstance(params, dict) and params.get(_EXPECTED) is True


def connector_stats(payload: Mapping[str, Any] | None) -> ConnectorSaid | None:
    """Return what our connector has said in a step's statistics, alone or in a chain. None if there is nothing."""
    if not payload:
        return None
    for said in (payload, *(each for each in payload.values() if isinstance(each, Mapping))):
        data = said.get("data", said)
        if isinstance(data, Mapping) and LINK in data:
            link = msgspec.convert(data[LINK], KvbmLink)
            return ConnectorSaid(msgspec.convert(data, Exchanged), link, data.get(STORED, []), data.get(PREFETCHED, 0))
    return None


def image_counts(payload: Mapping[str, Any] | None) -> ImageCounts | None:
    """Return what our encoder cache connector has said in a step's statistics. None if there is nothing."""
    return msgspec.convert(payload, ImageCounts) if payload else None


def sum_exchanged(all_ranks: list[Exchanged]) -> Exchanged:
    """Return the sums of all ranks; a bool is whether it holds for any of them."""
    total: dict[str, Any] = {}
    for exchanged in all_ranks:
        for name, value in msgspec.structs.asdict(exchanged).items():
            if isinstance(value, dict):
                counts = total.setdefault(name, {})
                for path, count in value.items():
                    counts[path] = counts.get(path, 0) + count
            elif isinstance(value, bool):
                total[name] = total.get(name, False) or value
            else:
                total[name] = total.get(name, 0) + value
    return Exchanged(**total)
