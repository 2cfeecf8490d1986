"""Tokens to their experts and back."""
