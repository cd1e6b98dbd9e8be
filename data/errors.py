"""Errors in the data. Every message is one line for the user."""


class DataError(ValueError):
    """The data cannot be used; the message says what was found, where, and what is expected."""


class UnreadableImageError(DataError):
    """One image cannot be read; the message names its file and the reason."""
