"""What is seen and told of a run."""
