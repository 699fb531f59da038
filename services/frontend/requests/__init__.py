"""The life of a request on the bus: worker selection, attempts, retries, deadlines, streams."""
