"""What names an engine's blocks, from vLLM's configuration, and which configurations the connector cannot serve."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.worker.model.lora_files import FILES, digest_lora
from services.worker.vllm.connector.chain import Placed
from services.worker.vllm.connector.scheduler_half import Identity
from services.worker.vllm.connector.settings import ConnectorSettings
from shared.errors import ConfigError, ModelError

KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of KV whose full blocks hold all tokens, each written once."""
WHOLE_TOKENS = (16, 32, 64)
"""Tokens of blocks that vLLM is asked to keep in one piece. vLLM does not start if its attention backend splits such a
block: some split blocks of other sizes."""
IMAGE_KEY_BYTES = 32
"""Bytes of an image's key, a SHA-256."""
MOST_LORAS = 1024
"""Most LoRAs whose digests are kept; further ones are computed without the kvbm."""

_log = logging.getLogger(__name__)
PIECES = 64
PIECE_BYTES = 4096
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_LEFT_OUT = ("_name_or_path", "transformers_version")
"""Fields of a config that say where it is from."""


def refusal(config: Any, kv_cache: Any) -> str:
    """Return why the connector cannot serve this configuration. Empty if it can."""
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
    kind = type(kv_cache.kv_cache_groups[0].kv_cache_spec).__name__
    if kind not in KINDS:  # others leave blocks out of a request's table, or write to them again
        return f"KV of the kind {kind} is not supported; {', '.join(KINDS)} are"
    return ""


def keeps_blocks_whole(config: Any, settings: ConnectorSettings, *, on_cpu: bool) -> bool:
    """Return whether vLLM is asked to keep the layers of a block next to each other, so that a block is one copy. Its
    backend for CPUs knows another order alone; with MLA it was not tried."""
    if on_cpu or config.model_config.use_mla:
        return False
    return settings.whole_blocks and config.cache_config.block_size in WHOLE_TOKENS


def idle_steps(config: Any) -> int:
    """Return how many steps in a row that compute nothing show that no other is under way: vLLM has one for each stage
    of a pipeline under way, and one more. Ranks of data parallelism may step together: 0, since nothing shows it
    there."""
    parallel = config.parallel_config
    return 0 if parallel.data_parallel_size > 1 else int(parallel.pipeline_parallel_size) + 1


_NONCE = os.urandom(6).hex()
"""Tells this process from all others, also from a former one with its id."""


def identify(config: Any, kv_cache: Any, settings: ConnectorSettings) -> Identity:
    """Return the identity of an engine. Raise ConfigError."""
    model, parallel = config.model_config, config.parallel_config
    group = kv_cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    said = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv": str(config.cache_config.cache_dtype),
        "context": str(model.max_model_len),  # some models scale positions by it
        "load_format": str(config.load_config.load_format),
        "drafter": "" if config.speculative_config is None else str(config.speculative_config.model),
    }
    if getattr(config, "weight_transfer_config", None) is not None:  # the weights will be changed in place
        said["process"] = _NONCE
    hf = model.hf_config.to_dict()  # with its vision tower, if it sees
    if settings.weights:
        weights = named_weights(settings.weights, hf, said)
    else:
        weights = weights_digest(model_files(model.model, model.revision), hf, said)
    return Identity(
        model=settings.model_name or served_name(model),
        weights=weights,
        dtype=str(spec.dtype).removeprefix("torch."),
        layers=len(group.layer_names),
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        block_size=spec.block_size,
        blocks=kv_cache.num_blocks,
        ranks=parallel.world_size,
        instance=instance_of(parallel),
    )


def renamed(identity: Identity, resets: int) -> Identity:
    """Return the identity of an engine whose caches were reset `resets` times: no other process has that name."""
    return msgspec.structs.replace(identity, weights=f"{identity.weights} {_NONCE} {resets}")


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


def instance_of(parallel: Any) -> str:
    """Return the name of this engine at its kvbm, of vLLM's parallel_config: no other engine has it."""
    return f"vllm-{_word(socket.gethostname())}-{os.getpid()}-{parallel.data_parallel_rank}-{_NONCE}"


def served_name(model: Any) -> str:
    """Return the name under which vLLM serves a model, of its model_config."""
    name = model.served_model_name
    return str(name[0] if isinstance(name, list) else name or model.model)


def _word(text: str) -> str:
    return "".join(each if each.isascii() and each.isalnum() else "-" for each in text)[:32]


_Version = tuple[tuple[int, int, int], ...]
"""(Inode, size, time of change) of each of a LoRA's files."""


