"""Which parallel groups a cluster has and whether they work; which models can be trained."""
