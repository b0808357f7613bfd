"""The `gridlaw` command. Imports stay inside the verbs: help answers at once, `plan` needs neither Ray nor MLflow."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from orchestrator.errors import InputError

if TYPE_CHECKING:
    from orchestrator.plan import Plan
    from orchestrator.study import Study


class OneLineErrors(TyperGroup):
    """A wrong input ends in one line on standard error and exit code 2."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            typer.echo(f"gridlaw: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="gridlaw",
    cls=OneLineErrors,
    help="Grids of small language models: plan them, train them, and find the laws they follow.",
    epilog="Exit codes: 0 done, 1 jobs failed, diverged or were left undone, 2 the input is wrong, nothing was started.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study file, or the name of a study under the root.")
]
RootOption = Annotated[Path, typer.Option("--root", help="Folder of the studies.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
CpusOption = Annotated[int | None, typer.Option("--cpus", min=1, help="CPU cores to use; default: all usable ones.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs to use; default: all there are.")]
AddressOption = Annotated[str | None, typer.Option("--address", help="A Ray cluster; default: this machine.")]
TrackingOption = Annotated[
    str | None, typer.Option("--tracking-uri", help="An MLflow server; default: ROOT/mlflow.db.")
]
HoursOption = Annotated[float | None, typer.Option("--max-hours", min=0, help="Refuse above this many device hours.")]
ROOT = Path("studies")


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
    from experiments import show

    with _standard_output_kept():
        made = _plan(_study(study, root), root, _slots(cpus, gpus))
        document = made.as_json()
    _print(document, as_json, show.plan)
    _within_limits(document, made.folder, max_hours)


@app.command(epilog="Example: gridlaw status quickstart --watch")
def status(
    study: StudyArgument,
    root: RootOption = ROOT,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing, until all is done or Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Where each cell stands, why, and the time left."""
    from experiments import show
    from experiments import status as standing

    with _standard_output_kept():
        name, folder, cells = _cells(study, root)

    def look() -> dict[str, Any]:
        return standing.read(name, folder, cells)

    if watch and not as_json:
        standing.watch(look, Console(stderr=True))
    else:
        _print(look(), as_json, lambda document: show.status(document, height=len(cells) + 20))


@app.command(epilog="Example: gridlaw fit quickstart --json")
def fit(study: StudyArgument, root: RootOption = ROOT, as_json: JsonOption = False) -> None:
    """When the capability emerges in each arm, with intervals, and whether the arms end level."""
    from experiments import show

    with _standard_output_kept():
        from analysis import findings

        document = findings.as_json(findings.fit_study(root, _name(study, root)))
    _print(document, as_json, show.findings)


@app.command(epilog="Example: gridlaw report quickstart")
def report(study: StudyArgument, root: RootOption = ROOT, as_json: JsonOption = False) -> None:
    """Writes report.html, figures and tables."""
    with _standard_output_kept():
        from analysis import report as reporting

        written = reporting.write(root, _name(study, root))
    _print({"report": str(written)}, as_json, lambda document: document["report"])


@app.command(epilog="Example: gridlaw doctor --root /data/studies")
def doctor(root: RootOption = ROOT, as_json: JsonOption = False) -> None:
    """What this machine has: devices, kernels, compiler, ports, disk."""
    from experiments import doctor as examination

    with _standard_output_kept():
        document = examination.examine(root)
    _print(document, as_json, examination.show)


def main() -> None:
    """The `gridlaw` command."""
    app()


@contextlib.contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Standard output is for results: what libraries print meanwhile goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _print(document: dict[str, Any], as_json: bool, view: Callable[[dict[str, Any]], RenderableType]) -> None:
    if as_json:
        typer.echo(json.dumps(document, allow_nan=False))
    else:
        Console().print(view(document))


def _is_file(study: str) -> bool:
    return study.endswith(".py") or Path(study).is_file()


def _study(study: str, root: Path) -> "Study":
    """The study of a file, or of the file a study under the root was made from."""
    from orchestrator.study import load

    if _is_file(study):
        return load(Path(study))
    source = Path(_stored(study, root)["source"])
    if not source.is_file():
        raise InputError(f"study: {study} was made from {source}, which is gone; give the study file")
    return load(source)


def _name(study: str, root: Path) -> str:
    """The name of a study that has been run under the root."""
    name = _study(study, root).name if _is_file(study) else study
    _stored(name, root)
    return name


def _stored(name: str, root: Path) -> dict[str, Any]:
    path = root / name / "study.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(
            f"study: {name!r} is neither a study file nor a study under {root}; give a .py file, or run the study first"
        ) from None


def _cells(study: str, root: Path) -> tuple[str, Path, list[dict[str, Any]]]:
    """(name, folder, rows of the cells): of the study file where one is given, else of study.json."""
    if _is_file(study):
        made = _plan(_study(study, root), root, slots=1)
        return made.study.name, made.folder, made.as_json()["cells"]
    return study, root / study, _stored(study, root)["cells"]


def _slots(cpus: int | None, gpus: int | None) -> int:
    from experiments.doctor import usable_cpus

    return gpus or cpus or usable_cpus()


def _plan(study: "Study", root: Path, slots: int) -> "Plan":
    """The plan of a study in the light of what its ledger, if there is one, knows. Creates nothing."""
    from orchestrator import plan as planning
    from orchestrator.ledger import Ledger

    folder = root / study.name
    known: dict[str, planning.Known] = {}
    earlier: dict[str, dict[str, Any]] = {}
    if (folder / "ledger.db").exists():
        with Ledger.read(folder / "ledger.db") as ledger:
            known = {
                job.id: planning.Known(job.state, job.busy_s, job.tokens_done) for job in ledger.snapshot().values()
            }
            earlier = ledger.cells()
    return planning.make(study, folder, known, earlier, slots)


def _within_limits(document: dict[str, Any], folder: Path, max_hours: float | None) -> None:
    """Raises InputError where the plan would not fit the disk or exceeds what the user allows."""
    import shutil

    from experiments.doctor import nearest_existing

    totals = document["totals"]
    free = shutil.disk_usage(nearest_existing(folder)).free
    if totals["disk_bytes"] > free:
        raise InputError(
            f"disk: the study needs {totals['disk_bytes'] / 2**30:.1f} GiB, {free / 2**30:.1f} are free at {folder}; "
            f"keep fewer checkpoints (evaluations.checkpoints) or give another --root"
        )
    if max_hours is not None and totals["device_hours"] is None:
        raise InputError(
            f"--max-hours: {max_hours:g} cannot be held before an arm has run here, its speed is unknown; "
            f"run one seed without the limit first"
        )
    if max_hours is not None and totals["device_hours"] > max_hours:
        raise InputError(
            f"--max-hours: {max_hours:g} is below the plan's {totals['device_hours']:.2f} device hours; "
            f"raise it or drop cells"
        )


if __name__ == "__main__":
    main()
