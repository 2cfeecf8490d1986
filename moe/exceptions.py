"""What has to be known of a family by its name, each with the reason: all else is read from transformers' modules."""

FORECAST = frozenset({"mixtral"})
"""The planner's formulas were derived by hand from the layers of these: attention by grouped queries, a router and
SwiGLU experts in every layer, and nothing beside them. Of any other family it would forecast too little."""

UNSUPPORTED = {
    "inkling2_text": "its checkpoints hold the shared experts' gate and up by turns, within what is one row here",
}
"""Families that tests/families finds not to come out as from transformers' own class, and why."""
