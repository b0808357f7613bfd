"""A study file becomes cells, or one clear line."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from model.mixers.table import parse_pattern
from orchestrator import cells, identity, plan, study
from orchestrator.errors import InputError, one_line
from orchestrator.jobs import Known
from orchestrator.recipe import Recipe
from orchestrator.study import PAPER_SIZES, Arm, Backbone, Evaluations, Machine, Question, Size, Study

STUDIES = Path(__file__).parents[2] / "experiments"


@dataclasses.dataclass(frozen=True)
class Noise:
    """Random tokens: enough of a data source for planning."""

    vocab_size: int = 32
    context: int = 64
    chance: float = 1 / 32
    path: str = "here"

    def identity(self):
        return {"vocab_size": self.vocab_size, "context": self.context}

    def check(self):
        pass

    def batch(self, seed, step, rows):
        return np.random.default_rng([seed, step]).integers(0, self.vocab_size, (len(rows), self.context + 1))

    def held_out(self, documents):
        return self.batch(0, 0, range(documents))

    def facts(self, documents):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Count:
    name: str = "count"
    documents: int = 8

    def identity(self):
        return {"documents": self.documents}

    def capabilities(self, data):
        return ("count/share",)

    def __call__(self, model, data):
        raise NotImplementedError


SIZE = Size(name="tiny", d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)


def make_study(**changes) -> Study:
    fields = {
        "name": "tiny",
        "arms": [Arm(name="full", pattern="full"), Arm(name="swa-8", pattern="swa-8 full")],
        "sizes": [SIZE],
        "budgets": [6400],
        "seeds": [0, 1],
        "data": Noise(),
        "recipe": Recipe(learning_rate=0.02, batch_size=2),
        "measures": [Count()],
    }
    return Study(**{**fields, **changes})


def write_record(folder: Path) -> Path:
    """A record that holds one measurement of the study's measure."""
    folder.mkdir(parents=True)
    line = {"step": 1, "tokens": 128, "time": 0.0, "source": "count", "metrics": {}}
    (folder / "record.jsonl").write_text(json.dumps({**line, "measurement": identity.of_measure(Count())}) + "\n")
    return folder / "record.jsonl"


def refusal(**changes) -> str:
    with pytest.raises(ValidationError) as caught:
        make_study(**changes)
    line = one_line(caught.value)
    assert "\n" not in line
    return line


def test_grid_is_the_product_of_its_axes():
    grid = cells.expand(make_study(budgets=[6400, 12800], data={"near": Noise(), "far": Noise(context=128)}))
    assert len(grid) == 2 * 1 * 2 * 2 * 2
    assert len({cell.id for cell in grid}) == len(grid)
    assert {cell.budget_tokens for cell in grid} == {6400, 12800}


def test_budget_in_multiples_of_n_counts_non_embedding_parameters():
    cell = cells.expand(make_study(budgets=["3N"]))[0]
    tokens_per_step = 2 * 64
    assert cell.steps == round(3 * cell.non_embedding_params / tokens_per_step)
    assert cell.budget_tokens == cell.steps * tokens_per_step


@pytest.mark.parametrize(
    "changes",
    [
        {"measures": []},
        {"machine": Machine(micro_batch=1, threads=2, log_every=5, recompute=True)},
        {"notes": ["said otherwise"]},
        {"name": "renamed"},
        {"data": Noise(path="elsewhere")},
        {"evaluations": Evaluations(every_tokens=1280)},
        {"question": Question(capability="count/share", reference="full")},
    ],
)
def test_identity_ignores_what_does_not_change_weights(changes):
    assert [c.id for c in cells.expand(make_study(**changes))] == [c.id for c in cells.expand(make_study())]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"recipe": Recipe(learning_rate=0.01, batch_size=2)}, "recipe.learning_rate: 0.02 -> 0.01"),
        ({"recipe": Recipe(learning_rate=0.02, batch_size=2, z_loss=1e-4)}, "recipe.z_loss: null -> 0.0001"),
        ({"data": Noise(vocab_size=48)}, "data.vocab_size: 32 -> 48"),
        ({"sizes": [SIZE.model_copy(update={"d_ff": 48})]}, "model.d_ff: 32 -> 48"),
    ],
)
def test_a_changed_identity_is_explained_by_its_field(changes, field, tmp_path):
    before, after = make_study(), make_study(**changes)
    earlier = {cell.id: plan.ledger_row(cell) for cell in cells.expand(before)}
    made = plan.make(after, tmp_path, known={}, earlier=earlier)
    assert set(made.changed) == {cell.id for cell in made.cells}
    assert all(field in why for why in made.changed.values())


