"""A model as a run trains it: how it is assembled, and what is done with it."""
