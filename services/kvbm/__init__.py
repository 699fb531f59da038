"""The machine's block store."""
