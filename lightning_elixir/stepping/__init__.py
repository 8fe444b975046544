"""What a step does to the chunks of an engine: gradients, updates, states. Knows engines, and no user's optimizer."""
