"""The HTTP and NATS face: templates, tokens, deadlines, streams."""
