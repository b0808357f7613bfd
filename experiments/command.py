"""The `gridlaw` command. Imports stay inside the verbs: help answers at once, `plan` needs neither Ray nor MLflow."""

import contextlib
import errno
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text
from typer.core import TyperGroup
from typer.exceptions import TyperException

from experiments import fitting
from orchestrator.errors import InputError, shortened

if TYPE_CHECKING:
    from orchestrator.driver import Event
    from orchestrator.study import Study

ROOT = Path("studies")


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


app = typer.Typer(
    name="gridlaw",
    cls=OneLineErrors,
    help="Grids of small language models: plan them, train them, and find the laws they follow.",
    epilog="Exit codes: 0 done, 1 jobs failed, diverged or were left undone, 2 the input is wrong, nothing started; "
    "stopped by a signal 128 and its number (Ctrl-C: 130).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _as_root(root: Path) -> Path:
    """Raises InputError for what can be no folder; one that is not there yet can."""
    try:
        usable = root.is_dir() or not root.exists()
        reason = "a file, no folder"
    except OSError as error:
        usable, reason = False, error.strerror or "not usable"
    if not usable:
        raise InputError(f"--root: {shortened(root)} is no folder for studies ({reason}); give another")
    return root


def _as_tracking(uri: str | None) -> str | None:
    if uri is not None and not re.match(r"(https?|sqlite|postgresql|mysql|mssql|databricks)(\+\w+)?:", uri):
        raise InputError(
            f"--tracking-uri: {shortened(uri)!r} is no address of an MLflow store; give http://HOST:PORT or "
            f"sqlite:///PATH, or leave it out"
        )
    return uri


StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study file, or the name of a study under the root.")
]
RootOption = Annotated[Path, typer.Option("--root", help="Folder of the studies.", callback=_as_root)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
CpusOption = Annotated[int | None, typer.Option("--cpus", min=1, help="CPU cores to use; default: all usable ones.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs to use; default: all there are.")]
AddressOption = Annotated[str | None, typer.Option("--address", help="A Ray cluster; default: this machine.")]
TrackingOption = Annotated[
    str | None, typer.Option("--tracking-uri", help="An MLflow server; default: ROOT/mlflow.db.", callback=_as_tracking)
]
HoursOption = Annotated[float | None, typer.Option("--max-hours", min=0, help="Refuse above this many device hours.")]


@app.command(epilog="Example: gridlaw plan experiments/quickstart.py --json")
def plan(
    study: StudyArgument,
    root: RootOption = ROOT,
    cpus: CpusOption = None,
    gpus: GpusOption = None,
    max_hours: HoursOption = None,
    as_json: JsonOption = False,
) -> None:
    """What would run and what it costs; starts nothing."""
    with _standard_output_kept():
        from experiments import allowance, show
        from orchestrator.submit import make_plan

        loaded, _ = _study(study, root)
        made = make_plan(loaded, root, allowance.slots_of(loaded, cpus, gpus))
        document = made.as_json()
    _print(document, as_json, show.plan)
    allowance.check_limits(document, made.folder, max_hours)


@app.command(epilog="Example: gridlaw run experiments/quickstart.py --cpus 2")
def run(
    study: StudyArgument,
    root: RootOption = ROOT,
    address: AddressOption = None,
    cpus: CpusOption = None,
    gpus: GpusOption = None,
    tracking_uri: TrackingOption = None,
    max_hours: HoursOption = None,
    as_json: JsonOption = False,
) -> None:
    """Runs what is missing, then writes results and report. Ctrl-C is safe; run again to go on."""
    started = time.time()
    console = Console(stderr=True, highlight=False)
    with _standard_output_kept():
        from experiments import allowance
        from experiments import status as standing
        from orchestrator.fleet import FleetOptions
        from orchestrator.submit import make_plan, submit

        loaded, source = _study(study, root)
        here = address is None  # what a cluster has is known once it is joined
        made = make_plan(loaded, root, allowance.slots_of(loaded, cpus, gpus) if here else gpus or cpus or 1)
        planned = made.as_json()
        allowance.check_limits(planned, made.folder, max_hours)

        def look() -> dict[str, Any]:
            return standing.read(loaded.name, made.folder, planned["cells"])

        live = console.is_terminal and bool(made.jobs)
        with standing.following(look, console) if live else contextlib.nullcontext():
            submission = submit(
                made,
                source,
                FleetOptions(cpus, allowance.gpus_of(gpus) if here else gpus, address, loaded.machine.threads),
                tracking_uri=tracking_uri,
                on_event=lambda event: _tell(event, look, console, live),
                started=started,
            )
        if submission.waiting and submission.waiting.points:
            text = (
                f"{submission.waiting.points} points wait for MLflow ({submission.waiting.reason}); run again to send"
            )
            console.print(Text(text, style="yellow"), soft_wrap=True)
        stopped = submission.result is not None and submission.result.stopped_by is not None
        for cause in submission.result.causes if submission.result else []:
            console.print(Text(cause, style="red"), soft_wrap=True)
        written = None if stopped else _write_report(loaded.name, root, console)
        if written and submission.ran:
            _track_report(written, loaded.name, root, tracking_uri, console)
    document = look() | {"report": written and str(written)}
    if as_json:
        typer.echo(json.dumps(document, allow_nan=False))
    elif written:
        if not submission.ran:
            console.print(f"all {len(planned['cells'])} cells are there: nothing was run", soft_wrap=True)
        found, view = _fit_study(loaded.name, root, next_study=False)
        _print(found, False, view)
        typer.echo(f"report: {written}")
    if stopped:
        console.print(f"stopped; go on with: gridlaw run {study}", soft_wrap=True)
    code = submission.result.exit_code if submission.result else 0
    raise typer.Exit(code or int(set(document["counts"]) != {"finished"}))


@app.command(epilog="Example: gridlaw status quickstart --watch")
def status(
    study: StudyArgument,
    root: RootOption = ROOT,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing, until all is done or Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Where each cell stands, why, and the time left."""
    with _standard_output_kept():
        from experiments import show
        from experiments import status as standing

        name, folder, cells = _cells(study, root)

    def look() -> dict[str, Any]:
        return standing.read(name, folder, cells)

    if watch and not as_json:
        standing.watch(look, Console(stderr=True))
    else:
        _print(look(), as_json, lambda document: show.status(document, height=len(cells) + 20))


@app.command(epilog="Example: gridlaw fit quickstart --json, or gridlaw fit runs.csv --n params --d tokens --loss loss")
def fit(
    source: Annotated[
        str, typer.Argument(metavar="STUDY|TABLE", help="A study, or a CSV, TSV, Parquet or JSONL table.")
    ],
    root: RootOption = ROOT,
    law: fitting.LawOption = fitting.CHINCHILLA,
    n: fitting.NOption = None,
    d: fitting.DOption = None,
    loss: fitting.LossOption = None,
    log: fitting.LogOption = False,
    flops: fitting.FlopsOption = None,
    tokens: fitting.TokensOption = None,
    value: fitting.ValueOption = None,
    group: fitting.GroupOption = None,
    seed: fitting.SeedOption = None,
    run: fitting.RunOption = None,
    bootstrap: fitting.BootstrapOption = fitting.RESIDUAL,
    replicates: fitting.ReplicatesOption = 400,
    holdout: fitting.HoldoutOption = None,
    exclude: fitting.ExcludeOption = None,
    drop_bad: fitting.DropBadOption = False,
    alpha: fitting.AlphaOption = "0.001,3",
    beta: fitting.BetaOption = "0.001,3",
    predict: fitting.PredictOption = None,
    chance: fitting.ChanceOption = None,
    level: fitting.LevelOption = None,
    answers: fitting.AnswersOption = None,
    reference: fitting.ReferenceOption = None,
    margin: fitting.MarginOption = 0.05,
    figures: fitting.FiguresOption = None,
    next_study: fitting.NextOption = False,
    as_json: JsonOption = False,
) -> None:
    """When a capability emerges and what law loss follows, with intervals: of a study, or of anybody's table."""
    options = dict(locals())
    with _standard_output_kept():
        from analysis import foreign
        from experiments import show_laws

        if foreign.is_table(source):
            document = fitting.table(Path(source), law.value, options, figures)
            view: Callable[[Any], RenderableType] = show_laws.table
            for line in document["said"]:
                typer.echo(line, err=True)
        else:
            document, view = _fit_study(_name(source, root), root, next_study, fitting.ahead_of(predict))
    _print(document, as_json, view)


def _fit_study(
    name: str, root: Path, next_study: bool, ahead: float | None = None
) -> tuple[dict[str, Any], Callable[[Any], RenderableType]]:
    from analysis import findings
    from analysis.results import collect
    from experiments import show, show_laws

    results = collect(root, name)
    fitted = findings.fit_results(results, ahead)
    if next_study:
        from analysis import next_study as design

        return design.proposals(fitted), show_laws.proposals
    return findings.as_json(fitted), lambda document: Group(
        show.findings(document), show_laws.law_lines(document["scaling"]), show_laws.size_lines(document["t50_by_size"])
    )


@app.command(epilog="Example: gridlaw report quickstart")
def report(study: StudyArgument, root: RootOption = ROOT, as_json: JsonOption = False) -> None:
    """Writes report.html, figures and tables."""
    with _standard_output_kept():
        from analysis import report as reporting

        written = reporting.write(root, _name(study, root))
    _print({"report": str(written)}, as_json, lambda document: document["report"])


@app.command(epilog="Example: gridlaw ui --port 5001")
def ui(
    root: RootOption = ROOT,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The first port tried.")] = 5000,
    host: Annotated[str, typer.Option("--host", help="The address listened on.")] = "127.0.0.1",
) -> None:
    """The MLflow UI on the studies' store, until Ctrl-C."""
    from experiments.ui import serve

    serve(root, port, host)


@app.command(epilog='Example: gridlaw export quickstart "swa-8 seed 0" exported')
def export(
    study: StudyArgument,
    cell: Annotated[str, typer.Argument(metavar="CELL", help='A cell\'s id, or words: "swa-8 seed 0".')],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What is written; not there yet, or empty.")],
    root: RootOption = ROOT,
    step: Annotated[int | None, typer.Option("--step", min=1, help="A kept checkpoint; default: the last.")] = None,
    as_json: JsonOption = False,
) -> None:
    """A cell's weights in a folder that transformers loads."""
    with _standard_output_kept():
        from experiments import export as exporting
        from orchestrator.plan import stored_document

        name = _name(study, root)
        document = exporting.export(root / name, stored_document(root, name)["cells"], cell, folder, step)
    _print(document, as_json, exporting.show)


@app.command(epilog="Example: gridlaw doctor --root /data/studies")
def doctor(root: RootOption = ROOT, as_json: JsonOption = False) -> None:
    """What this machine has: devices, kernels, compiler, ports, disk."""
    with _standard_output_kept():
        from experiments import doctor as examination

        document = examination.examine(root)
    _print(document, as_json, examination.show)


def main() -> None:
    """The `gridlaw` command."""
    app(prog_name="gridlaw")


@contextlib.contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Standard output is for results: what libraries print meanwhile goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _print(document: dict[str, Any], as_json: bool, view: Callable[[dict[str, Any]], RenderableType]) -> None:
    if as_json:
        typer.echo(json.dumps(document, allow_nan=False))
    else:
        # A pipe has no width: nothing is cut there.
        Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(view(document), soft_wrap=True)


def _tell(event: "Event", look: Callable[[], dict[str, Any]], console: Console, live: bool) -> None:
    """A line for what happened; beside a live table only for what the table does not show."""
    if live and event.kind in ("started", "finished"):
        return
    from experiments import show

    console.print(Text(show.event(event.kind, event.job_id, event.text, look())), soft_wrap=True)


def _write_report(name: str, root: Path, console: Console) -> Path | None:
    """Results and report of a study; None, and a line why, where there is nothing to report on yet."""
    from analysis import report as reporting

    try:
        return reporting.write(root, name)
    except InputError as error:
        console.print(Text(f"no report: {error}", style="yellow"), soft_wrap=True)
        return None


def _track_report(written: Path, name: str, root: Path, tracking_uri: str | None, console: Console) -> None:
    from orchestrator.tracking import log_report

    reason = log_report(root, name, written.parent, tracking_uri)
    if reason:
        console.print(Text(f"the report is not in MLflow: {reason}", style="yellow"), soft_wrap=True)


def _is_file(study: str) -> bool:
    return study.endswith(".py") or Path(study).is_file()


def _study(study: str, root: Path) -> "tuple[Study, Path]":
    """A study and its file: the file given, or the one a study under the root was made from."""
    from orchestrator.plan import stored_document
    from orchestrator.study import load

    if _is_file(study):
        return load(Path(study)), Path(study).resolve()
    source = Path(stored_document(root, study)["source"])
    if not source.is_file():
        raise InputError(f"study: {study} was made from {source}, which is gone; give the study file")
    return load(source), source


def _name(study: str, root: Path) -> str:
    """The name of a study that has been run under the root."""
    from orchestrator.plan import stored_document

    name = _study(study, root)[0].name if _is_file(study) else study
    stored_document(root, name)
    return name


def _cells(study: str, root: Path) -> tuple[str, Path, list[dict[str, Any]]]:
    """(name, folder, rows of the cells): of the study file where one is given, else of study.json."""
    from orchestrator.plan import stored_document
    from orchestrator.submit import make_plan

    if not _is_file(study):
        return study, root / study, stored_document(root, study)["cells"]

    made = make_plan(_study(study, root)[0], root, slots=1)
    return made.study.name, made.folder, made.as_json()["cells"]


if __name__ == "__main__":
    main()
