"""What the next step computes: sequences, the step budget, and the blocks that sequences wait for or offer."""
