"""Hugging Face form."""
