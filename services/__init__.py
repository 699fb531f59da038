"""The four services; each imports `shared` and never another service."""
