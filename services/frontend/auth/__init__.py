"""API keys: which account a request belongs to, and how much that account may use."""
