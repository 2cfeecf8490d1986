"""How experts are computed."""
