"""An exported folder gives the model's own logits: to transformers, in a process without gridlaw, and to ourselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import export
from model.config import ModelConfig
from model.lm import LanguageModel, build
from model.mixers.table import MIXERS, config_from, parse_pattern

torch.set_num_threads(1)
SETTINGS = {"mamba2": {"head_dim": 16, "d_state": 8}, "gdn": {"key_dim": 4}, "lightning": {"slopes": "layer-scaled"}}
ARMS = {
    "full": ("full", "rope", {}),
    "swa": ("swa-5 full", "nope-full", {"qk_norm": 1.5, "key_shift": True}),
    "gdn": ("gdn full", "rope", {"mlp": "relu2", "norm_gain": False}),
    "mamba2": ("mamba2 full", "nope", {}),
    "lightning": ("lightning full", "rope", {"tied_embeddings": True}),
    "shared": ("swa-5+full gdn+lightning", {"swa": 0.5}, {"sink_logit": True, "logit_softcap": 4.0}),
}
# Run with the folder alone: no room of gridlaw can be imported.
LOAD = """
import sys
sys.modules |= dict.fromkeys(("model", "orchestrator", "analysis", "experiments"))
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens = torch.load(f"{folder}/../tokens.pt", weights_only=True)
    with torch.no_grad():
        out = model(tokens, labels=tokens)
        written = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    torch.save({"logits": out.logits, "loss": out.loss, "written": written}, f"{folder}/../{Path(folder).name}.pt")
    try:
        model(tokens, attention_mask=(tokens > 3).long())
        raise SystemExit("a mask was let pass")
    except ValueError as error:
        assert "attention_mask" in str(error)
"""


def awake(arm: str) -> LanguageModel:
    pattern, positions, changes = ARMS[arm]
    layers = parse_pattern(pattern, 2, positions, {k: v for k, v in SETTINGS.items() if k == pattern.split()[0]})
    model = build(ModelConfig(23, 32, 32, 4, 2, 8, 48, layers, **changes), 0)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.unique().numel() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 23, (2, 41), generator=torch.Generator().manual_seed(4))


def written(arm: str, folder: Path) -> LanguageModel:
    model = awake(arm)
    folder.mkdir()
    export.write(model, folder, {"step": 3})
    return model


@torch.no_grad()
def test_transformers_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'gridlaw[export]'")
    models = {arm: written(arm, tmp_path / arm) for arm in ARMS}
    torch.save(tokens(), tmp_path / "tokens.pt")
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOAD, *(str(tmp_path / arm) for arm in ARMS)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for arm, model in models.items():
        theirs = torch.load(tmp_path / f"{arm}.pt", weights_only=True)
        assert torch.allclose(theirs["logits"], model(tokens()), atol=1e-5), arm
        assert torch.allclose(theirs["loss"], model.loss(tokens()[:, :-1], tokens()[:, 1:]), atol=1e-5), arm
        text = tokens()
        for _ in range(4):
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
        assert torch.equal(theirs["written"], text), arm


def test_every_mixer_is_exported() -> None:
    assert {
        part.partition("-")[0]
        for pattern, _, _ in ARMS.values()
        for word in pattern.split()
        for part in word.split("+")
    } == set(MIXERS)


@pytest.mark.parametrize("arm", ARMS)
@torch.no_grad()
def test_a_folder_is_read_back(arm: str, tmp_path: Path) -> None:
    model = written(arm, tmp_path / "out")
    (tmp_path / "out" / "modeling_gridlaw.py").write_text("raise SystemExit")  # none of its code is run
    back = export.read(tmp_path / "out")
    assert back.config == model.config
    assert torch.equal(back(tokens()), model(tokens()))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["source"] == {"step": 3}


def test_the_sources_are_the_rooms_own() -> None:
    """Nothing but the imports differs, and nothing outside the folder is imported but torch and transformers."""
    for name, text in export.sources().items():
        own = next(path for path in export.ROOM.rglob("*.py") if path.name == name)
        for ours, theirs in zip(own.read_text().splitlines(), text.splitlines(), strict=True):
            assert ours == theirs or (ours.startswith("from model.") and theirs.startswith("from .")), (name, theirs)
        assert "from model" not in text and "import model" not in text, name


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(ValueError, match=r"config\.json: describes no exported decoder"):
        export.read(tmp_path)
    written("full", folder)
    (folder / "config.json").write_text('{"gridlaw": {"layers": [{"mixer": "full"}], "width": 3}}')
    with pytest.raises(ValueError, match=r"config\.json: describes no .*width"):
        export.read(folder)
    other = tmp_path / "other"
    written("gdn", other)
    (folder / "config.json").write_text((other / "config.json").read_text())
    with pytest.raises(ValueError, match="not those of config"):
        export.read(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.safetensors: holds no weights"):
        export.read(folder)


def test_a_configuration_survives_json() -> None:
    for arm in ARMS:
        config = awake(arm).config
        assert config_from(json.loads(json.dumps(export._document(awake(arm), None)))["gridlaw"]) == config
