"""What names an engine's blocks, from vLLM's configuration, and which configurations the connector cannot serve."""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any

from services.worker.lora_files import digest_lora
from services.worker.vllm.connector.scheduler_half import Identity
from services.worker.vllm.connector.settings import ConnectorSettings
from services.worker.vllm.connector.weights import named_weights, weights_digest
from shared.errors import ConfigError, ModelError

MOST_LORAS = 1024
"""Most LoRAs whose digests are kept; further ones are computed without the kvbm."""

_log = logging.getLogger(__name__)


def refusal(config: Any, kv_cache: Any) -> str:
    """Return why the connector cannot serve this configuration; empty: it can."""
    parallel, cache = config.parallel_config, config.cache_config
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        return "kv_load_failure_policy must be recompute: blocks that cannot be loaded are computed"
    if config.kv_transfer_config.kv_role != "kv_both":
        return f"kv_role is {config.kv_transfer_config.kv_role}; it must be kv_both"
    if not cache.enable_prefix_caching:
        return "prefix caching is off (--enable-prefix-caching): blocks are found by their hashes"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "context parallelism is not supported"
    if kv_cache is None or len(kv_cache.kv_cache_groups) != 1:
        return "models with several groups of KV (hybrid ones) are not supported"
    if kv_cache.needs_kv_cache_zeroing:
        return "this model's blocks are zeroed before use, which is not supported"
    spec = kv_cache.kv_cache_groups[0].kv_cache_spec
    if not hasattr(spec, "num_kv_heads"):
        return f"a KV of {type(spec).__name__} is not supported"
    return ""


def identify(config: Any, kv_cache: Any, settings: ConnectorSettings, resets: int) -> Identity:
    """Return the identity of an engine. `resets` counts how often its cache was reset. Raise ConfigError."""
    model, parallel = config.model_config, config.parallel_config
    group = kv_cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    said = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv": str(config.cache_config.cache_dtype),
    }
    hf = model.hf_text_config.to_dict()
    if settings.weights:
        weights = named_weights(settings.weights, hf, said)
    else:
        weights = weights_digest(model_files(model.model, model.revision), hf, said)
    engine = f"vllm-{_word(socket.gethostname())}-{os.getpid()}-{parallel.data_parallel_rank}"
    return Identity(
        model=_served_name(model),
        weights=weights if not resets else f"{weights}-{engine}-{resets}",
        dtype=str(spec.dtype).removeprefix("torch."),
        layers=len(group.layer_names),
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        block_size=spec.block_size,
        blocks=kv_cache.num_blocks,
        ranks=parallel.world_size,
        instance=engine,
    )


def model_files(model: str, revision: str | None) -> Path:
    """Return where the model's files are: its path, or a hub's files that are here already. Raise ConfigError."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError) as wrong:
        raise ConfigError(f"{model}: its files are not here; set the connector's `weights` ({wrong})") from None


def _served_name(model: Any) -> str:
    name = model.served_model_name
    return str(name[0] if isinstance(name, list) else name or model.model)


def _word(text: str) -> str:
    return "".join(each if each.isascii() and each.isalnum() else "-" for each in text)[:32]


class _LoraDigests:
    """Digests of LoRAs' files, each read once, in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], str | None] = {}
        """(Name, path) → digest; None: it is being read, or could not be."""

    def find(self, name: str, path: str) -> str | None:
        """Return the digest; None: not known yet, or never."""
        with self._lock:
            if (name, path) in self._known or len(self._known) >= MOST_LORAS:
                return self._known.get((name, path))
            self._known[name, path] = None
        threading.Thread(target=self._read, args=(name, path), name="LoRA digest", daemon=True).start()
        return None

    def _read(self, name: str, path: str) -> None:
        try:
            digest = digest_lora(Path(path))
        except ModelError as wrong:
            _log.warning("blocks of LoRA %s are not exchanged: %s", name, wrong)
            return
        with self._lock:
            self._known[name, path] = digest


_loras = _LoraDigests()


def lora_name(request: Any, settings: ConnectorSettings) -> str | None:
    """Return what names a request's LoRA in content keys; empty: it has none. None: its blocks are not exchanged, since
    its files were not read yet or cannot be."""
    if request is None:
        return ""
    if settings.lora_names_are_ids:
        return str(request.lora_name)
    return _loras.find(request.lora_name, request.lora_path)
