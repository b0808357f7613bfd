"""A decoder as transformers loads it. `model.export` writes this file and those it imports into an exported folder.

AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from model.lm import LanguageModel
from model.mixers.table import config_from


class GridlawConfig(PretrainedConfig):
    """gridlaw: the fields of `model.config.ModelConfig`; the other names are what tools for any model look for."""

    model_type = "gridlaw"

    def __init__(self, gridlaw: dict[str, Any] | None = None, **names: Any) -> None:
        self.gridlaw = gridlaw
        super().__init__(**names)


class GridlawForCausalLM(GenerationMixin, PreTrainedModel):
    """Logits and loss of an exported decoder. No state is kept: `generate` reads the whole text for each token."""

    config_class = GridlawConfig
    base_model_prefix = "decoder"

    def __init__(self, config: GridlawConfig) -> None:
        super().__init__(config)
        if config.gridlaw is None:
            raise ValueError("gridlaw: not in config.json; export the model again with gridlaw export")
        self.decoder = LanguageModel(config_from(config.gridlaw))
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.decoder.embedding

    def get_output_embeddings(self) -> Any:
        return self.decoder.head

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **rest: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **rest: Any
    ) -> CausalLMOutput:
        """input_ids, labels: int64 [B, T]; a label is shifted to the token before it, -100 counts for nothing.

        Raises ValueError where attention_mask hides a token: recurrent layers would read it all the same.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("attention_mask: hides tokens, which recurrent layers read; give texts of one length")
        logits_BTV = self.decoder(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits_BTV)
