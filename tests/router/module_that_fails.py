"""A module that cannot be imported, with an error that is not an ImportError."""

raise ZeroDivisionError("somebody's mistake")
