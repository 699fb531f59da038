"""The connector's settings: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from services.worker.config import CopyPath
from services.worker.kv_connector.stores import COLLECT_S
from shared.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0, le=60)]


class ConnectorSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one engine's connector."""

    pool: Annotated[str, Meta(min_length=1)]
    """Directory of the kvbm's pool."""
    offload: Literal["filled", "off"] = "filled"
    """Blocks that kvbm is offered: filled: each as soon as it is full; off: none, blocks are only loaded."""
    wait_s: Seconds = 1.0
    """Most seconds that a request waits for the kvbm's first answer; then its blocks are computed."""
    timeout_s: Seconds = 2.0
    """Most seconds until each of the kvbm's answers."""
    blocks_in_flight: Annotated[int, Meta(ge=1)] = 256
    """Most device blocks that copies to the pool hold at once, and never more than a quarter of the device's blocks."""
    collect_s: Annotated[float, Meta(ge=0, le=60)] = COLLECT_S
    """Seconds for which a full block waits for others that are stored with it."""
    checksums: bool = False
    """Whether blocks go to the kvbm with a checksum, which is compared when they come back. One rank only."""
    verify: bool = False
    """Whether each loaded block is compared with the pool's: for tests of a machine."""
    whole_blocks: bool = True
    """Whether vLLM is asked to keep the layers of a block next to each other on a GPU, so that a block is one copy. In
    a chain, turn it off for connectors that ask for another order."""
    copy_path: CopyPath = "auto"
    """Path of copies on a GPU; auto: what calibration found."""
    model_name: str = ""
    """Name of the model at the kvbm. Empty means the one under which vLLM serves it."""
    weights: str = ""
    """A name for the weights. Empty means a digest of the model's files, which must then be there."""
    lora_names_are_ids: bool = False
    """Whether the name of a LoRA names its content, as in a worker of Headrace. Else its files are digested."""
    image_names_are_keys: bool = False
    """Whether the name of an image names its content and how it was prepared, as in a worker of Headrace. Else prompts
    with images are computed without the kvbm: clients of a `vllm serve` may give an image any name."""
    prefetches: bool = False
    """Whether requests with `headrace_expected` in their `kv_transfer_params` wait while their blocks are loaded, until
    they are aborted. Only for a worker of Headrace, whose clients cannot send that."""
    keep_on_reset: bool = False
    """Whether blocks stay usable when vLLM's caches are reset, as by a sleep. Not where weights are changed in
    place."""


def read_settings(given: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings. Raise ConfigError, naming the one that is wrong."""
    known = [field.name for field in msgspec.structs.fields(ConnectorSettings)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"{_WHERE}.{name}: no such setting" + (f"; did you mean {near[0]}?" if near else ""))
    if not given.get("pool"):
        raise ConfigError(f"{_WHERE}.pool is missing: the directory of the kvbm's pool")
    try:
        return msgspec.convert(dict(given), ConnectorSettings)
    except msgspec.ValidationError as wrong:
        raise ConfigError(f"{_WHERE}: {wrong}") from None


_WHERE = "kv_connector_extra_config"
