"""Which vLLM this connector fits: the versions of the engine, and the methods that it overrides. Pure."""

from __future__ import annotations

import inspect

from services.worker.vllm.version import check
from shared.errors import ConfigError

METHODS = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "bind_connector_metadata": ("connector_metadata",),
    "build_connector_meta": ("scheduler_output",),
    "build_connector_worker_meta": (),
    "get_block_ids_with_load_errors": (),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
    "get_finished": ("finished_req_ids",),
    "get_kv_connector_stats": (),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "has_pending_push_work": (),
    "on_new_request": ("request",),
    "register_kv_caches": ("kv_caches",),
    "request_finished": ("request", "block_ids"),
    "reset_cache": (),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
    "shutdown": (),
    "start_load_kv": ("forward_context",),
    "update_connector_output": ("connector_output",),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "wait_for_layer_load": ("layer_name",),
    "wait_for_save": (),
}
"""Method of vLLM's KVConnectorBase_V1 → its parameters, without self and keywords."""


def check_interface(version: str, base: type) -> None:
    """Raise ConfigError if this vLLM is not one that the connector fits."""
    check(version, "Headrace's connector")
    for name, needed in METHODS.items():
        method = getattr(base, name, None)
        if method is None:
            raise ConfigError(f"vLLM {version}: KVConnectorBase_V1 has no method {name}")
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        has = [each.name for each in inspect.signature(method).parameters.values() if each.kind not in kinds][1:]
        if tuple(has) != needed:
            raise ConfigError(f"vLLM {version}: KVConnectorBase_V1.{name} takes {has}, not {list(needed)}")
