"""Norms and rotary positions by liger-kernel."""
