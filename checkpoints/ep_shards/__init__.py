"""EP shards, and offline conversion."""
