"""Where this rank's shards live."""