def test_a_plan_knows_what_running_layers_again_costs(tmp_path):
    kept, again = (plan.make(make_study(machine=Machine(recompute=on)), tmp_path, {}) for on in (False, True))
    for before, after in zip(kept.jobs, again.jobs, strict=True):
        assert after.flops == pytest.approx(before.flops * 4 / 3)
        assert after.memory_bytes < before.memory_bytes
        assert again.task(after).recompute and not kept.task(before).recompute


def test_finished_cells_are_not_planned_again(tmp_path):
    one, two = make_study(), make_study(seeds=[0, 1, 2])
    known = {cell.id: Known("finished", 2.0, cell.budget_tokens, True) for cell in cells.expand(one)}
    records = [write_record(tmp_path / "jobs" / cell_id) for cell_id in known]
    assert plan.make(one, tmp_path, known).jobs == ()
    grown = plan.make(two, tmp_path, known)
    assert grown.missing == 2
    assert {cell.seed for cell in grown.cells if cell.id in {job.cell_id for job in grown.jobs}} == {2}
    assert all(job.seconds == pytest.approx(2.0) for job in grown.jobs)
    records[0].unlink()
    again = plan.make(one, tmp_path, known)
    assert [job.kind for job in again.jobs] == ["train"] and again.lost == (again.jobs[0].cell_id,), (
        "its files are gone"
    )


def test_a_changed_budget_is_timed_by_what_the_same_model_took(tmp_path):
    before = cells.expand(make_study())
    known = {cell.id: Known("finished", 2.0, cell.budget_tokens, True) for cell in before}
    earlier = {cell.id: plan.ledger_row(cell) for cell in before}
    longer = plan.make(make_study(budgets=[12800]), tmp_path, known, earlier)
    assert [job.seconds for job in longer.jobs] == [pytest.approx(4.0)] * 4
    other = plan.make(make_study(sizes=[SIZE.model_copy(update={"d_ff": 48})]), tmp_path, known, earlier)
    assert [job.seconds for job in other.jobs] == [None] * 4


def test_a_new_measure_plans_measurements_only(tmp_path):
    grid = make_study()
    known = {cell.id: Known("finished", 2.0, cell.budget_tokens, True) for cell in cells.expand(grid)}
    for cell_id in known:
        write_record(tmp_path / "jobs" / cell_id)
    made = plan.make(make_study(measures=[Count(documents=9)]), tmp_path, known)
    assert made.missing == 0
    assert {job.kind for job in made.jobs} == {"measure"}
    assert sum(job.tokens for job in made.jobs) == 0


