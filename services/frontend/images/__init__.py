"""Images of requests: fetched and decoded within limits, and prepared as their model's processor does."""
