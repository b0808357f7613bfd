"""`gridlaw export`: the cell meant, its checkpoint, a whole folder or none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from experiments.command import app
from model import export
from model.lm import build
from orchestrator import plan as planning
from orchestrator.data.recall import RecallLanguage
from orchestrator.ledger import AttemptEnd, Ledger
from orchestrator.recipe import Recipe
from orchestrator.study import Arm, Size, Study
from orchestrator.submit import make_plan
from orchestrator.training import checkpoint

STUDY = Study(
    name="tiny",
    arms=(Arm(name="full", pattern="full"), Arm(name="swa-8", pattern="swa-8 full", positions="nope-full")),
    sizes=(Size(name="s", d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32),),
    budgets=(4096, 8192),
    seeds=(0, 1),
    data=RecallLanguage(context=64),
    recipe=Recipe(learning_rate=0.02, batch_size=4),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, planning.Plan]:
    """A root with a study: the cells of seed 0 are finished at two checkpoints, the first of seed 1 runs."""
    root = tmp_path_factory.mktemp("root")
    plan = make_plan(STUDY, root, 1)
    plan.folder.mkdir()
    (plan.folder / "study.json").write_text(json.dumps(plan.study_document(root / "tiny.py")))
    with Ledger.open(plan.folder / "ledger.db") as ledger:
        ledger.add(plan.jobs, {cell.id: planning.ledger_row(cell) for cell in plan.cells})
        session = ledger.start_session(1, None)
        for cell in plan.cells:
            if cell.seed == 1 and cell.arm == "swa-8":
                continue
            ledger.start_attempt(cell.id, session, 0, warm=True, available=0.0)
            if cell.seed == 0:
                ledger.end_attempt(cell.id, AttemptEnd("finished", "finished", None, 1.0, 1.0, 0.0, cell.budget_tokens))
            for step in (cell.steps // 2, cell.steps):
                if cell.seed == 0 or step < cell.steps:
                    checkpoint.commit(
                        plan.folder / "jobs" / cell.id / "checkpoints",
                        step,
                        build(cell.model, step),
                        {},
                        rank=0,
                        workers=1,
                        zero_stage=0,
                        keep=range(100),
                    )
    return root, plan


def run(made: tuple[Path, planning.Plan], cell: str, folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["export", "tiny", cell, str(folder), "--root", str(made[0]), *words])


def refused(made: tuple[Path, planning.Plan], said: list[str], cell: str, folder: Path, *words: str) -> None:
    before = sorted(folder.parent.rglob("*"))
    result = run(made, cell, folder, *words)
    assert (result.exit_code, result.stderr.count("\n"), result.stdout) == (2, 1, ""), result.output
    assert all(word in result.stderr for word in said), result.stderr
    assert sorted(folder.parent.rglob("*")) == before


def cell_of(made: tuple[Path, planning.Plan], **wanted: Any) -> Any:
    return next(c for c in made[1].cells if all(getattr(c, key) == value for key, value in wanted.items()))


def test_a_cell_is_exported_and_read_back(made: tuple[Path, planning.Plan], tmp_path: Path) -> None:
    cell = cell_of(made, arm="swa-8", seed=0, budget_tokens=8192)
    tokens = torch.arange(20)[None]
    for words, step in (((), cell.steps), (("--step", str(cell.steps // 2)), cell.steps // 2)):
        folder = tmp_path / "new" / str(step)
        result = run(made, cell.id, folder, "--json", *words)
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert (document["step"], document["tokens"]) == (step, step * 256)
        assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
        model = export.read(folder)
        assert model.config == cell.model
        assert torch.equal(model(tokens), build(cell.model, step)(tokens))
        assert json.loads((folder / "config.json").read_text())["source"]["arm"] == "swa-8"


def test_an_empty_folder_and_words_will_do(made: tuple[Path, planning.Plan], tmp_path: Path) -> None:
    for number, words in enumerate(("swa-8 4096 seed 0", "seed 0 s 8.19k full")):
        folder = tmp_path / str(number)
        folder.mkdir()
        result = run(made, words, folder)
        assert result.exit_code == 0, result.output
        assert "AutoModelForCausalLM.from_pretrained" in result.stdout
        assert (folder / "model.safetensors").exists()


def test_what_cannot_be_exported_is_said(made: tuple[Path, planning.Plan], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    cell = cell_of(made, arm="full", seed=0)
    running = cell_of(made, arm="full", seed=1)
    waiting = cell_of(made, arm="swa-8", seed=1)
    refused(made, ["'swa-9'", "no cell", "choose one", "swa-8 4096 seed 0"], "swa-9", folder)
    refused(made, ["swa-8 seed 0", "names 2 cells", "swa-8 8192 seed 0"], "swa-8 seed 0", folder)
    refused(made, ["no cell"], "", folder)
    refused(made, ["full 4096 seed 1 is running", "--step"], running.id, folder)
    refused(made, ["swa-8 4096 seed 1 is pending", "run the study"], waiting.id, folder)
    refused(made, ["no whole checkpoint"], waiting.id, folder, "--step", "3")
    refused(made, ["--step: 5", "it has 8, 16"], cell.id, folder, "--step", "5")
    assert run(made, running.id, tmp_path / "early", "--step", str(running.steps // 2)).exit_code == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").touch()
    refused(made, ["full is there and not empty"], cell.id, tmp_path / "full")
    refused(made, ["a is there and not empty"], cell.id, tmp_path / "full/a")
    refused(made, ["cannot be written"], cell.id, tmp_path / "full/a/below")
    result = CliRunner().invoke(app, ["export", "absent", cell.id, str(folder), "--root", str(made[0])])
    assert (result.exit_code, "absent" in result.stderr) == (2, True)


def test_a_stop_half_way_leaves_nothing(
    made: tuple[Path, planning.Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "sources", full_disk)
    refused(made, ["No space left"], cell_of(made, seed=0).id, tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []
