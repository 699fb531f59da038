"""Blocks to and from the machine's kvbm. Imports the scheduler package."""
