"""Chooses the candidate for a request: load, eligibility, policies, and a log of the decisions."""
