"""Tensor parallelism on a CPU: the ranks of one engine, each of which computes a part of every layer."""
