"""What a training step needs, found without running it for real."""
