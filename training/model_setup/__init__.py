"""What is changed of a model, or of how it computes, before it trains."""
