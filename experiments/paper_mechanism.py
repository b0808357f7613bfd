"""Which layers of a hybrid find facts again, and does a large window keep the full ones from learning it?

After arXiv 2606.15378: full attention carries retrieval; larger windows delay it; the end is the same.
paper_mechanism_laptop.py is the same study at a laptop's scale.
"""

from analysis.measures.attention_entropy import AttentionEntropy
from analysis.measures.recall import RecallByDistance
from analysis.measures.receptive_field import ReceptiveField
from analysis.measures.retrieval_heads import RetrievalHeads
from analysis.measures.validation import ValidationLoss
from experiments.paper import PAPER, Scale
from orchestrator.finding import EndLevel, Finding, SpeedRatio, Trend, Within
from orchestrator.study import Arm, Question, Study


def study_at(scale: Scale) -> Study:
    small, middle, large = (scale.hybrid(window) for window in scale.windows)
    labels = {arm.name: window for arm, window in zip((small, middle, large), scale.windows, strict=True)}
    # The full layers limited to the small window, against the efficient ones limited below it.
    full, efficient = f"constrained/full-{scale.windows[0]}", f"constrained/efficient-{scale.narrow}"
    return Study(
        name=f"paper_mechanism{scale.suffix}",
        arms=[Arm(name="full", pattern="full"), small, middle, large],
        sizes=[scale.size],
        budgets=[scale.budget],
        seeds=scale.repeats,
        data={"recall": scale.data},
        recipe=scale.recipe,
        backbone=scale.backbone,
        measures=[
            ValidationLoss(documents=32),
            RecallByDistance(edges=scale.windows),
            RetrievalHeads(documents=16, beyond=scale.windows[-1]),
            AttentionEntropy(documents=8),
            ReceptiveField(windows=(scale.narrow, scale.windows[0]), edges=scale.windows),
        ],
        machine=scale.machine_of(scale.size),
        question=Question(capability=scale.capability, reference="full"),
        findings=[
            *(
                Finding(
                    claim=f"{arm.name}: recall beyond every window is lost with its full layers limited, not with its "
                    f"efficient ones",
                    statistic=Within(
                        metric=f"{full}/{scale.capability}", against_metric=f"{efficient}/{scale.capability}",
                        arm=arm.name,
                    ),
                    below=0,
                    paper="full attention carries retrieval",
                )
                for arm in (small, middle, large)
            ),
            Finding(
                claim="The larger the window, the later recall beyond it emerges",
                statistic=Trend(labels=labels),
                above=1,
                paper="larger windows delay retrieval",
            ),
            Finding(
                claim="The largest window needs more tokens than the smallest",
                statistic=SpeedRatio(arm=large.name, against=small.name),
                above=1,
                paper="larger windows delay retrieval",
            ),
            Finding(
                claim="Once emerged, both end at the same level within 5 points",
                statistic=EndLevel(arm=large.name, against=small.name),
                above=-0.05,
                below=0.05,
                paper="the mixer decides how fast, not where it ends",
            ),
        ],
        notes=scale.notes,
    )  # fmt: skip


study = study_at(PAPER)
