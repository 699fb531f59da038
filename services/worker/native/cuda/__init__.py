"""The decoder on an NVIDIA GPU: CuPy for memory and launches, CUDA C++ for attention, cuBLAS for matrix products."""