def test_identity_is_stable():
    """Pinned: a change here means that every stored cell would be trained again. Raise SEMANTICS instead."""
    assert identity.digest({"semantics": 1, "model": {"d_model": 16}, "seed": 0}) == "42abf2a6b768"
    quickstart = study.load(Path(__file__).parents[2] / "experiments/quickstart.py")
    assert cells.expand(quickstart)[0].id == "45816802a689"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 1}, ["Study.lr", "unknown field"]),
        ({"arm": []}, ["did you mean arms"]),
        ({"arms": []}, ["Study.arms", "empty"]),
        ({"seeds": []}, ["Study.seeds", "empty"]),
        ({"arms": [Arm(name="a", pattern="full"), Arm(name="a", pattern="swa-8")]}, ["arm 'a'", "2 times"]),
        ({"arms": [{"name": "a", "pattern": "full", "backbone": {"sink": 2}}]}, ["backbone.sink", "unknown field"]),
        ({"arms": [{"name": "a", "pattern": "full", "positions": {"full": 2.0}}]}, ["full turns 2.0 of each head"]),
        ({"arms": [{"name": "a", "pattern": "full", "positions": "ropes"}]}, ["positions"]),
        ({"arms": [Arm(name="a", pattern="swa-8:2+full")]}, ["2 of 3 parts of n_heads 2", "whose sum divides 2"]),
        ({"arms": [Arm(name="a", pattern="swa-0 full")]}, ["swa-0", "window 0"]),
        ({"arms": [Arm(name="a", pattern="swa--3 full")]}, ["swa--3", "window -3"]),
        ({"arms": [Arm(name="a", pattern="full full full")]}, ["does not divide 2 layers"]),
        ({"arms": [Arm(name="a", pattern="mystery")]}, ["mystery", "known"]),
        ({"measures": ["recall"]}, ["'recall' is no measure"]),
        ({"budgets": ["many"]}, ["'many' is no budget", "100N"]),
        ({"question": Question(capability="x", reference="gone")}, ["'gone' is no arm", "full, swa-8"]),
        (
            {"question": Question(capability="recall", reference="full")},
            ["question.capability: 'recall' is none", "choose from count/share"],
        ),
        (
            {"question": Question(capability="x", reference="full"), "measures": []},
            ["question.capability: 'x'", "add a measure such as RecallByDistance()"],
        ),
        ({"data": {"base\n": Noise()}}, ["'base\\n' is no name"]),
        ({"machine": Machine(workers=3)}, ["workers: 3 does not divide batch_size 2"]),
        (
            {"machine": Machine(zero_stage=1), "recipe": Recipe(learning_rate=0.02, batch_size=2, clip=1.0)},
            ["recipe.clip: 1.0", "zero_stage to 0"],
        ),
        ({"name": "a/b"}, ["Study.name", "'a/b'"]),
    ],
)
def test_bad_studies_are_refused_in_one_line(changes, words):
    line = refusal(**changes)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("other", [{"pattern": " full"}, {"pattern": "full", "backbone": {"sinks": 2}}])
def test_arms_that_are_one_decoder_are_refused(other):
    twice = make_study(arms=[Arm(name="a", pattern="full"), Arm(name="b", **other)])
    with pytest.raises(InputError, match="are one and the same training; drop one"):
        cells.expand(twice)


def test_budget_below_one_step_is_refused():
    with pytest.raises(InputError, match="below one step of 128"):
        cells.expand(make_study(budgets=[10]))


@pytest.mark.parametrize("budget", [10**30, "9" * 400 + "N"])
def test_budget_beyond_all_reason_is_refused(budget):
    with pytest.raises(InputError, match=r"budgets: 9?1?[09]+(\.\.\.)? is more than 1e\+16 tokens; lower it"):
        cells.expand(make_study(budgets=[budget]))


def test_evaluations_too_many_to_list_are_refused():
    with pytest.raises(InputError, match=r"every_tokens: 128 makes 78125000 evaluations .* raise it"):
        plan.make(make_study(budgets=[10**10], evaluations=Evaluations(every_tokens=128)), Path("nowhere"), known={})


def test_learning_rate_of_text_is_refused():
    with pytest.raises(ValidationError) as caught:
        Recipe(learning_rate="0.02", batch_size=2)
    assert one_line(caught.value).startswith("Recipe.learning_rate: '0.02' is refused; input should be a valid number")


