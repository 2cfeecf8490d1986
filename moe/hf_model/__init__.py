"""Building a family's model, and reading facts from it."""
