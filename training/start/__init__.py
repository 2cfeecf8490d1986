"""What is read, compared and settled before a model is made."""
