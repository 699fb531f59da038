"""Chooses the worker: who caches what, how loaded each is, and why."""
