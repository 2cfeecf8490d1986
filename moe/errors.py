"""The one exception for mistakes a user can mend: a flag, a file or a tensor that will not do."""


class ExpertMeshError(ValueError):
    """Bad input. The message names the flag, file or tensor, what was found, and what would do."""
