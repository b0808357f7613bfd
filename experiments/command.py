"""The `gridlaw` command. Imports stay inside the verbs: help answers at once, `plan` needs neither Ray nor MLflow."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType

from experiments import fitting
from experiments.lookup import cells_of, is_file, name_of, study_of
from experiments.one_line import OneLineErrors
from experiments.options import (
    AddressOption,
    CostOption,
    CpusOption,
    DiskOption,
    FlopsOption,
    GpusOption,
    HoursOption,
    JsonOption,
    MfuOption,
    PriceOption,
    RootOption,
    StudyArgument,
    TrackingOption,
)
from orchestrator.errors import InputError

ROOT = Path("studies")
STOP_WAIT_S = 60.0  # a stop takes ten seconds, and more where the machine is busy


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


@app.command(epilog="Example: gridlaw plan experiments/quickstart.py --calibrate --json")
def plan(
    study: StudyArgument,
    root: RootOption = ROOT,
    cpus: CpusOption = None,
    gpus: GpusOption = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First time a few steps of each model here, seconds a model.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="Plan for such devices, not for this machine: A100, H100 or H200.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="How many devices; default: those here.")
    ] = None,
    device_flops: FlopsOption = None,
    mfu: MfuOption = 0.4,
    price: PriceOption = None,
    max_hours: HoursOption = None,
    max_cost: CostOption = None,
    max_disk: DiskOption = None,
    as_json: JsonOption = False,
) -> None:
    """What would run and what it costs; starts nothing."""
    with _standard_output_kept():
        from experiments import allowance, machine, show
        from experiments.limits import Limits, as_bytes
        from orchestrator import resumption
        from orchestrator.submit import make_plan

        limits = Limits(max_hours, max_cost, as_bytes(max_disk))
        loaded, _ = study_of(study, root)
        if device:
            place = machine.device_named(loaded, device, mfu, price, calibrate, device_flops)
            slots = devices or allowance.slots_of(loaded, cpus, gpus)
        else:
            here = allowance.slots_of(loaded, cpus, gpus)
            place = machine.device_here(loaded, here, gpus, device_flops and device_flops * mfu, price)
            slots = devices or here
            if calibrate:
                machine.calibrate(loaded, root, here, gpus, Console(stderr=True, highlight=False))
        made = make_plan(loaded, root, slots, place)
        document = made.as_json()
    _print(document, as_json, show.plan)
    resumption.check(made)
    limits.hold(document, made.folder)


@app.command(epilog="Example: gridlaw run experiments/quickstart.py --cpus 2")
def run(
    study: StudyArgument,
    root: RootOption = ROOT,
    address: AddressOption = None,
    cpus: CpusOption = None,
    gpus: GpusOption = None,
    tracking_uri: TrackingOption = None,
    device_flops: FlopsOption = None,
    mfu: MfuOption = 0.4,
    price: PriceOption = None,
    max_hours: HoursOption = None,
    max_cost: CostOption = None,
    max_disk: DiskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Runs what is missing, then writes results and report. Ctrl-C is safe; run again to go on."""
    started = time.time()
    console = Console(stderr=True, highlight=False)
    with _standard_output_kept():
        from experiments import allowance, machine
        from experiments import status as standing
        from experiments.limits import Limits, as_bytes
        from orchestrator import resumption
        from orchestrator.fleet import FleetOptions
        from orchestrator.submit import make_plan

        loaded, source = study_of(study, root)
        limits = Limits(max_hours, max_cost, as_bytes(max_disk))
        here = address is None  # what a cluster has is known once it is joined
        slots = allowance.slots_of(loaded, cpus, gpus) if here else gpus or cpus or 1
        place = machine.device_to_run_on(loaded, slots, gpus, device_flops and device_flops * mfu, price, here)
        made = make_plan(loaded, root, slots, place)
        planned = made.as_json()
    with _figures_on_refusal(planned, as_json):
        resumption.check(made)
        limits.hold(planned, made.folder)
    with _standard_output_kept():
        from experiments import running

        look = standing.Look(loaded.name, made.folder, planned["cells"])
        fleet = FleetOptions(cpus, allowance.gpus_of(gpus) if here else gpus, address, loaded.machine.threads)
        submission, written = running.carry_out(made, source, fleet, look, console, tracking_uri, started)
    document = look.anew() | {"report": written and str(written)}
    if as_json:
        typer.echo(json.dumps(document, allow_nan=False))
    elif written:
        if not submission.ran:
            console.print(f"all {len(planned['cells'])} cells are there: nothing was run", soft_wrap=True)
        found, view = _fit_study(loaded.name, root, next_study=False)
        _print(found, False, view)
        typer.echo(f"report: {written}")
    if running.was_stopped(submission):
        console.print(f"stopped; go on with: gridlaw run {study}", soft_wrap=True)
    code = submission.result.exit_code if submission.result else 0
    raise typer.Exit(code or int(set(document["counts"]) != {"finished"}))


