"""Why vLLM did not start, from the first exception that any of its processes logs, and whether another start may help.

vLLM's core and its workers are processes of their own. What ended one of them is logged there, and its parent only
learns that it is gone. So each of them notes its first logged exception as a Cause. The parent does so while it reads
the model's configuration: it has a process look at the model's class, and raises that this failed without the reason.

    the cause                                             what follows
    memory or a port that others use now, a lost device   another start, after a back-off
    a process that died and said nothing                  the same: the kernel kills where memory is short
    anything else                                         none: model and settings stay as they are
"""

from __future__ import annotations

import logging
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from services.worker.contracts.messages import Failed
from services.worker.engine.one_line import CHARACTERS

_PASSING_KINDS = {"MemoryError", "OutOfMemoryError", "DistNetworkError", "DistStoreError", "ConnectionError"}
_PASSING = re.compile(
    r"out of memory|less than requested memory|less than desired GPU memory|cannot allocate memory"
    r"|address already in use|CUDA error|busy or unavailable|NCCL error|no space left on device"
    r"|died with <Signals\.SIGKILL",
    re.IGNORECASE,
)
_SILENT = "Engine core initialization failed"
"""The beginning of what the parent says of a core that has ended."""
_UNINSPECTED = "failed to be inspected"
"""What the parent says of a model whose class could not be looked at."""
_SUBPROCESS = "Error raised in subprocess:"
"""The first line of what the parent logs of it; what that process wrote follows."""
_VALIDATION = re.compile(r"^\d+ validation errors? for \w+ (Value error, |Assertion failed, )?")
_TAIL = re.compile(r" \[type=\w+, input_value=.*$|\.? Supported architectures: .*$")
_HINTS = (
    (re.compile(r"VLLM_CPU_KVCACHE_SPACE"), "lower worker.capacity_bytes"),
    (re.compile(r"desired GPU memory|gpu_memory_utilization"), "set vllm.gpu_memory_utilization"),
    (re.compile(r"max seq len|max_model_len"), "set vllm.max_model_len"),
    (re.compile(r"deserializing header|any model weights"), "the files of worker.model are torn or missing"),
)
_DIED = re.compile(r"'[^']*': -(\d+)")
VARIABLE = "HEADRACE_VLLM_CAUSE"
"""The environment variable with the file's path; vLLM's processes inherit it."""


class Cause(Struct, frozen=True):
    """An exception of one of vLLM's processes."""

    kind: str
    """The name of its class."""
    text: str

    @staticmethod
    def of(wrong: BaseException) -> Cause:
        """Return an exception as a cause; its text is cut, since vLLM's validation may print a whole request."""
        return Cause(type(wrong).__name__, readable(_told(wrong)) or _place(wrong))


def _told(wrong: BaseException) -> str:
    """Return an exception's text; of what another process wrote its last line, or how it died if it wrote nothing."""
    text = str(wrong)
    if not text.startswith(_SUBPROCESS):
        return text
    written = text.removeprefix(_SUBPROCESS).strip()
    return written.splitlines()[-1] if written else str(wrong.__cause__ or text)


def _place(wrong: BaseException) -> str:
    """Return the line that raised an exception without a text, such as a bare assertion."""
    frames = traceback.extract_tb(wrong.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def readable(text: str) -> str:
    """Return an error's text in one line, without what pydantic adds to it, and without a list of
    all models there are."""
    line = _TAIL.sub("", _VALIDATION.sub("", " ".join(text.split())))
    return line.encode(errors="backslashreplace").decode()[:CHARACTERS]  # an undecodable path is no UTF-8


def failure(raised: Cause, noted: Cause | None) -> Failed:
    """Return what to report of a start that failed. `raised` came in vLLM's parent process; `noted` is the first
    exception of its other processes."""
    silent = raised.text.startswith(_SILENT) or raised.kind == "EngineDeadError"
    silent = silent or (_UNINSPECTED in raised.text and noted is not None)
    if silent and noted is None:
        died = _DIED.search(raised.text)
        how = f"by signal {died[1]}" if died else "without a word"
        text = f"vLLM's core ended {how} while it started; a machine that is short of memory does that"
        return Failed(reason=text)
    cause = noted if silent and noted is not None else raised
    hint = next((hint for pattern, hint in _HINTS if pattern.search(cause.text)), "")
    text = f"vLLM cannot start: {cause.kind}: {cause.text}" + (f" ({hint})" if hint else "")
    return Failed(reason=text, model=not is_passing(cause))


def explained(failed: Failed | None, noted: Cause | None) -> Failed | None:
    """Return the end of an engine that had started, with what was noted where vLLM's parent only knows that its core is
    dead."""
    if failed is None or noted is None or not failed.reason.startswith("EngineDeadError"):
        return failed
    return Failed(reason=f"vLLM's core has ended: {noted.kind}: {noted.text}")


def is_passing(cause: Cause) -> bool:
    """Return whether another start may help, although nothing is changed."""
    return cause.kind in _PASSING_KINDS or _PASSING.search(cause.text) is not None


def note_exceptions() -> Callable[[], None]:
    """From now on write the first exception that is logged as an error, of all processes with this VARIABLE. Their own
    handlers write it to standard error, among hundreds of lines; a factory of log records sees the exception itself,
    whatever handlers and formats are configured. Return what ends it."""
    path, stopped = os.environ.get(VARIABLE), threading.Event()
    if path is None:
        return stopped.set
    make = logging.getLogRecordFactory()

    def noting(*arguments: object, **named: object) -> logging.LogRecord:
        record = make(*arguments, **named)
        wrong = record.exc_info[1] if record.exc_info else None
        if record.levelno >= logging.ERROR and wrong is not None and not stopped.is_set():
            whole = Path(f"{path}.{os.getpid()}")
            with suppress(OSError):  # another one was first, or the parent has gone
                whole.write_bytes(msgspec.json.encode(Cause.of(wrong)))
                try:
                    os.link(whole, path)
                finally:
                    whole.unlink()
        return record

    logging.setLogRecordFactory(noting)
    return stopped.set


@contextmanager
def noting_exceptions() -> Iterator[None]:
    """Note exceptions as `note_exceptions` does, but only meanwhile. The factory stays: vLLM may have put one around
    it, which its formats need."""
    stop = note_exceptions()
    try:
        yield
    finally:
        stop()


def read_cause(path: Path) -> Cause | None:
    """Return what was noted. None if there is nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Cause)
    except FileNotFoundError:
        return None
