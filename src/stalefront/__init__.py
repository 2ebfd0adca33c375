"""Maps how much staleness an LLM reinforcement-learning run survives at which learning rate."""
