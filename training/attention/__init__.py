"""Attention in packed, windowed and context-parallel sequences."""
