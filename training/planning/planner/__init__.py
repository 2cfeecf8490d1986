"""Whether a run fits, what it sends and how long it takes: from a config, before anything is rented."""
