"""Where the bytes of a block lie in the tensors that vLLM registers, and how two engines know that they agree. Pure.

    vLLM 0.32, a view for each layer           [blocks, heads, tokens, content], in one of six orders of memory:
    layer by layer     L B H N C, L B N H C    a fragment for each layer
    heads apart        L H B N C               a fragment for each layer and head
    block by block     B L H N C, B L N H C    one fragment: the layers of a block are neighbours
    heads of layers    B H L N C               a fragment for each layer and head; merged where they are neighbours
    earlier shapes     (2, B, N, H, D)         keys and values apart: two fragments for each layer
                       (B, 2, N, H, D), MLA    a fragment for each layer

A block of vLLM's scheduler may consist of several kernel blocks: the block axis is then a multiple of the number of
blocks, and the kernel blocks of one block are neighbours on that axis.

The native engine's blocks are never equal to vLLM's. It stores its fragments in another byte order, so its layout has
no `form` and another digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import pairwise, product
from math import prod

import msgspec
from msgspec import Struct

from services.worker.transfer.block_shape import BlockShape
from shared.errors import HeadraceError
from shared.messages.cards import KvLayout

MOST_FRAGMENTS = 1 << 16
"""The largest number of fragments of one block. A block in smaller pieces is not worth its copies."""
_FORM = "vllm-1"
"""The version of what `form` is made of."""


class LayoutUnfit(HeadraceError):
    """The tensor of `layer` cannot be copied as blocks, for `reason`."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(f"the KV cache of layer {layer or '(none)'} cannot be copied as blocks: {reason}")
        self.layer = layer
        self.reason = reason


class TensorPlace(Struct, frozen=True):
    """The place of one layer's tensor in memory, as torch describes it."""

    data_ptr: int
    shape: tuple[int, ...]
    strides_in_elements: tuple[int, ...]
    element_bytes: int


class _Axis(Struct, frozen=True):
    """One axis of more than one element, inside a block."""

    index: int
    """The axis of the tensor; the block axis itself stands for the kernel blocks of one block."""
    extent: int
    stride_bytes: int


class _LayerBlock(Struct, frozen=True):
    """Block 0 of one layer."""

    axes: tuple[_Axis, ...]
    """The axes inside a block, the farthest steps first: the order of the bytes in the pool."""
    offsets: tuple[int, ...]
    """The offset of each fragment from the tensor's begin, in bytes, ascending."""
    fragment_bytes: int
    stride_bytes: int


def block_shape(places: Mapping[str, TensorPlace], num_blocks: int, *, block_axis: int | None = None) -> BlockShape:
    """Return where the blocks of all layers lie.

    The fragments are in the order of the layers' names, numbers as numbers, and in the order of memory within a layer.
    A tensor that several layers share is there once. `num_blocks` is KVCacheConfig's. `block_axis` is the axis that
    counts blocks: 0 for all tensors of vLLM 0.32. None means to find it by its extent.
    Raise LayoutUnfit if the tensors are no such blocks, or if several axes may be the one that counts them.
    """
    return _merged(_layers(places, num_blocks, block_axis), places, num_blocks)


def kv_layout(
    places: Mapping[str, TensorPlace],
    num_blocks: int,
    *,
    dtype: str,
    backend: str,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    block_axis: int | None = None,
) -> KvLayout:
    """Return the description of these blocks, for `StoreLayout.kv`.

    Two engines with equal descriptions put the same bytes at the same place of a slot. `dtype` is that of the cache
    (`fp8_e4m3` and not `uint8`). `backend` names what decides the meaning of a layer's bytes: the attention backend
    and the version of vLLM, since a backend may order keys and values within the content in its own way. `block_size`
    is in tokens, of a block of the scheduler. The number of blocks and the addresses are not part of the description.
    Raise LayoutUnfit as `block_shape` does.
    """
    layers = _layers(places, num_blocks, block_axis)
    shape = _merged(layers, places, num_blocks)
    order = [
        (name, places[name].element_bytes, [(axis.index, axis.extent) for axis in block.axes])
        for name, block in layers.items()
    ]
    described = msgspec.json.encode((_FORM, backend, dtype, order))
    return KvLayout(
        dtype=dtype,
        layers=len(layers),
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        form=hashlib.sha256(described).hexdigest()[:16],
        form_bytes=shape.block_bytes,
    )


# --- one layer


