"""What a setting moves, which decides of all that is kept or resumed whether it still holds (see
`training.start.fingerprints`)."""

from enum import Flag, auto


class Moves(Flag):
    """What differs between two runs that differ in one setting; all else is as it was."""

    NOTHING = 0
    """What is written, shown or checked."""
    SPEED = auto()
    """How fast it is, and in how much memory: values differ by rounding at most."""
    PRECISION = auto()
    """Every computed value, by more than rounding."""
    MODEL = auto()
    """The model before its first step."""
    SAMPLES = auto()
    """The data, as tokenized samples."""
    BATCHES = auto()
    """The data that each step sees."""
    OBJECTIVE = auto()
    """What is minimised."""
    TEACHER = auto()
    """What the teacher predicts."""
    STATE = auto()
    """Which parameters are trained, or what the optimizer's state means."""
    UPDATES = auto()
    """What becomes of gradients, and how many steps there are."""
    EXPORT = auto()
    """What an export of the trained model contains."""
