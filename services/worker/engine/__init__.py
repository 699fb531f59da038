"""The engine process: its core, its loop, and the channel to the worker's shell, which starts and supervises it.
Imports the packages scheduler and kv_connector."""
