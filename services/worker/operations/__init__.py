"""Drain, sleep, wake, clear and LoRAs of a worker: their order, and what each of their steps does."""
