"""What has to be known of a family by its name, each with the reason: all else is read from transformers' modules."""

UNSUPPORTED = {
    "inkling2_text": "its checkpoints hold the shared experts' gate and up by turns, within what is one row here",
}
"""Families that tests/families finds not to come out as from transformers' own class, and why."""
