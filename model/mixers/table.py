"""Every token mixer by the word a pattern uses, and how patterns are read."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from model.config import Layer, ModelConfig, rotary_width
from model.mixers.attention import FULL, SLIDING_WINDOW
from model.mixers.gated_deltanet import GATED_DELTANET
from model.mixers.heads import head_wise
from model.mixers.lightning import LIGHTNING
from model.mixers.mamba2 import MAMBA2
from model.mixers.mixer import Mixer

# Which layers rotate: all, none, all but full attention, or by mixer.
Positions = Literal["rope", "nope", "nope-full"] | Mapping[str, Literal["rope", "nope"] | float]

MIXERS: dict[str, Mixer] = {
    "full": FULL,
    "swa": SLIDING_WINDOW,
    "gdn": GATED_DELTANET,
    "mamba2": MAMBA2,
    "lightning": LIGHTNING,
}

HEAD_WISE = head_wise(MIXERS)

WORDS = ", ".join(f"{name}-W" if mixer.windowed else name for name, mixer in MIXERS.items())


def mixer_of(layer: Layer) -> Mixer:
    """Raises ValueError for a layer whose mixer is not in the table."""
    if layer.parts:
        return HEAD_WISE
    if layer.mixer not in MIXERS:
        raise ValueError(f"mixer: {layer.mixer!r} is not known; choose from {', '.join(MIXERS)}")
    return MIXERS[layer.mixer]


def parse_pattern(
    pattern: str,
    n_layers: int,
    positions: Positions,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    sinks: int = 0,
) -> tuple[Layer, ...]:
    """The layers of a pattern: words such as "swa-8 full", repeated until there are `n_layers`.

    A word names a mixer; `swa-W` has a window W (the current token counts). Words joined by + share the heads of one
    layer evenly, or by weights: "swa-8:3+full". Positions: `rope` on every layer that can be rotated, `nope` on none,
    `nope-full` on all but the full-attention layers, or by mixer {"full": "nope", "swa": 0.25}, a number the share of
    each head that turns. settings: of mixers by name, the fields of their settings that differ from the defaults.
    sinks: of the layers with a window. Raises ValueError naming the word or field and the remedy.
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
    rotated = _rotated(positions)

    def layer_of(word: str, weight: int = 1) -> Layer:
        name, window = _mixer_and_window(word)
        mixer = MIXERS[name]
        own = chosen.get(name, None if mixer.settings is None else mixer.settings())
        seen = sinks if mixer.windowed else 0
        return Layer(name, window, mixer.rotary and rotated[name], own, sinks=seen, weight=weight)

    period = []
    for word in words:
        parts = [_weighed(part, word) for part in word.split("+")]
        if len(parts) == 1:
            period.append(layer_of(word))
        else:
            period.append(Layer("heads", rope=False, parts=tuple(layer_of(*part) for part in parts)))
    return tuple(period) * (n_layers // len(words))


def rotary_widths(config: ModelConfig) -> set[int]:
    """How many numbers of a head turn, over all layers."""
    return {rotary_width(config.head_dim, layer.rope) for layer in config.parts()} - {0}


def _rotated(positions: Positions) -> dict[str, bool | float]:
    """The `rope` of a layer by its mixer."""
    if isinstance(positions, str):
        return {name: positions == "rope" or (positions == "nope-full" and name != "full") for name in MIXERS}
    rotary = [name for name, mixer in MIXERS.items() if mixer.rotary]
    rotated: dict[str, bool | float] = dict.fromkeys(MIXERS, True)
    for name, rope in positions.items():
        if name not in rotary:
            raise ValueError(f"positions: {name!r} is no mixer with positions; choose from {', '.join(rotary)}")
        if isinstance(rope, str):
            rotated[name] = rope == "rope"
        elif 0 < rope < 1:
            rotated[name] = float(rope)
        else:
            raise ValueError(f"positions: {name} turns {rope} of each head; give a share between 0 and 1, rope or nope")
    return rotated


def _weighed(part: str, word: str) -> tuple[str, int]:
    """("swa-8", 3) of "swa-8:3"."""
    name, colon, weight = part.partition(":")
    if colon and "+" not in word:
        raise ValueError(f"pattern: {word!r} weighs a layer of one mixer; join several by +, as in swa-8:3+full")
    if colon and (not weight.isdecimal() or int(weight) < 1):
        raise ValueError(f"pattern: {part!r} in {word!r} has no weight; write {name}:3, a whole number of 1 or more")
    return name, int(weight or 1)


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
        return ModelConfig(**{**document, "layers": tuple(_layer_from(layer) for layer in document["layers"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"decoder: not the fields of one ({error})") from None


def _layer_from(document: Mapping[str, Any]) -> Layer:
    settings = document.get("settings")
    return Layer(
        **{
            **document,
            "settings": None if settings is None else read_settings(document["mixer"], settings),
            "parts": tuple(_layer_from(part) for part in document.get("parts", ())),
        }
    )


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
