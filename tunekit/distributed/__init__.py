"""Where a run runs: which processes there are, what they exchange, and which part of a tensor each of them has."""
