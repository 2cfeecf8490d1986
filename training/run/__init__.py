"""A run of train_ep.py, from its flags to its output directory."""
