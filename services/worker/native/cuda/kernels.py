"""Compiles the CUDA sources in `kernels/` for one model's shape, with NVRTC through CuPy.

Shapes are constants of the compilation, so that loops over a head's dimensions unroll into registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]

from services.worker.config import Dtype
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.early_kernel import EarlyKernel
from services.worker.native.cuda.hopper import HEAD_DIM, SHARED_BYTES, THREADS, compile_prefill, is_hopper
from services.worker.native.cuda.sources import source_text
from services.worker.transfer.cuda import ERRORS
from shared.errors import ConfigError
from shared.installation import install_command

Kernel = Any
"""A cupy.RawKernel; CuPy has no types."""

_FAST_HEAD_DIMS = (64, 128)
_DECODE_TILE = 16
PREFILL_ROWS = 128
"""Rows of one tile of attention_prefill.cu, and of attention_prefill_hopper.cu."""
_PREFILL_TILE = 64


@dataclass(frozen=True, slots=True)
class Prefill:
    """The kernel of prompts' attention, and how it is launched."""

    kernel: Kernel
    threads: int
    shared_bytes: int
    mapped: bool = False
    """The pages reach it through a map (`hopper.page_map`), not by their address."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels for one model's shape. Their sources document them."""

    fetch: Kernel
    embed: Kernel
    rms_norm: Kernel
    narrow_rows: Kernel
    norm_floats: Kernel
    bend: Kernel
    sum_rows: Kernel
    swiglu: Kernel
    rotate_and_store: Kernel
    row_product: Kernel
    row_swiglu: Kernel
    attend_any: Kernel
    attend_decode: Kernel | None
    """None if this shape is left to `attend_any`; so are the next two."""
    merge_splits: Kernel | None
    attend_prefill: Prefill | None
    choose: Kernel
    choose_special: Kernel
    count_tokens: Kernel
    score: Kernel
    pack: int
    """Elements that a thread reads at once; widths of rows are multiples of it."""
    can_begin_early: bool
    """Whether the kernels of EARLY wait for the one before them by themselves."""

    def beginning_early(self) -> Kernels:
        """Return the same kernels, of which those of EARLY begin while the kernel before them ends."""
        if not self.can_begin_early:
            return self
        kernels = {name: getattr(self, name) for name in EARLY}
        early: dict[str, Any] = {name: EarlyKernel(each) for name, each in kernels.items() if each is not None}
        return replace(self, **early)


EARLY = ("rms_norm", "swiglu", "rotate_and_store", "row_product", "row_swiglu", "attend_decode", "merge_splits")
"""The kernels that call `after_others` (elements.cuh)."""


@dataclass(frozen=True, slots=True)
class VisionKernels:
    """The kernels for one vision tower's shape. vision.cu documents them."""

    cut_patches: Kernel
    place_patches: Kernel
    layer_norm: Kernel
    store_heads: Kernel
    activate_rows: Kernel
    take_features: Kernel
    add_bias: Kernel
    attend_any: Kernel
    attend_prefill: Prefill | None
    """None if this shape or type is left to `attend_any`."""
    pack: int
    """Elements that a thread reads at once; widths of rows are multiples of it."""


def compile_kernels(config: ModelConfig, element_type: Dtype, block_size: int, *, hopper: bool = True) -> Kernels:
    """Compile the kernels for the current device, which takes some seconds the first time.

    Without `hopper` there are none that only GPUs of that generation have. Raise ConfigError if there is no compiler or
    it reports an error.
    """
    with _errors_of_the_compiler():
        return _compiled(config, element_type, block_size, hopper=hopper)


def compile_vision(head_dim: int, pack: int, element_type: Dtype, block_size: int = 16) -> VisionKernels:
    """Compile the kernels of a vision tower, as `compile_kernels` does those of a decoder."""
    with _errors_of_the_compiler():
        return _compiled_vision(head_dim, pack, element_type, block_size)


@contextmanager
def _errors_of_the_compiler() -> Iterator[None]:
    """Raise ConfigError if there is no compiler or it reports an error. CUDA's own errors pass unchanged."""
    try:
        yield
    except ERRORS:
        raise
    except (cp.cuda.compiler.CompileException, RuntimeError, OSError) as wrong:  # RuntimeError: no NVRTC
        raise ConfigError(
            f"the GPU's kernels do not compile; `{install_command('gpu')}` installs the compiler and CUDA's headers:"
            f" {wrong}"
        ) from wrong


