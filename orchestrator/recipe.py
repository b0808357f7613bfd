"""How a cell is trained: optimizer, schedule, batch. All of it changes the weights, so all of it is identity."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.errors import InputError

Beta = Annotated[float, Field(ge=0, lt=1)]


class Recipe(BaseModel):
    """Optimizer, schedule and batch of a study.

    learning_rate: peak rate of the matrices inside layers (Muon), or of every parameter when optimizer is "adamw".
    adam_learning_rate: peak rate of what Muon does not step (embeddings, head, gains); ignored by "adamw".
    warmup_steps: linear warm-up. decay_fraction: share of the steps, at the end, of linear decay to 0
    (warmup-stable-decay). batch_size: sequences a step over all workers. clip: global gradient norm, None for none.
    precision: of the forward and backward products; weights, gradients and optimizer state stay float32.
    z_loss: weight of the mean squared log-partition added to what is minimised (arXiv 2204.02311), never to the loss
    that is recorded.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    optimizer: Literal["muon", "adamw"] = "muon"
    learning_rate: float = Field(gt=0)
    adam_learning_rate: float = Field(default=5e-3, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=10, ge=0)
    decay_fraction: float = Field(default=0.3, ge=0, le=1)
    batch_size: int = Field(gt=0)
    clip: float | None = Field(default=None, gt=0)
    precision: Literal["float32", "bfloat16"] = "float32"
    z_loss: float = Field(default=0.0, ge=0)

    def at_rate(self, rate: float) -> "Recipe":
        """This recipe at another learning rate. With Muon AdamW's rate moves along, in the same proportion."""
        if rate == self.learning_rate:
            return self
        adam = self.adam_learning_rate * (1.0 if self.optimizer == "adamw" else rate / self.learning_rate)
        return self.model_copy(update={"learning_rate": float(rate), "adam_learning_rate": adam})

    def decay_starts(self, steps: int) -> int:
        """Steps of `steps` before the decay. Up to there a longer training takes the same steps."""
        return steps - round(self.decay_fraction * steps)

    def rate(self, step: int, steps: int) -> float:
        """Factor on the peak learning rate at a 0-based step of `steps`: in (0, 1]; linear up, flat, linear down."""
        up = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        decay_steps = round(self.decay_fraction * steps)
        down = (steps - step) / decay_steps if decay_steps else 1.0
        return min(1.0, up, down)


def check_recipe(recipe: Recipe, zero_stage: int) -> None:
    """Raises InputError where the recipe cannot be stepped right at that ZeRO stage.

    At stages 1 and 2 DeepSpeed writes Muon's orthogonalised update into the gradient and then clips it like one, so a
    clip would scale every Muon step down instead of bounding the gradient.
    """
    if recipe.optimizer == "muon" and recipe.clip is not None and zero_stage > 0:
        raise InputError(
            f"recipe.clip: {recipe.clip} with Muon at ZeRO stage {zero_stage} would clip Muon's update, not the "
            f"gradient; set clip to None or zero_stage to 0"
        )
