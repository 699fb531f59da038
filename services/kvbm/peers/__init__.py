"""Blocks between machines: a kvbm reads blocks of another machine's kvbm into its own pool."""
