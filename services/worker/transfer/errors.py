"""What the device refuses, in our words; CUDA's own errors end where these begin. Pure.

HeadraceError
├── DeviceFailed           a call of CUDA's failed; nothing more is known than its text
├── DeviceMemoryExhausted  no room on the device, also after unused memory was given back
└── PinRefused             host memory cannot be registered: it is copied all the same, only slower
"""

from __future__ import annotations

from shared.errors import HeadraceError

REASON_CHARS = 60


class DeviceFailed(HeadraceError):
    """The message is CUDA's: the error's name, a colon, and what it says."""

    @property
    def reason(self) -> str:
        """The error's name."""
        return str(self).partition(":")[0][:REASON_CHARS]


class DeviceMemoryExhausted(HeadraceError):
    """`asked_bytes` beside `reserved_bytes` that the pool has, of which `used_bytes` are in use."""

    def __init__(self, asked_bytes: int, used_bytes: int, reserved_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{asked_bytes} bytes asked of a device with {free_bytes} free; the pool has {reserved_bytes},"
            f" of which {used_bytes} are in use"
        )
        self.asked_bytes = asked_bytes
        self.used_bytes = used_bytes
        self.reserved_bytes = reserved_bytes
        self.free_bytes = free_bytes


class PinRefused(HeadraceError):
    """The message is CUDA's."""
