"""Blocks of another process's device memory: what it lends, its mapping here, and copies from it to one's own blocks."""
