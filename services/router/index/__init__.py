"""Which candidates cache which blocks: KV events in, overlaps of a prompt out."""
