"""One layer's experts."""
