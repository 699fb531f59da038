"""Blocks of another process's device memory: lending them, mapping them, and copying them to one's own blocks."""