def _compiled_vision(head_dim: int, pack: int, element_type: Dtype, block_size: int) -> VisionKernels:
    defines: dict[str, object] = {
        **_element(element_type),
        **{
            "PACK": pack,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "GELU": 0,
            "WINDOWED": 0,
            "CAUSAL": 0,
            "EARLY": 0,
        },
    }
    vision, prefill = _module("vision", defines), None
    if element_type != "float32" and head_dim in _FAST_HEAD_DIMS:
        prefill = _prefill(_module("attention_prefill", defines).get_function("attend_prefill"), head_dim)
    names = ("cut_patches", "place_patches", "layer_norm", "store_heads", "activate_rows", "take_features", "add_bias")
    return VisionKernels(
        **{name: vision.get_function(name) for name in names},
        attend_any=_module("attention_any", defines).get_function("attend_any"),
        attend_prefill=prefill,
        pack=pack,
    )


def _element(element_type: Dtype) -> dict[str, object]:
    """Return what elements.cuh is compiled with for a type."""
    return {"ELEMENT_BITS": 32 if element_type == "float32" else 16, "ELEMENT_BFLOAT": int(element_type == "bfloat16")}


def _module(name: str, defines: Mapping[str, object]) -> Any:
    return cp.RawModule(code=source_text(name, defines), options=("--std=c++17",))


def _compiled(config: ModelConfig, element_type: Dtype, block_size: int, *, hopper: bool) -> Kernels:
    pack = 4 if element_type == "float32" else 8
    while config.hidden % pack or config.intermediate % pack or config.queries % pack:
        pack //= 2
    early = hopper and is_hopper()
    defines: dict[str, object] = {
        **_element(element_type),
        "PACK": pack,
        "HEAD_DIM": config.head_dim,
        "BLOCK_SIZE": block_size,
        "GROUP": config.heads // config.kv_heads,
        "GELU": int(config.activation == "gelu_tanh"),
        "QUERY_NORM": ("none", "heads", "whole").index(config.query_norm),
        "ROTATED": config.rotated,
        "WINDOWED": int(any(config.windows)),
        "EARLY": int(early),
    }
    if config.score_cap:
        defines["SCORE_CAP"] = f"{config.score_cap:.9e}f"
    module = partial(_module, defines=defines)
    rows, row_product, choose = module("rows"), module("row_product"), module("choose")
    fast = element_type != "float32" and config.head_dim in _FAST_HEAD_DIMS and block_size % _DECODE_TILE == 0
    fast = fast and not config.score_cap
    decode = module("attention_decode") if fast else None
    prefill = None
    if hopper and fast and element_type == "bfloat16" and config.head_dim == HEAD_DIM and is_hopper():
        kernel = compile_prefill(block_size, windowed=any(config.windows))
        prefill = Prefill(kernel, THREADS, SHARED_BYTES, mapped=True)
    elif fast:
        prefill = _prefill(module("attention_prefill").get_function("attend_prefill"), config.head_dim)
    return Kernels(
        fetch=rows.get_function("fetch"),
        embed=rows.get_function("embed"),
        rms_norm=rows.get_function("rms_norm"),
        narrow_rows=rows.get_function("narrow_rows"),
        norm_floats=rows.get_function("norm_floats"),
        bend=rows.get_function("bend"),
        sum_rows=rows.get_function("sum_rows"),
        swiglu=rows.get_function("swiglu"),
        rotate_and_store=rows.get_function("rotate_and_store"),
        row_product=row_product.get_function("row_product"),
        row_swiglu=row_product.get_function("row_swiglu"),
        attend_any=module("attention_any").get_function("attend_any"),
        attend_decode=decode.get_function("attend_decode") if decode is not None else None,
        merge_splits=decode.get_function("merge_splits") if decode is not None else None,
        attend_prefill=prefill,
        choose=choose.get_function("choose"),
        choose_special=choose.get_function("choose_special"),
        count_tokens=choose.get_function("count_tokens"),
        score=module("score").get_function("score"),
        pack=pack,
        can_begin_early=early,
    )


def _prefill(kernel: Kernel, head_dim: int) -> Prefill:
    shared_bytes = 2 * 2 * _PREFILL_TILE * head_dim * 2  # two stages of keys and values
    kernel.max_dynamic_shared_size_bytes = shared_bytes
    return Prefill(kernel, 2 * PREFILL_ROWS, shared_bytes)
