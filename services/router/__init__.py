"""The router: who caches what, who is how busy, and therefore who gets the next request."""
