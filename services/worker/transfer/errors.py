"""Errors of a device. CUDA's own errors are translated to these and go no further. Pure.

HeadraceError
├── DeviceFailed           a CUDA call failed; the message is all that is known
├── DeviceMemoryExhausted  the device has no room, even after unused memory was given back
└── PinRefused             host memory cannot be pinned; it is still copied, but more slowly
"""

from __future__ import annotations

from shared.errors import HeadraceError

REASON_CHARS = 60
"""The longest reason, in characters; a reason is a metric's label."""


class DeviceFailed(HeadraceError):
    """A CUDA call failed. The message is CUDA's: the error's name, a colon, and its text."""

    @property
    def reason(self) -> str:
        """The error's name, cut to REASON_CHARS."""
        return str(self).partition(":")[0][:REASON_CHARS]


class DeviceMemoryExhausted(HeadraceError):
    """The device has no room for `asked_bytes`. Its pool has `reserved_bytes`, of which `used_bytes` are in use."""

    def __init__(self, asked_bytes: int, used_bytes: int, reserved_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"no room for {asked_bytes} bytes on a device with {free_bytes} bytes free; the pool has {reserved_bytes},"
            f" of which {used_bytes} are in use"
        )
        self.asked_bytes = asked_bytes
        self.used_bytes = used_bytes
        self.reserved_bytes = reserved_bytes
        self.free_bytes = free_bytes


class PinRefused(HeadraceError):
    """Host memory cannot be pinned. The message is CUDA's."""
