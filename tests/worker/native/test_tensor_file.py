"""safetensors files: read, written, torn."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from services.worker.model.tensor_header import HEADER_LIMIT_BYTES
from services.worker.native.tensor_file import TensorFile, write_tensors
from shared.errors import ModelError

RANDOM = np.random.default_rng(0)


def tensor(*shape: int) -> NDArray[np.float32]:
    return RANDOM.normal(size=shape).astype(np.float32)


def with_header(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_float32_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    tensors = {"a": tensor(4, 6), "b": tensor(5), "empty": tensor(0, 3)}
    save_file(tensors, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    for name, expected in tensors.items():
        np.testing.assert_array_equal(file.floats(name), expected)
    assert not file.floats("a").flags.owndata
    assert not file.floats("a").flags.writeable


def test_sixteen_bit_floats_become_the_same_numbers_in_32(tmp_path: Path) -> None:
    halves = np.array([0.0, -0.0, 1.5, -65504, 6e-8, np.inf], np.float16)
    brains = (np.array([0.0, 1.0, -2.5, 3e38, 1e-40], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    header = {"half": entry("F16", [2, 3], 0, 12), "brain": entry("BF16", [5], 12, 22)}
    file = TensorFile(with_header(tmp_path / "x", header, halves.tobytes() + brains.tobytes()))
    np.testing.assert_array_equal(file.floats("half"), halves.reshape(2, 3).astype(np.float32))
    np.testing.assert_array_equal(file.floats("brain").view(np.uint32), brains.astype(np.uint32) << 16)


def test_tensors_of_other_types_may_be_present_but_not_read(tmp_path: Path) -> None:
    file = TensorFile(with_header(tmp_path / "x", {"ids": entry("I64", [1], 0, 8)}, bytes(8)))
    with pytest.raises(ModelError, match="ids is stored as I64"):
        file.floats("ids")


def test_what_is_written_reads_back_and_lies_on_cache_lines(tmp_path: Path) -> None:
    tensors = {"odd": tensor(3, 3), "wide": tensor(16, 8), "long": tensor(32)}
    shares: list[float] = []
    path = tmp_path / "x.safetensors"
    write_tensors(path, {name: t.shape for name, t in tensors.items()}, tensors.__getitem__, shares.append)
    file, reference = TensorFile(path), load_file(path)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(file.floats(name), expected)
        np.testing.assert_array_equal(reference[name], expected)
        assert file.floats(name).ctypes.data % 64 == 0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("kept_bytes", [0, 7, 8, 60, -1])
def test_a_torn_file_is_named(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "torn.safetensors"
    save_file({"a": tensor(8, 8)}, path)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=r"torn\.safetensors: torn"):
        TensorFile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="none: No such file"):
        TensorFile(tmp_path / "none")


def test_a_pipe_is_named_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(ModelError, match="x: not a regular file"):
        TensorFile(tmp_path / "x")


def test_a_header_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="x: the header is not that of a safetensors file"):
        TensorFile(with_header(tmp_path / "x", b'{"a":' * 50_000 + b"1" + b"}" * 50_000))


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    header = b"{}".ljust(HEADER_LIMIT_BYTES)
    assert TensorFile(with_header(tmp_path / "x", header)).entries == {}
    with pytest.raises(ModelError, match=rf"y: the header has {len(header) + 1} bytes; at most {len(header)} are"):
        TensorFile(with_header(tmp_path / "y", header + b" "))


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (b"not json, but long enough", "header is not that of a safetensors file"),
        (b"\xff\xfe\xfd{}", "header is not that of a safetensors file"),
        ([1, 2, 3], "header is not that of a safetensors file"),
        ({"a": {"dtype": "F32"}}, "missing required field"),
        ({"a": entry("F32", [2], 0, 4)}, "inconsistent at a"),
        ({"a": entry("F32", [-2], 0, 8)}, "inconsistent at a"),
        ({"a": entry("F32", [-1, -2], 0, 8)}, "inconsistent at a"),
        ({"a": entry("F32", [2], 8, 16)}, "inconsistent at a"),
        ({"a": entry("F32", [2], 8, 0)}, "inconsistent at a"),
        ({"a": entry("I8", [-2], 0, -2)}, "inconsistent at a"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [2], 0, 8)}, "inconsistent at b"),
        ({"a": entry("F32", [1], 0, 4)}, "lists 4 bytes of tensors, the file has 8"),
        ({"a": entry("F32", [1 << 40], 0, 4 << 40)}, "lists 4398046511104 bytes"),
    ],
)
def test_an_inconsistent_header_is_refused(tmp_path: Path, header: object, complaint: str) -> None:
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / "x")) + ".*" + complaint):
        TensorFile(with_header(tmp_path / "x", header, bytes(8)))
