"""Chooses the candidate for a request: caches, load, eligibility, policies, and a log of the decisions."""
