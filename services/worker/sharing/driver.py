"""CUDA's driver calls for memory that other processes can map, through ctypes."""

from __future__ import annotations

import ctypes

from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted

READ, READ_AND_WRITE = 1, 3
"""Flags of a mapping: the driver's CUmemAccess_flags."""
_PINNED, _ON_DEVICE, _POSIX_DESCRIPTOR = 1, 1, 1
_TAKES_POSIX_DESCRIPTORS = 103
"""The driver's CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    """The driver's struct CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The driver's struct CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """The driver's struct CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_WORD = ctypes.c_size_t
_LONG = ctypes.c_ulonglong
_SIGNATURES = {
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.c_void_p, ctypes.c_int),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_WORD), ctypes.POINTER(_Properties), ctypes.c_int),
    "cuMemCreate": (ctypes.POINTER(_LONG), _WORD, ctypes.POINTER(_Properties), _LONG),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _LONG, ctypes.c_int, _LONG),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(_LONG), ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_LONG), _WORD, _WORD, _LONG, _LONG),
    "cuMemMap": (_LONG, _WORD, _WORD, _LONG, _LONG),
    "cuMemSetAccess": (_LONG, _WORD, ctypes.POINTER(_Access), _WORD),
    "cuMemUnmap": (_LONG, _WORD),
    "cuMemRelease": (_LONG,),
    "cuMemAddressFree": (_LONG, _WORD),
}


class Driver:
    """The calls. The caller's thread has a current device."""

    def __init__(self) -> None:
        """Look the functions up. Raise DeviceFailed if the driver does not have them."""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._driver, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
        except (OSError, AttributeError) as wrong:
            raise DeviceFailed(f"no memory for other processes: {wrong}") from wrong

    def uuid(self, device: int) -> str:
        """Return the UUID of a GPU, in hex."""
        uuid = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return uuid.raw.hex()

    def check_descriptors(self, device: int) -> None:
        """Raise DeviceFailed if no descriptor can stand for memory of this GPU, as in WSL and with some vGPUs."""
        takes = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(takes), _TAKES_POSIX_DESCRIPTORS, device)
        if not takes.value:
            raise DeviceFailed(f"GPU {device} has no memory that a POSIX descriptor can stand for")

    def granularity(self, device: int) -> int:
        """Return the number of bytes of which sizes must be multiples."""
        size = _WORD()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(_properties(device)), 0)
        return size.value

    def create(self, size_bytes: int, device: int) -> int:
        """Allocate memory; return its handle. Raise DeviceMemoryExhausted."""
        handle = _LONG()
        try:
            self._call("cuMemCreate", ctypes.byref(handle), size_bytes, ctypes.byref(_properties(device)), 0)
        except _OutOfMemory as wrong:
            raise DeviceMemoryExhausted(size_bytes, 0, 0, 0) from wrong
        return handle.value

    def export(self, handle: int) -> int:
        """Return a new descriptor that stands for the memory."""
        descriptor = ctypes.c_int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_DESCRIPTOR, 0)
        return descriptor.value

    def import_(self, descriptor: int) -> int:
        """Return a handle of the memory that a descriptor stands for."""
        handle = _LONG()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _POSIX_DESCRIPTOR)
        return handle.value

    def map(self, handle: int, size_bytes: int, device: int, access: int) -> int:
        """Map memory at an address of its own, for one device; return the address."""
        address = _LONG()
        self._call("cuMemAddressReserve", ctypes.byref(address), size_bytes, 0, 0, 0)
        try:
            self._call("cuMemMap", address.value, size_bytes, 0, handle, 0)
        except DeviceFailed:
            self._call("cuMemAddressFree", address.value, size_bytes)
            raise
        try:
            self.set_access(address.value, size_bytes, device, access)
        except DeviceFailed:
            self.unmap(address.value, size_bytes)
            raise
        return address.value

    def set_access(self, address: int, size_bytes: int, device: int, access: int) -> None:
        """Say what one device may do with memory that is mapped. All work on it has ended."""
        wanted = _Access(_Location(_ON_DEVICE, device), access)
        self._call("cuMemSetAccess", address, size_bytes, ctypes.byref(wanted), 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)
        self._call("cuMemAddressFree", address, size_bytes)

    def release(self, handle: int) -> None:
        """Let go of a handle; the memory lives on where it is mapped, and in its descriptors."""
        self._call("cuMemRelease", handle)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise _OutOfMemory(f"CUDA_ERROR_OUT_OF_MEMORY: {name}")
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DeviceFailed(f"{(text.value or b'CUDA error').decode()}: {name} failed with status {code}")


class _OutOfMemory(DeviceFailed):
    """The driver's error CUDA_ERROR_OUT_OF_MEMORY."""


def _properties(device: int) -> _Properties:
    return _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_ON_DEVICE, device))
