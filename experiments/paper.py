"""What the studies after arXiv 2606.15378 share, at the paper's scale and at a laptop's: sizes, windows, data, recipe.

The paper publishes sizes, budgets, windows, context, the 1:1 mix of long and short documents, and Muon. Its learning
rate, schedule, batch, vocabulary and RoPE base are not published where we could look: what stands here instead is the
study's own, with its reason.
"""

from dataclasses import dataclass

from orchestrator.data.recall import RecallLanguage
from orchestrator.recipe import Recipe
from orchestrator.study import PAPER_SIZES, Arm, Backbone, Evaluations, Machine, Size


@dataclass(frozen=True)
class Scale:
    """windows: small, middle and large, of the efficient attention; the question is recall beyond the large one.

    narrow: tokens that efficient layers are limited to where the full ones are limited to the small window. sizes,
    budgets, seeds, evaluations: of the study of scaling. size, budget, repeats: those of the others, of one size
    whose seeds give the intervals.
    """

    suffix: str
    windows: tuple[int, int, int]
    narrow: int
    sizes: tuple[Size, ...]
    budgets: tuple[str, ...]
    seeds: tuple[int, ...]
    evaluations: Evaluations
    size: Size
    budget: int | str
    repeats: tuple[int, ...]
    data: RecallLanguage
    recipe: Recipe
    backbone: Backbone
    workers: dict[str, int]
    micro_batch: int | None
    recompute: bool
    notes: tuple[str, ...]

    @property
    def capability(self) -> str:
        return f"recall/accuracy/beyond-{self.windows[-1]}"

    def hybrid(self, window: int, nope: bool = False) -> Arm:
        """Window and full attention in turn; nope: the full layers without positions."""
        name, positions = f"swa-{window}", "nope-full" if nope else "rope"
        return Arm.model_validate({"name": name + "-nope" * nope, "pattern": f"{name} full", "positions": positions})

    def machine_of(self, *sizes: Size) -> Machine:
        """As many workers as a size is trained by."""
        return Machine(
            workers={size.name: self.workers[size.name] for size in sizes},
            micro_batch=self.micro_batch,
            recompute=self.recompute,
        )


PAPER = Scale(
    suffix="",
    windows=(128, 512, 2048),
    narrow=32,
    sizes=tuple(PAPER_SIZES.values()),
    budgets=("100N", "200N", "300N", "400N", "500N", "1000N"),
    # One, as a grid of 210 cells has points enough for its laws; intervals are over sizes.
    seeds=(0,),
    evaluations=Evaluations(),
    # The largest of at most 100M that 1:3 patterns fit (16 layers); five seeds, as some may never emerge.
    size=PAPER_SIZES["S3"],
    budget="500N",
    repeats=(0, 1, 2, 3, 4),
    # A stand-in that needs no text: long and short documents 1:1, facts at every distance. 65,536 tokens, as much as
    # uint16 holds, so that the head costs what that of a usual tokeniser does. For text, put
    # TextCorpus(folders=[...], context=16_384, vocab_size=32_768) here and in the type above.
    data=RecallLanguage(
        context=16_384, g_min=4, facts_per_document=(16, 1024), fillers=1024, keys=32_256, values=32_256
    ),
    recipe=Recipe(
        # Muon's step has the same spectral norm at every width, so one rate serves all sizes; 0.02 with 0.95 is what
        # its authors train with. AdamW's part is at a usual 3e-3.
        learning_rate=0.02,
        adam_learning_rate=3e-3,
        # 64 x 16,384 is a million tokens a step: S1 at 100N still takes 1,430 of them.
        batch_size=64,
        warmup_steps=200,
        # Warmup-stable-decay, so that the six budgets of a size share a trunk.
        decay_fraction=0.2,
        precision="bfloat16",
    ),
    # S1 to S4 have the published N with these: SwiGLU, norms with gain, no biases, no QK-norm. RoPE base 1e4.
    backbone=Backbone(match_parameters=True),
    # A sequence of 16,384 at a time; layers run again in the backward pass, so that S5 fits a device of 80 GB.
    workers={"S1": 1, "S2": 1, "S3": 2, "S4": 4, "S5": 8},
    micro_batch=1,
    recompute=True,
    notes=(
        "Learning rate, schedule, batch, vocabulary and RoPE base are this study's own: the paper's are not published.",
        "The data are the recall language, 1:1 long and short documents, not the paper's text.",
        "The paper extends the context from 16K to 32K after training; nothing here does.",
        "S5's shape is inferred from its 477M parameters.",
    ),
)

LAPTOP = Scale(
    suffix="_laptop",
    # The paper's windows are to its 16,384 tokens as these are to 256, but for the smallest, which sees a fact whole.
    windows=(8, 32, 128),
    narrow=2,
    sizes=tuple(
        Size(name=name, d_model=d, n_layers=layers, n_heads=d // 16, n_kv_heads=d // 16, head_dim=16, d_ff=2 * d)
        for name, d, layers in (("S1", 32, 4), ("S2", 32, 6), ("S3", 48, 4), ("S4", 48, 6), ("S5", 64, 4))
    ),
    # In the proportions of the paper's. At a hundred times N these models would take a day.
    budgets=("2N", "4N", "6N", "8N", "10N", "20N"),
    seeds=(0,),
    # A sixteenth of every budget would spend more on measuring than on training.
    evaluations=Evaluations(every_tokens=64 * 8 * 256, checkpoints=3),
    size=Size(name="tiny", d_model=64, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=128),
    budget=900 * 8 * 256,
    repeats=(0, 1, 2, 3, 4),
    data=RecallLanguage(context=256, g_min=4),
    recipe=Recipe(learning_rate=0.02, adam_learning_rate=5e-3, batch_size=8, warmup_steps=10, decay_fraction=0.3),
    backbone=Backbone(
        mlp="relu2",
        norm_gain=False,
        qk_norm=1.5,
        key_shift=True,
        mixers={"mamba2": {"head_dim": 16, "d_state": 16}},
        match_parameters=True,
    ),
    workers={"S1": 1, "S2": 1, "S3": 1, "S4": 1, "S5": 1, "tiny": 1},
    micro_batch=None,
    recompute=False,
    notes=(
        "Models of 39,000 to 143,000 parameters, 256 tokens: shape and question are the paper's, the scale is not.",
        "Key shift: every softmax layer adds a learned multiple of the previous token's key to each key. Without it "
        "these small models learnt no recall in 4.9 M tokens; the paper's models have no such shift.",
        "All arms train at one learning rate, chosen for attention: the recurrent mixers may want another.",
    ),
)
