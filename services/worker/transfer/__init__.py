"""Copies between the GPU and the pool of its machine's kvbm, and the device memory that they need."""
