"""Token ids to text: detokenizing, stop strings, log-probabilities, thinking and tool calls."""