class _LoraDigests:
    """Digests of LoRAs' files, each version read once, in a thread. vLLM keeps what it loaded under a number; files
    that have changed since a number was first seen may not be what it loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[tuple[int, str], _Version] = {}
        """(Number, path) → the files as they were at its first request."""
        self._known: dict[tuple[str, _Version], str | None] = {}
        """(Path, version) → digest. None if it is being read, or could not be."""

    def find(self, number: int, path: str) -> str | None:
        """Return the digest. None if not known yet, or never."""
        try:
            version = _version(path)
        except OSError:
            return None
        with self._lock:
            if len(self._versions) >= MOST_LORAS and (number, path) not in self._versions:
                return None
            if self._versions.setdefault((number, path), version) != version:
                return None
            if (path, version) in self._known:
                return self._known[path, version]
            self._known[path, version] = None
        threading.Thread(target=self._read, args=(path, version), name="LoRA digest", daemon=True).start()
        return None

    def _read(self, path: str, version: _Version) -> None:
        try:
            digest = digest_lora(Path(path))
            if _version(path) != version:
                raise ModelError(f"{path} changed while it was read")
        except (ModelError, OSError) as wrong:
            _log.warning("blocks of the LoRA in %s are not exchanged: %s", path, wrong)
            return
        with self._lock:
            self._known[path, version] = digest


def _version(path: str) -> _Version:
    found = [(Path(path) / name).stat() for name in FILES]
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


_loras = _LoraDigests()


def lora_name(request: Any, settings: ConnectorSettings) -> str | None:
    """Return what names a request's LoRA in content keys. Empty if it has none. None if its blocks are not exchanged,
    since its files were not read yet or cannot be."""
    if request is None:
        return ""
    if settings.lora_names_are_ids:
        return str(request.lora_name)
    if request.load_inplace:
        return None  # other weights may be under this number
    return _loras.find(request.lora_int_id, request.lora_path)


def placed_images(features: Sequence[Any], settings: ConnectorSettings) -> list[Placed] | None:
    """Return the images of a request, of which vLLM has a feature each. None if its blocks are not exchanged, since a
    name is no key: of another kind, or not known to name the content."""
    if features and not settings.image_names_are_keys:
        return None
    keys = [image_key(feature.identifier) for feature in features]
    places = [feature.mm_position for feature in features]
    return [(key, at.offset, at.length) for key, at in zip(keys, places, strict=True) if key] if all(keys) else None


def image_key(name: str) -> bytes:
    """Return the key that vLLM's name of an image stands for. Empty if it is none, such as one with a LoRA's name."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return b""
    return key if len(key) == IMAGE_KEY_BYTES and key.hex() == name else b""


def weights_digest(path: Path, config: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """Return 16 hex digits for the files at `path`, a directory or one file. `config` is the model's, `settings` what
    else changes the KV. Raise ConfigError if there are no files of weights, or one cannot be read.

    The digest covers the name of each file, its size, the time of its last change and PIECES pieces of its bytes. So
    copies of a model count as different ones, unless they keep the time (`cp -p`); `weights` in the connector's
    settings names them alike.
    """
    digest = _digest_of("headrace vllm 1", config, settings)
    try:
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        for file in files:
            _read_pieces(digest, file)
    except OSError as wrong:
        raise ConfigError(f"{wrong.filename or path}: {wrong.strerror}") from None
    if not files:
        raise ConfigError(f"{path} has no files of weights ({', '.join(SUFFIXES)}); set the connector's `weights`")
    return digest.hexdigest()[:16]


def named_weights(name: str, config: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """Return the digest for weights that the user has named."""
    return _digest_of(["headrace vllm named 1", name], config, settings).hexdigest()[:16]


def _digest_of(kind: object, config: Mapping[str, Any], settings: Mapping[str, str]) -> hashlib._Hash:
    said = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    return hashlib.sha256(json.dumps([kind, said, dict(settings)], sort_keys=True, default=str).encode())


def _read_pieces(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as opened:
        about = os.fstat(opened.fileno())
        size = about.st_size
        # A hub's file is a link to one that is named by its content; others are told apart by the time of change, too.
        digest.update(f"{file.name} {size} {file.resolve().name} {about.st_mtime_ns} ".encode())
        last = max(0, size - PIECE_BYTES)
        for at in sorted({last * piece // (PIECES - 1) for piece in range(PIECES)}):
            digest.update(os.pread(opened.fileno(), PIECE_BYTES, at))
