"""The simulated engine: a step takes its time but computes nothing."""
