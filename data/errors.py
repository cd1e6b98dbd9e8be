"""What can be wrong with the data; every message is one line for the user."""


class DataError(ValueError):
    """The data cannot be used as configured: says what was found, where, and what is expected."""


class UnreadableImageError(DataError):
    """One image cannot be read; the message names its file and the reason."""
