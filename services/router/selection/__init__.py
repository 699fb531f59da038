"""Which candidate gets a request: load, eligibility, policies, and a log of the decisions."""
