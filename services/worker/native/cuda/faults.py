"""Translates errors of the device into errors of the engine.

at start    no room                 ModelError: a restart will not help, so the message says what does
            anything else           unchanged: the engine may be started again
in a step   anything                ModelError: the engine ends and is started again
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.worker.transfer.cuda import ERRORS, OUT_OF_MEMORY
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted
from shared.errors import ModelError

_FAILURES: tuple[type[Exception], ...] = (*ERRORS, DeviceMemoryExhausted, DeviceFailed)


@contextmanager
def no_room_as_model_error(model: str, what: str) -> Iterator[None]:
    """Raise ModelError if the device has no room for `what`."""
    try:
        yield
    except _FAILURES as wrong:
        if not _says_no_room(wrong):
            raise
        raise ModelError(
            f"{model}: the GPU has no room for {what}: {wrong}; lower cuda.memory_share or capacity_bytes, free the"
            " GPU, or serve a smaller model"
        ) from wrong


def _says_no_room(wrong: Exception) -> bool:
    """Say whether an error, or the CUDA error that a DeviceFailed translates, means that there is no room."""
    if isinstance(wrong, DeviceMemoryExhausted):
        return True
    return any(getattr(each, "status", None) == OUT_OF_MEMORY for each in (wrong, wrong.__cause__))


@contextmanager
def device_errors_as_model_error() -> Iterator[None]:
    """Raise ModelError if the device fails."""
    try:
        yield
    except _FAILURES as wrong:
        raise ModelError(f"the GPU failed: {wrong}") from wrong
