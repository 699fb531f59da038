"""The limits of compiling one grammar. Apart from the program, so that no frontend loads its library. Pure."""

CPU_LIMIT_S = 0.5
"""Seconds of processor time."""
MEMORY_LIMIT_BYTES = 512 << 20
"""Bytes of address space; Python and the library take 150 MB of it."""
