"""A decoder in a folder that transformers loads: weights, configuration, and the source files of the model itself.

config.json          read by AutoConfig; `gridlaw` holds the fields of ModelConfig
model.safetensors    float32, names as in LanguageModel behind "decoder."
modeling_gridlaw.py  the class, and beside it the files it imports, which are those of this room with imports made
                     relative: there is no second model to keep equal
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from model.lm import LanguageModel
from model.mixers.table import config_from

ROOM = Path(__file__).parent
ENTRY = ROOM / "modeling_gridlaw.py"
CONFIG, WEIGHTS, PREFIX = "config.json", "model.safetensors", "decoder."


def write(model: LanguageModel, folder: Path, source: dict[str, Any] | None = None) -> None:
    """Writes an exported decoder into an empty folder. source: where the weights come from, kept in config.json."""
    weights = {PREFIX + name: p.detach().cpu().float().contiguous() for name, p in model.named_parameters()}
    # Through bytes: the library's own writer turns a full disk into an error of its own, this leaves an OSError.
    (folder / WEIGHTS).write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
    (folder / CONFIG).write_text(json.dumps(_document(model, source), indent=1) + "\n", encoding="utf-8")
    for name, text in sources().items():
        (folder / name).write_text(text, encoding="utf-8")


def read(folder: Path) -> LanguageModel:
    """The decoder of an exported folder, from config.json and the weights: none of the folder's code is run.

    Raises ValueError naming the file that is missing or damaged.
    """
    try:
        config = config_from(json.loads((folder / CONFIG).read_text(encoding="utf-8"))["gridlaw"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG}: describes no exported decoder ({error}); export it again") from None
    try:
        stored = safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS}: holds no weights ({error}); export it again") from None
    with torch.device("meta"):
        model = LanguageModel(config)
    try:
        model.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}, assign=True)
    except RuntimeError:
        raise ValueError(f"{folder / WEIGHTS}: its weights are not those of config.json; export it again") from None
    return model


def digest(folder: Path) -> str:
    """12 hexadecimal digits of SHA-256 over an exported folder's weights. Raises ValueError where there are none."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise ValueError(f"{folder / WEIGHTS}: holds no weights ({error}); export it again") from None


def sources() -> dict[str, str]:
    """File name → text of what an exported model consists of, in one flat folder with relative imports.

    Flat, because transformers copies only files beside the modelling file.
    """
    taken = {ENTRY.name: ENTRY}
    files: dict[str, str] = {}
    while missing := taken.keys() - files.keys():
        for name in missing:
            files[name], imported = _relative(taken[name].read_text(encoding="utf-8"))
            for path in imported:
                other = taken.setdefault(path.name, path)
                assert other == path, f"{path} and {other} would be one file of an export; rename one"
    return files


def _relative(text: str) -> tuple[str, list[Path]]:
    """A file of this room with its imports from the room made relative, and the files it imports."""
    found = re.findall(r"^from model\.([\w.]+) import", text, flags=re.MULTILINE)
    paths = [ROOM.joinpath(*module.split(".")).with_suffix(".py") for module in found]
    return re.sub(r"^from model\.(?:\w+\.)*(\w+) import", r"from .\1 import", text, flags=re.MULTILINE), paths


def _document(model: LanguageModel, source: dict[str, Any] | None) -> dict[str, Any]:
    config = model.config
    return {
        "architectures": ["GridlawForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_gridlaw.GridlawConfig",
            "AutoModelForCausalLM": "modeling_gridlaw.GridlawForCausalLM",
        },
        "model_type": "gridlaw",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": False,
        "gridlaw": asdict(config),
        "source": source or {},
    }
