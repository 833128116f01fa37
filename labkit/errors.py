"""The errors that a user can fix."""


class UserError(ValueError):
    """Bad input. The message names the value and the way out; the CLI prints it by itself."""


class NotThisMachine(UserError):
    """The input is fine, but this machine lacks what it needs (a GPU, a driver, a program)."""
