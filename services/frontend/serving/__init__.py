"""One module for each operation: from a checked request body to the reply."""