def _layers(places: Mapping[str, TensorPlace], num_blocks: int, block_axis: int | None) -> dict[str, _LayerBlock]:
    """Return the blocks of each tensor, by the first name of its layers, in the order of names."""
    if not places:
        raise LayoutUnfit("", "there are no tensors")
    if num_blocks < 1:
        raise LayoutUnfit(next(iter(places)), f"there are {num_blocks} blocks")
    found: dict[str, _LayerBlock] = {}
    known: set[TensorPlace] = set()
    for name in sorted(places, key=_natural):
        if places[name] not in known:
            known.add(places[name])
            found[name] = _layer_block(name, places[name], num_blocks, block_axis)
    [(first, model), *others] = found.items()
    for name, block in others:
        if block.stride_bytes != model.stride_bytes:
            raise LayoutUnfit(
                name, f"its blocks are {block.stride_bytes} bytes apart, those of {first} {model.stride_bytes}"
            )
        if block.fragment_bytes != model.fragment_bytes:
            raise LayoutUnfit(
                name, f"its fragments have {block.fragment_bytes} bytes, those of {first} {model.fragment_bytes}"
            )
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layers.2 before layers.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _layer_block(name: str, place: TensorPlace, num_blocks: int, stated: int | None) -> _LayerBlock:
    _check(name, place)
    index = _block_axis(name, place, num_blocks, stated)
    kernel_blocks = place.shape[index] // num_blocks
    kernel_stride = place.strides_in_elements[index] * place.element_bytes
    axes = [
        _Axis(axis, extent, stride * place.element_bytes)
        for axis, (extent, stride) in enumerate(zip(place.shape, place.strides_in_elements, strict=True))
        if axis != index and extent > 1
    ]
    if kernel_blocks > 1:
        axes.append(_Axis(index, kernel_blocks, kernel_stride))
    axes.sort(key=lambda axis: -axis.stride_bytes)
    fragment_bytes, apart = place.element_bytes, list(axes)
    while apart and apart[-1].stride_bytes == fragment_bytes:
        fragment_bytes *= apart.pop().extent
    if prod(axis.extent for axis in apart) > MOST_FRAGMENTS:
        raise LayoutUnfit(name, f"a block is in more than {MOST_FRAGMENTS} pieces")
    steps = (range(0, axis.extent * axis.stride_bytes, axis.stride_bytes) for axis in apart)
    offsets = tuple(sum(step) for step in product(*steps))
    # A single block has no next one, and torch gives an axis of one element any stride.
    stride_bytes = kernel_stride * kernel_blocks if num_blocks > 1 else offsets[-1] + fragment_bytes
    return _LayerBlock(tuple(axes), offsets, fragment_bytes, stride_bytes)


def _check(name: str, place: TensorPlace) -> None:
    """Raise LayoutUnfit if the tensor is empty, or two of its elements share memory."""
    if len(place.shape) != len(place.strides_in_elements):
        raise LayoutUnfit(name, f"{len(place.shape)} axes have {len(place.strides_in_elements)} strides")
    if place.element_bytes < 1 or place.data_ptr < 1 or not place.shape or min(place.shape) < 1:
        raise LayoutUnfit(name, f"it is empty: shape {place.shape}, elements of {place.element_bytes} bytes")
    covered = 1
    for stride, extent in sorted(zip(place.strides_in_elements, place.shape, strict=True)):
        if extent > 1:
            if stride < covered:
                raise LayoutUnfit(
                    name, f"its elements overlap: shape {place.shape}, strides {place.strides_in_elements}"
                )
            covered += (extent - 1) * stride


def _block_axis(name: str, place: TensorPlace, num_blocks: int, stated: int | None) -> int:
    """Return the axis that counts blocks. Where several may, a wrong choice would mix blocks, so there is no guess."""
    if stated is not None:
        if not 0 <= stated < len(place.shape):
            raise LayoutUnfit(name, f"it has no axis {stated}: shape {place.shape}")
        if place.shape[stated] % num_blocks:
            raise LayoutUnfit(name, f"axis {stated} of shape {place.shape} does not count {num_blocks} blocks")
        return stated
    exact = [axis for axis, extent in enumerate(place.shape) if extent == num_blocks]
    found = exact or [axis for axis, extent in enumerate(place.shape) if extent % num_blocks == 0]
    if not found:
        raise LayoutUnfit(name, f"no axis of shape {place.shape} counts {num_blocks} blocks")
    if len(found) > 1:
        raise LayoutUnfit(name, f"axes {found} of shape {place.shape} may count {num_blocks} blocks: state block_axis")
    return found[0]


# --- all layers


def _merged(layers: Mapping[str, _LayerBlock], places: Mapping[str, TensorPlace], num_blocks: int) -> BlockShape:
    """Return the fragments of all layers as one shape; neighbours that follow each other in the pool are merged."""
    named = [(places[name].data_ptr + offset, name) for name, block in layers.items() for offset in block.offsets]
    model = next(iter(layers.values()))
    if len(named) > MOST_FRAGMENTS:
        raise LayoutUnfit(named[-1][1], f"a block is in more than {MOST_FRAGMENTS} pieces")
    _check_apart(sorted(named), model.fragment_bytes, model.stride_bytes, num_blocks)
    regions = tuple(at for at, _ in named)
    gaps = [
        index for index, (before, after) in enumerate(pairwise(regions), 1) if after - before != model.fragment_bytes
    ]
    run = gaps[0] if gaps else len(regions)
    if len(regions) % run or gaps != list(range(run, len(regions), run)):
        run = 1
    stride_bytes = model.stride_bytes if num_blocks > 1 else max(model.stride_bytes, run * model.fragment_bytes)
    if run * model.fragment_bytes > stride_bytes:  # neighbours of another tensor, not of the same block
        run = 1
    return BlockShape(regions[::run], run * model.fragment_bytes, stride_bytes, num_blocks)


def _check_apart(named: list[tuple[int, str]], fragment_bytes: int, stride_bytes: int, num_blocks: int) -> None:
    """Raise LayoutUnfit unless fragments lie apart, or all of them interleave within a stride, as BlockShape needs."""
    whole_bytes = (num_blocks - 1) * stride_bytes + fragment_bytes
    interleaved = num_blocks == 1 or named[-1][0] + fragment_bytes - named[0][0] <= stride_bytes
    for (before, _), (after, name) in pairwise(named):
        if after - before < (fragment_bytes if interleaved else whole_bytes):
            raise LayoutUnfit(name, "its blocks overlap those of another layer, or of its own")
