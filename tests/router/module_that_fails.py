"""A module that cannot be imported, with an error that is not an ImportError."""

raise ZeroDivisionError("a mistake in a policy")