def test_load_names_file_and_line(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\nstudy = (\n")
    with pytest.raises(InputError, match=r"^bad.py:2: "):
        study.load(bad)
    bad.write_text("from orchestrator.recipe import Recipe\n\nRecipe(learning_rate=-1.0, batch_size=2)\n")
    with pytest.raises(InputError, match=r"^bad.py:3: Recipe.learning_rate: -1.0 is refused"):
        study.load(bad)
    for leaving, said in (("import sys; sys.exit(0)", "SystemExit: 0"), ("raise GeneratorExit", "GeneratorExit: no m")):
        bad.write_text(f"x = 1\n{leaving}\n")
        with pytest.raises(InputError, match=f"^bad.py:2: {said}"):
            study.load(bad)
    bad.write_text("x = 1\n")
    with pytest.raises(InputError, match="defines no `study`"):
        study.load(bad)


def test_a_helper_module_is_found_but_shadows_no_room(tmp_path: Path):
    (tmp_path / "model.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "helper_of_this_test.py").write_text("ARM = 'swa-4 full'\n")
    (tmp_path / "mine.py").write_text(
        "from helper_of_this_test import ARM\n"
        "from model.mixers.table import parse_pattern\n"
        "from tests.orchestrator.test_study import make_study\n"
        "from orchestrator.study import Arm\n"
        "study = make_study(arms=[Arm(name='a', pattern=ARM)])\n"
    )
    assert study.load(tmp_path / "mine.py").arms[0].pattern == "swa-4 full"


def test_paper_sizes_have_the_papers_n():
    paper = make_study(
        sizes=[PAPER_SIZES[s] for s in ("S1", "S2", "S3", "S4")], arms=[Arm(name="full", pattern="full")]
    )
    counted = {cell.size: cell.non_embedding_params for cell in cells.expand(paper)}
    assert counted == {"S1": 14_999_424, "S2": 31_470_080, "S3": 64_901_760, "S4": 104_427_264}


@given(st.integers(1, 5000), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 10**6)))
def test_checkpoints_are_evaluations_and_both_end_with_the_budget(steps, checkpoints, every_tokens):
    evaluate, keep = Evaluations(every_tokens=every_tokens, checkpoints=checkpoints).steps(steps, 128)
    assert set(keep) <= set(evaluate) <= set(range(1, steps + 1))
    assert evaluate[-1] == keep[-1] == steps
    assert len(keep) <= checkpoints


def test_nope_full_takes_positions_from_the_full_layers_only():
    layers = parse_pattern("swa-8 full", 4, "nope-full")
    assert [(layer.mixer, layer.window, layer.rope) for layer in layers] == [
        ("swa", 8, True),
        ("full", None, False),
    ] * 2


@pytest.mark.parametrize(("step", "rate"), [(0, 0.1), (9, 1.0), (500, 1.0), (630, 1.0), (765, 0.5), (899, 1 / 270)])
def test_warmup_stable_decay(step, rate):
    assert Recipe(learning_rate=0.02, batch_size=8).rate(step, 900) == pytest.approx(rate)


def test_the_plan_says_how_far_a_layer_is_from_full_attention(tmp_path: Path):
    arms = [Arm(name="full", pattern="full"), Arm(name="gdn", pattern="gdn full full full")]
    size = PAPER_SIZES["S2"]
    matched = make_study(sizes=[size], arms=arms, seeds=[0], backbone=Backbone(match_parameters=True))
    document = plan.make(matched, tmp_path, known={}).as_json()
    residual = {cell["arm"]: cell["layer_residual"] for cell in document["cells"]}
    assert residual["full"] == 0
    assert 0 < abs(residual["gdn"]) < 0.01


def test_an_arm_may_differ_in_its_backbone():
    arms = [
        Arm(name="swa-8", pattern="swa-8 full"),
        Arm(name="sinks", pattern="swa-8 full", backbone={"sinks": 2, "sink_logit": True, "qk_norm": 1.0}),
        Arm(name="shared", pattern="swa-8+full", positions={"full": "nope", "swa": 0.5}),
        Arm(name="capped", pattern="swa-8 full", backbone={"logit_softcap": 30.0, "logit_scale": 0.5}),
    ]
    grid = cells.expand(make_study(arms=arms, seeds=[0], backbone=Backbone(tied_embeddings=True)))
    assert len({cell.id for cell in grid}) == 4
    assert grid[0].id == cells.expand(make_study(seeds=[0], backbone=Backbone(tied_embeddings=True)))[1].id
    assert all(cell.model.tied_embeddings for cell in grid)
    assert [layer.sinks for layer in grid[1].model.layers] == [2, 0]
    assert grid[1].model.qk_norm == 1.0 and grid[0].model.qk_norm is None
    layer = identity.document(grid[2].model, Noise(), Recipe(learning_rate=0.02, batch_size=2), 1, 0)["model"][
        "layers"
    ][0]
    assert layer == {
        "mixer": "heads", "window": None, "rope": False,
        "parts": [{"mixer": "swa", "window": 8, "rope": 0.5}, {"mixer": "full", "window": None, "rope": False}],
    }  # fmt: skip


def test_identities_of_studies_of_full_and_window_attention_stay():
    # Finished cells are found again by these; only a raised semantics version may change them.
    shipped = {name: cells.expand(study.load(STUDIES / f"{name}.py")) for name in ("quickstart", "window_laziness")}
    assert {name: identity.digest([cell.id for cell in grid]) for name, grid in shipped.items()} == {
        "quickstart": "def09e85033c",
        "window_laziness": "734a2d21d51c",
    }
