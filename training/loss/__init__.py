"""The loss, and the balance of experts."""
