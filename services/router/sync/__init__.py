"""Keeps the index in agreement with its sources: event streams, replays, snapshots, digests, and the directory."""
