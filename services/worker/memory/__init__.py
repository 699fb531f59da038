"""The memory service: one process a machine or GPU keeps the weights that engines map, so that they outlive engines.
May import sharing."""
