"""What an engine reports of itself: the load of each rank, its memory, its own metrics. May import contracts."""
