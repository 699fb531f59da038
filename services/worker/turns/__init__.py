"""Models by turns: a process that decides which of a device's models are awake, as requests wait for them."""
