"""What makes two cells the same: a hash of all that changes the weights, and nothing else."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from model.config import ModelConfig
from orchestrator.data.stream import Data
from orchestrator.measure import Measure
from orchestrator.recipe import Recipe

# Raise by hand whenever the same document would train to other weights: initialisation, loss, optimizer, data rules.
SEMANTICS = 1


def document(model: ModelConfig, data: Data, recipe: Recipe, steps: int, seed: int) -> dict[str, Any]:
    """The identity document of a cell, as JSON types. Names, measures, machine and paths are not in it."""
    return _plain(
        {
            "semantics": SEMANTICS,
            "model": _of_model(model),
            "data": of_data(data),
            "recipe": _of_recipe(recipe),
            "steps": steps,
            "seed": seed,
        }
    )


def _of_model(model: ModelConfig) -> dict[str, Any]:
    """Its fields, without choices that later came to exist where they are not made: what was trained stays known."""
    fields = asdict(model)
    fields["layers"] = [_of_layer(layer) for layer in fields["layers"]]
    return _chosen(fields, {"sink_logit": False, "logit_scale": 1.0, "logit_softcap": None})


def _of_layer(layer: dict[str, Any]) -> dict[str, Any]:
    settings = layer["settings"] and _chosen(layer["settings"], dict.fromkeys(layer["settings"]))
    parts = [_of_layer(part) for part in layer["parts"]]
    unset: dict[str, Any] = {"settings": None, "d_ff": None, "sinks": 0, "parts": [], "weight": 1}
    return _chosen({**layer, "settings": settings, "parts": parts}, unset)


def _chosen(fields: dict[str, Any], unset: dict[str, Any]) -> dict[str, Any]:
    """The fields that differ from what they are where nothing is chosen."""
    return {key: value for key, value in fields.items() if key not in unset or value != unset[key]}


def _of_recipe(recipe: Recipe) -> dict[str, Any]:
    return _chosen(recipe.model_dump(mode="json"), {"z_loss": 0.0})


def with_rate(document: dict[str, Any], rate: dict[str, Any]) -> dict[str, Any]:
    """The same document with how a rate is found in place of the rate, which is not known before it has been found.

    With Muon what remains of AdamW's rate is its proportion to Muon's.
    """
    recipe = {**document["recipe"], "learning_rate": rate}
    if recipe["optimizer"] == "muon":
        ratio = document["recipe"]["adam_learning_rate"] / document["recipe"]["learning_rate"]
        recipe["adam_learning_rate"] = {"ratio": round(ratio, 12)}
    return {**document, "recipe": recipe}


def of_measure(measure: Measure) -> str:
    """Identity of a measurement: what is measured and how, whatever checkpoint it is taken on."""
    return digest({"measure": measure.name, **json.loads(json.dumps(measure.identity()))})


def of_trunk(cell_document: dict[str, Any], step: int) -> dict[str, Any]:
    """The identity document of the steps a cell shares with every other budget: before the decay, up to `step`."""
    recipe = {key: value for key, value in cell_document["recipe"].items() if key != "decay_fraction"}
    return {**cell_document, "recipe": recipe, "steps": step, "trunk": True}


def of_data(data: Data) -> dict[str, Any]:
    """The part of an identity document that a data source gives."""
    return _plain({"source": type(data).__name__, **data.identity()})


def digest(document: dict[str, Any]) -> str:
    """12 hexadecimal digits of SHA-256 over the document with sorted keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


def differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """The fields in which two documents differ: `recipe.learning_rate: 0.02 -> 0.01`."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{path}{key}.")
        elif before != after:
            found.append(f"{path}{key}: {json.dumps(before)} -> {json.dumps(after)}")
    return found


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    """As it reads back from JSON: tuples as lists, keys as strings."""
    return json.loads(json.dumps(document))
