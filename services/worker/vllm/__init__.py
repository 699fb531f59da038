"""vLLM as the engine: a program that runs with the Python of vLLM's own environment."""
