"""What goes wrong on the device, in the engine's words.

at start    no room                 ModelError: starting again will not help, and what will is said
            anything else           as it is: the engine may be started again
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
    """Raises ModelError where the device has no room for `what`."""
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
    """A DeviceFailed is CUDA's error in our words."""
    if isinstance(wrong, DeviceMemoryExhausted):
        return True
    return any(getattr(each, "status", None) == OUT_OF_MEMORY for each in (wrong, wrong.__cause__))


@contextmanager
def device_errors_as_model_error() -> Iterator[None]:
    """Raises ModelError where the device fails."""
    try:
        yield
    except _FAILURES as wrong:
        raise ModelError(f"the GPU failed: {wrong}") from wrong
