"""Blocks to and from the machine's kvbm: what is stored, fetched and given back."""
