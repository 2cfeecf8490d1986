"""What has to be known of a family by its name, each with the reason: all else is read from transformers' modules."""

UNSUPPORTED = {
    "inkling2_text": "its checkpoints hold the shared experts' gate and up by turns, within what is one row here",
}
"""Families whose results tests/families finds to differ from those of transformers' own class, and why."""
