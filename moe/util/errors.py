"""The one exception for mistakes that a user can fix: a bad flag, file or tensor."""


class ExpertMeshError(ValueError):
    """Bad input. The message names the flag, file or tensor, what was found, and what would work.

    Example:
        try:
            expertmesh.load("/nowhere")
        except expertmesh.ExpertMeshError as error:
            print(error)
    """
