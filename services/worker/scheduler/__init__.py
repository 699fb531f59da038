"""What the next step computes: the scheduler over sequences and the KV cache manager. Imports no other package of the
worker."""
