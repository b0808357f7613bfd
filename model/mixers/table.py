"""Every token mixer by the word a pattern uses, and how patterns are read."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from model.config import Layer, ModelConfig
from model.mixers.attention import FULL, SLIDING_WINDOW
from model.mixers.gated_deltanet import GATED_DELTANET
from model.mixers.lightning import LIGHTNING
from model.mixers.mamba2 import MAMBA2
from model.mixers.mixer import Mixer

MIXERS: dict[str, Mixer] = {
    "full": FULL,
    "swa": SLIDING_WINDOW,
    "gdn": GATED_DELTANET,
    "mamba2": MAMBA2,
    "lightning": LIGHTNING,
}

WORDS = ", ".join(f"{name}-W" if mixer.windowed else name for name, mixer in MIXERS.items())


def mixer_of(layer: Layer) -> Mixer:
    """Raises ValueError for a layer whose mixer is not in the table."""
    if layer.mixer not in MIXERS:
        raise ValueError(f"mixer: {layer.mixer!r} is not known; choose from {', '.join(MIXERS)}")
    return MIXERS[layer.mixer]


def parse_pattern(
    pattern: str,
    n_layers: int,
    positions: Literal["rope", "nope", "nope-full"],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Layer, ...]:
    """The layers of a pattern: words such as "swa-8 full", repeated until there are `n_layers`.

    A word names a mixer; `swa-W` has a window W (the current token counts). Positions: `rope` on every layer that can
    be rotated, `nope` on none, `nope-full` on all but the full-attention layers. settings: of mixers by name, the
    fields of their settings that differ from the defaults. Raises ValueError naming the word or field and the remedy.
    """
    words = pattern.split()
    if not words:
        raise ValueError('pattern: empty; write mixer words such as "swa-8 full"')
    if n_layers % len(words):
        raise ValueError(
            f"pattern: {pattern!r} has {len(words)} words, which does not divide {n_layers} layers; "
            f"change the pattern or n_layers"
        )
    chosen = {name: read_settings(name, given) for name, given in (settings or {}).items()}
    period = []
    for word in words:
        name, window = _mixer_and_window(word)
        mixer = MIXERS[name]
        rope = mixer.rotary and (positions == "rope" or (positions == "nope-full" and name != "full"))
        default = None if mixer.settings is None else mixer.settings()
        period.append(Layer(name, window, rope, chosen.get(name, default)))
    return tuple(period) * (n_layers // len(words))


def read_settings(name: str, given: Mapping[str, Any]) -> Any:
    """The settings of the mixer `name` with some fields given. Raises ValueError naming what is wrong."""
    kind = MIXERS[name].settings if name in MIXERS else None
    if kind is None:
        able = ", ".join(word for word, mixer in MIXERS.items() if mixer.settings)
        raise ValueError(f"mixers: {name!r} is no mixer with settings; choose from {able}")
    known = [field.name for field in fields(kind)]
    for field in given:
        if field not in known:
            raise ValueError(f"mixers: {name} has no setting {field!r}; choose from {', '.join(known)}")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"mixers: {name} {error}") from None


def config_from(document: Mapping[str, Any]) -> ModelConfig:
    """The decoder that `dataclasses.asdict` made a document of. Raises ValueError for a document of no decoder."""
    try:
        layers = [dict(layer) for layer in document["layers"]]
        for layer in layers:
            if layer.get("settings") is not None:
                layer["settings"] = read_settings(layer["mixer"], layer["settings"])
        return ModelConfig(**{**document, "layers": tuple(Layer(**layer) for layer in layers)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"decoder: not the fields of one ({error})") from None


def _mixer_and_window(word: str) -> tuple[str, int | None]:
    name, dash, width = word.partition("-")
    if name in MIXERS and MIXERS[name].windowed:
        try:
            window = int(width)
        except ValueError:
            raise ValueError(f"pattern: {word!r} names no window; write {name}-W, W the tokens seen") from None
        if window < 1:
            raise ValueError(f"pattern: {word!r} has window {window}; a window counts the current token, so W >= 1")
        return name, window
    if name not in MIXERS or dash:
        raise ValueError(f"pattern: {word!r} is no known mixer; known: {WORDS}")
    return name, None
