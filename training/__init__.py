"""Configuration, data, optimizer, loop and log of a training run."""
