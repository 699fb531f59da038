"""Keeps the index true: event streams, replays, snapshots, digests, and who comes and goes."""
