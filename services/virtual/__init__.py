"""A fleet in virtual time, of the router's, the workers' and kvbm's own parts, for `headrace plan` and benchmarks."""
