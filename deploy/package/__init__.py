"""The package `headrace` that a wheel installs: its own modules, and what its build needs."""
