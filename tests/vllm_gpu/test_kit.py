"""What the kit leaves out of a library, and that both sides of it agree."""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.local import install_diffusers
from deploy.local.engine_environment import STAMP, stamped
from tests.vllm_gpu import kit

PTX, ELF = 1, 2


def entry(kind: int, gpu: int, code: bytes) -> bytes:
    return struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(code), gpu) + code


def fat(*entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def kept(library: bytes, *, ptx: bool) -> set[bytes]:
    """Return which of the codes that are made of one letter are still there."""
    shown = kit.without_others(library, ptx=ptx)
    assert len(shown) == len(library)
    return {letter for letter in (b"A", b"B", b"C", b"D") if letter * 40 in shown}


def test_code_for_other_gpus_becomes_zeros_and_the_rest_of_the_file_stays() -> None:
    library = (
        b"host" * 9 + fat(entry(ELF, 80, b"A" * 40), entry(ELF, 90, b"B" * 40), entry(PTX, 90, b"C" * 40)) + b"host"
    )
    assert kept(library, ptx=True) == {b"B"}
    shown = kit.without_others(library, ptx=True)
    assert (shown[:36], shown[-4:]) == (library[:36], b"host")


def test_intermediate_code_is_kept_on_demand_if_nothing_else_runs() -> None:
    library = fat(entry(ELF, 80, b"A" * 40), entry(PTX, 80, b"B" * 40)) + fat(entry(PTX, 100, b"C" * 40))
    assert kept(library, ptx=True) == {b"B"}
    assert kept(library, ptx=False) == set()


def test_attention_is_kept_for_the_heads_that_the_tests_have() -> None:
    wanted = [b"flash_fwd_hdim128_bf16_paged_split_sm90_cu", b"flash_fwd_hdim64_fp16_packgqa_sm90_cu"]
    others = [b"flash_fwd_hdim256_bf16_sm90_cu", b"flash_fwd_hdim64_256_bf16_sm90_cu"]
    others += [b"flash_fwd_hdim128_e4m3_paged_sm90_cu", b"flash_fwd_hdim128_bf16_paged_softcap_sm90_cu"]
    for name in wanted:
        assert kept(fat(entry(ELF, 90, b"A" * 40 + name)), ptx=False) == {b"A"}
    for name in others:
        assert kept(fat(entry(ELF, 90, b"A" * 40 + name)), ptx=False) == set()


def test_an_entry_of_an_unknown_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="an entry of an unknown form at 0x10: kind 7"):
        kit.without_others(fat(entry(7, 90, b"A" * 40)), ptx=False)


def test_bytes_that_look_like_a_fat_binary_and_are_none_are_left_alone() -> None:
    library = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40) + b"A" * 40
    assert kit.without_others(library, ptx=False) == library


def test_what_was_packed_is_unpacked_where_python_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, engine = tmp_path / "thing-1-py3-none-any.whl", tmp_path / "diffusers-1-py3-none-any.whl"
    with zipfile.ZipFile(engine, "w") as archive:
        archive.writestr("diffusers/__init__.py", "")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "VALUE = 3\n")
        archive.writestr("thing/code.so", b"host" + fat(entry(ELF, 80, b"A" * 40)))
        archive.writestr("thing-1.data/scripts/thing", "#!/bin/sh\n")
        archive.writestr("tvm_ffi/3rdparty/notes.txt", "sources of others\n")
    monkeypatch.setattr(kit, "ARCHIVES", tmp_path)
    monkeypatch.setattr(kit, "ENVIRONMENTS", {name: tmp_path / name for name in kit.ENVIRONMENTS})
    for name in kit.ENVIRONMENTS:
        wheels = [wheel, engine] if name == kit.DIFFUSERS else [wheel]
        kit._write(kit.Archive(f"{name}-packages", wheels), ptx=False, preset=0)
    kit.unpack()
    assert stamped(tmp_path / kit.DIFFUSERS, "diffusers") == install_diffusers.VERSION
    assert not (tmp_path / kit.VLLM / STAMP).exists(), "vLLM itself was not among the archives"
    for name, directory in kit.ENVIRONMENTS.items():
        packages = directory / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        assert (packages / "thing" / "__init__.py").read_text() == "VALUE = 3\n"
        assert not (packages / "tvm_ffi").exists(), "it is left out"
        assert b"A" not in (packages / "thing" / "code.so").read_bytes()
        assert (directory / "bin" / "thing").stat().st_mode & 0o111, name
