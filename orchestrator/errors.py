"""The one error a user can mend."""


class InputError(ValueError):
    """The input is wrong: one line naming the field, the value and the remedy. The command prints it and exits 2."""
