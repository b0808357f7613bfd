"""What goes wrong in the command, said in one line."""

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from orchestrator.errors import InputError


class OneLineErrors(TyperGroup):
    """A wrong input or a wrong word ends in one line on standard error and exit code 2."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    code = 2
    try:
        yield
    except InputError as error:
        message = str(error)
    except TyperException as error:
        message = getattr(error, "format_message", error.__str__)()
        if "\n" in message:  # the help, where no verb was given
            raise
        message = f"{message.rstrip('.')}; see gridlaw --help"
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader has left: no fault
            raise
        message, code = f"{error.filename or 'output'}: {error.strerror}; make room for it and try again", 1
    else:
        return
    typer.echo(f"gridlaw: {' '.join(message.split())}", err=True)
    raise typer.Exit(code) from None
