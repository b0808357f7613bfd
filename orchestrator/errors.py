"""The one error a user can mend, and how a specification's error becomes one line."""

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError


class InputError(ValueError):
    """The input is wrong: one line naming the field, the value and the remedy. The command prints it and exits 2."""


def one_line(error: ValidationError) -> str:
    """The first fault of a specification: `Recipe.learning_rate: 'fast' …; remedy`."""
    fault = error.errors()[0]
    # Of a union pydantic names the member that failed, which is no field.
    where = ".".join([error.title, *(str(part) for part in fault["loc"] if part not in ("int", "str"))])
    if fault["type"] == "extra_forbidden":
        known = _fields(error.title)
        close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(known)}"
        return f"{where}: unknown field; {remedy}"
    if fault["type"] == "missing":
        return f"{where}: missing; give it a value"
    if fault["type"] == "value_error":  # our own validators: the message is complete
        return f"{where}: {fault['ctx']['error']}"
    if fault["type"] == "string_pattern_mismatch":
        return f"{where}: {shortened(repr(fault['input']))} is no name; use letters, digits and . _ + -"
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return f"{where}: {shortened(repr(fault['input']))} is refused; {message}"


def _fields(title: str) -> list[str]:
    return [name for model in BaseModel.__subclasses__() if model.__name__ == title for name in model.model_fields]


def shortened(value: Any) -> str:
    """A value as it stands in an error: 60 characters at most."""
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
