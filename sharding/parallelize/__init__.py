"""Sharding of every parameter on its mesh."""
