"""Every test of tests/gpu gives its device memory back, for the processes that later tests start. All share compiled
kernels. The end of a run with a GPU shows which files take how long."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest

from services.worker.native.prepare import prepare
from tests.gpu.device import missing

SMOLLM2 = Path(__file__).parents[2] / ".headrace" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BLAS_THREADS = 4
SHOWN_S = 5.0
"""Seconds: a file that takes less is not shown."""


@pytest.fixture(scope="session", autouse=True)
def this_process_is_quick() -> None:
    """Keep modules out of collections, as with transformers each would take as long as a small test. Let NumPy multiply
    the references' small matrices with few threads: those of all cores would mostly wait for each other."""
    if missing():
        return
    gc.collect()
    gc.freeze()
    for library in (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*.so"):
        ctypes.CDLL(str(library)).scipy_openblas_set_num_threads64_(BLAS_THREADS)


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled_once() -> Iterator[None]:
    """Let engine processes find the kernels that others have compiled: a test's own cache of models is empty."""
    with pytest.MonkeyPatch.context() as patched:
        here = Path("~/.cupy/kernel_cache").expanduser()  # CuPy's own choice, for this process
        patched.setenv("CUPY_CACHE_DIR", os.environ.get("CUPY_CACHE_DIR", str(here)))
        yield


@pytest.fixture(autouse=True)
def device_memory_is_given_back() -> Iterator[None]:
    """Collect what the test made: runners, arrays and allocators refer to each other. Make the first GPU the thread's
    own again."""
    yield
    if missing():
        return
    gc.collect()
    import cupy  # pyright: ignore[reportMissingImports]

    cupy.cuda.Device(0).use()
    cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M-Instruct as a directory of float32 weights; skip the test if it was not fetched."""
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2} is not there")
    return prepare(SMOLLM2, tmp_path_factory.mktemp("smollm2"), lambda _loading: None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each file of this directory, the slowest first."""
    if missing():
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.nodeid.startswith("tests/gpu/"):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    for file, took_s in sorted(seconds.items(), key=itemgetter(1), reverse=True):
        if took_s >= SHOWN_S:
            terminalreporter.write_line(f"{took_s:6.1f} s  {file}")