@app.command(epilog="Example: gridlaw measure quickstart needle longppl")
def measure(
    study: StudyArgument,
    measures: Annotated[list[str], typer.Argument(metavar="MEASURE…", help="Words; a wrong one lists them all.")],
    root: RootOption = ROOT,
    address: AddressOption = None,
    cpus: CpusOption = None,
    gpus: GpusOption = None,
    tracking_uri: TrackingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Takes measures on the stored checkpoints of finished cells; trains nothing."""
    started = time.time()
    console = Console(stderr=True, highlight=False)
    with _standard_output_kept():
        from experiments import allowance, measuring, running
        from experiments import status as standing
        from orchestrator.fleet import FleetOptions
        from orchestrator.submit import make_plan

        loaded, source = study_of(study, root)
        loaded = measuring.with_measures(loaded, measures)
        here = address is None
        slots = allowance.slots_of(loaded, cpus, gpus) if here else gpus or cpus or 1
        made = measuring.measurements_of(make_plan(loaded, root, slots))
        look = standing.Look(loaded.name, made.folder, made.as_json()["cells"])
        fleet = FleetOptions(cpus, allowance.gpus_of(gpus) if here else gpus, address, loaded.machine.threads)
        submission, written = running.carry_out(made, source, fleet, look, console, tracking_uri, started)
    _print(
        {"study": loaded.name, "measures": measures, "jobs": len(made.jobs), "report": written and str(written)},
        as_json,
        lambda document: f"{document['jobs']} measurement jobs run; report: {document['report']}",
    )
    raise typer.Exit(submission.result.exit_code if submission.result else 0)


@app.command(epilog="Example: gridlaw stop quickstart")
def stop(study: StudyArgument, root: RootOption = ROOT, as_json: JsonOption = False) -> None:
    """Ends a run from another shell, as Ctrl-C there would; returns when it has ended."""
    with _standard_output_kept():
        from orchestrator import lock

        name = study_of(study, root)[0].name if is_file(study) else study
        pid = lock.stop_holder(root / name, STOP_WAIT_S)
    if pid is None:
        typer.echo(f"gridlaw: {name} has not ended in {STOP_WAIT_S:.0f} s; it was asked to, wait for it", err=True)
        raise typer.Exit(1)
    _print(
        {"study": name, "stopped": True, "pid": pid},
        as_json,
        lambda document: f"{name} has stopped; go on with: gridlaw run {study}",
    )


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

        name, folder, cells = cells_of(study, root)

    look = standing.Look(name, folder, cells)
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
            document, view = _fit_study(name_of(source, root), root, next_study, fitting.ahead_of(predict))
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
        show.findings(document),
        show_laws.claim_lines(document["findings"]),
        show_laws.law_lines(document["scaling"]),
        show_laws.size_lines(document["t50_by_size"]),
    )


@app.command(epilog="Example: gridlaw report quickstart")
def report(study: StudyArgument, root: RootOption = ROOT, as_json: JsonOption = False) -> None:
    """Writes report.html, figures and tables."""
    with _standard_output_kept():
        from analysis import report as reporting

        written = reporting.write(root, name_of(study, root))
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

        name = name_of(study, root)
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


@contextlib.contextmanager
def _figures_on_refusal(planned: dict[str, Any], as_json: bool) -> Iterator[None]:
    """Shows the plan where it is refused, so that one sees by what."""
    try:
        yield
    except InputError:
        from experiments import show

        _print(planned, as_json, show.plan)
        raise


if __name__ == "__main__":
    main()
