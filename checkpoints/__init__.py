"""Bytes on disk: reading Hugging Face checkpoints into shards and writing them back."""
