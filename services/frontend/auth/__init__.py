"""API keys: whose request it is, and how much its account may have."""
