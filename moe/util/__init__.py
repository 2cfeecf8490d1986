"""Code shared by all folders."""
