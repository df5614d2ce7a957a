"""What a command says, where, and with which exit code; the same for `kvdir` and `peer-agent`.

Rules: stdout carries the answer and nothing else: tables for people, or exactly one JSON document with --output json. Errors,
notes and progress go to stderr. Progress is drawn only on a terminal or when asked for. NO_COLOR is honoured.
Errors of the kvdir tree become "error: ..." and an exit code in one place, `exit_for`; anything else is a bug and keeps its
traceback. Does not: know any command.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import click
import msgspec

from kvdir.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    KvdirError,
    NamespaceError,
    NoSpace,
    Unavailable,
    UntrustedView,
)

F = TypeVar("F", bound=Callable[..., Any])
Rows = Iterable[Sequence[object]]

EMITTED = "kvdir.emitted"
OUTPUT = "kvdir.output"
PLAIN_WIDTH = 160
"""Columns of a table that does not go to a terminal, so that pipes and logs are not cut at 80."""


class Exit(enum.IntEnum):
    """Exit codes of both programs; listed at the end of --help."""

    OK = 0
    FAILED = 1
    USAGE = 2
    START = 3
    UNREACHABLE = 4
    UNTRUSTED = 5


EXIT_CODES_HELP = (
    "\b\nExit codes: 0 ok, 1 failed, 2 usage, 3 could not start, 4 unreachable,\n5 refused because a figure is not trusted."
)


class CommandFailed(KvdirError):
    """A command that ends with a chosen exit code and code slug. Message as for every error: what, and the fix."""

    code = "failed"

    def __init__(self, message: str, *, exit: Exit = Exit.FAILED, slug: str = "failed") -> None:
        super().__init__(message)
        self.exit = exit
        self.slug = slug


def exit_for(error: KvdirError) -> Exit:
    """The exit code of an error that ended a command."""
    match error:
        case CommandFailed():
            return error.exit
        case ConfigError() | NoSpace():
            return Exit.START
        case Unavailable() | DeadlineExceeded():
            return Exit.UNREACHABLE
        case UntrustedView():
            return Exit.UNTRUSTED
        case InvalidInput() | NamespaceError():
            return Exit.USAGE
    return Exit.FAILED


def output_option(function: F) -> F:
    """Adds --output table|json; the command receives `output` and hands it to `emit`."""
    option = click.option(
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        is_eager=True,
        callback=_remember_output,
        help="A table for people, or exactly one JSON document on stdout for programs.",
    )
    return option(function)


def progress_option(function: F) -> F:
    """Adds --progress/--no-progress; the command receives `progress` (None: on a terminal only)."""
    option = click.option("--progress/--no-progress", default=None, help="Draw progress on stderr. [default: on a terminal]")
    return option(function)


def emit(document: object, view: Callable[[], object], *, output: str) -> None:
    """Prints the answer: `document` as one JSON line, or what `view` builds (anything rich can draw).

    Call it once per command run. `document`: mappings, lists, dataclasses, msgspec Structs; bytes become base64.
    """
    if output == "json":
        _mark_emitted()
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    else:
        _console(sys.stdout).print(view())
    sys.stdout.flush()


def emit_items(items: Iterable[Mapping[str, Any]], *, key: str, line: Callable[[Any], str], output: str) -> None:
    """Prints an answer too large to hold: one document {key: [items...]}, or one `line(item)` each.

    Nothing is written before the first item is there. An error later on closes the document, so that it stays one, as
    {key: [items so far...], "error": "..."}, and is raised.
    """
    iterator = iter(items)
    item = next(iterator, None)
    if output == "table":
        while item is not None:
            click.echo(line(item))
            item = next(iterator, None)
        return
    _mark_emitted()
    write = sys.stdout.write
    write(f'{{"{key}":[')
    try:
        separator = ""
        while item is not None:
            write(separator + msgspec.json.encode(item).decode())
            separator = ","
            item = next(iterator, None)
    except KvdirError as error:
        write(f'],"error":{msgspec.json.encode(str(error)).decode()}}}\n')
        raise
    else:
        write("]}\n")
    finally:
        sys.stdout.flush()


def note(text: str) -> None:
    """One line for people, on stderr."""
    click.echo(text, err=True)


def table(columns: Sequence[str], rows: Rows, *, title: str = "", caption: str = "") -> object:
    """A table; columns whose name ends with " #" hold figures and stand right-aligned (the mark is not shown)."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = Table(title=title or None, caption=caption or None, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for column in columns:
        right = column.endswith(" #")
        out.add_column(column.removesuffix(" #"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        out.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return out


def facts(pairs: Mapping[str, object] | Iterable[tuple[str, object]], *, title: str = "") -> object:
    """A two-column table of names and values."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = Table(title=title or None, box=box.SIMPLE, show_header=False, title_justify="left")
    out.add_column(style="bold")
    out.add_column(overflow="fold")
    for name, value in pairs.items() if isinstance(pairs, Mapping) else pairs:
        out.add_row(name, value if isinstance(value, Text) else Text(str(value)))
    return out


def stack(*parts: object) -> object:
    """Several tables, one below the other."""
    from rich.console import Group

    return Group(*parts)  # type: ignore[arg-type]


@contextlib.contextmanager
def progress_bar(description: str, total: float, *, show: bool | None = None) -> Iterator[Callable[..., None]]:
    """Yields `advance(n=1, text=None)`. Draws on stderr if `show`, or if it is None and stderr is a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda n=1.0, text=None: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance(n: float = 1.0, text: str | None = None) -> None:
            bar.update(task, advance=n, description=text or description)

        yield advance


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Errors inside mean that a daemon could not start: exit code 3. OSError is included, with its own words."""
    try:
        yield
    except (KvdirError, OSError) as error:
        slug = error.code if isinstance(error, KvdirError) else "os"
        raise CommandFailed(f"{what} cannot start: {error}", exit=Exit.START, slug=slug) from error


@contextlib.contextmanager
def errors_to_exit(context: click.Context) -> Iterator[None]:
    """Turns an error of the kvdir tree into its message and exit code; used by the two programs around every command."""
    try:
        yield
    except KvdirError as error:
        report_error(error, output=context.meta.get(OUTPUT, "table"), emitted=context.meta.get(EMITTED, False))
        context.exit(exit_for(error))


def report_error(error: KvdirError, *, output: str, emitted: bool) -> None:
    """The error on stderr; with --output json also as the one document on stdout, unless there has been one already."""
    click.echo(f"{_red('error:')} {error}", err=True)
    if output == "json" and not emitted:
        slug = error.slug if isinstance(error, CommandFailed) else error.code
        document = {"error": str(error), "code": slug, "retriable": error.retriable, "exit": int(exit_for(error))}
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        sys.stdout.flush()


def _mark_emitted() -> None:
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[EMITTED] = True


def _red(text: str) -> str:
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        return text
    return click.style(text, fg="red", bold=True)


def _remember_output(context: click.Context, _: click.Parameter, value: str) -> str:
    context.meta[OUTPUT] = value
    return value


def _console(stream: Any) -> Any:
    from rich.console import Console

    terminal = stream.isatty()
    width = None if terminal or os.environ.get("COLUMNS") else PLAIN_WIDTH
    colours: Any = None if os.environ.get("NO_COLOR") or not terminal else "auto"
    return Console(file=stream, width=width, color_system=colours, highlight=False)
