"""Writes the corpus: short texts from a small grammar, the same for the same seed."""

from __future__ import annotations

import random

_TOPICS: dict[str, dict[str, str]] = {
    "harbour": {
        "who": "captain pilot sailor fisherman engineer cook passenger harbourmaster diver",
        "thing": "ferry trawler anchor rope lantern crate net engine chart sail compass rudder",
        "place": "quay lighthouse breakwater dock channel bay shipyard customs-house",
        "act": "moored repaired unloaded painted inspected towed signalled weighed sold",
        "kind": "rusty heavy wet narrow old grey northern damaged",
    },
    "kitchen": {
        "who": "baker waiter chef neighbour guest apprentice grandmother butcher grocer",
        "thing": "bread soup kettle knife basket onion pastry oven table lemon cheese recipe",
        "place": "pantry market cellar bakery garden counter window courtyard",
        "act": "sliced tasted carried bought burned kneaded salted wrapped praised",
        "kind": "warm fresh bitter copper sharp small sweet empty",
    },
    "weather": {
        "who": "farmer forecaster hiker shepherd teacher driver postman observer gardener",
        "thing": "storm cloud gauge field bridge fence report forecast river orchard roof road",
        "place": "valley ridge station village forest plain coast summit",
        "act": "measured watched crossed noted feared flooded covered left mapped",
        "kind": "sudden cold pale distant quiet steep muddy late",
    },
    "workshop": {
        "who": "carpenter clockmaker student welder inventor printer mechanic glazier customer",
        "thing": "clock lathe hinge drawing ladder press spring lamp motor drill bench wheel",
        "place": "attic yard factory museum corner studio railway office",
        "act": "built measured oiled tested dropped returned copied fastened designed",
        "kind": "precise broken brass wooden loud clever borrowed half-finished",
    },
}
_WHEN = ("yesterday", "today", "at-dawn", "at-noon", "last-week", "in-spring", "after-the-rain")
_JOIN = ("and", "but", "while", "because", "although", "so")
_PLACED = ("near", "behind", "inside", "under", "beside", "beyond")


def write_texts(count: int, seed: int) -> list[str]:
    """Returns lines of text; each is one to four sentences about one topic."""
    words = random.Random(seed)
    lines = []
    for _ in range(count):
        topic = {part: text.split() for part, text in words.choice([*_TOPICS.values()]).items()}
        sentences = [_sentence(words, topic) for _ in range(words.randint(1, 4))]
        lines.append(" ".join(sentences))
    return lines


def _sentence(words: random.Random, topic: dict[str, list[str]]) -> str:
    text = _clause(words, topic)
    if words.random() < 0.4:
        text += f" {words.choice(_JOIN)} {_clause(words, topic)}"
    if words.random() < 0.5:
        text = f"{words.choice(_WHEN)} {text}"
    return f"{text} ."


def _clause(words: random.Random, topic: dict[str, list[str]]) -> str:
    kind = f"{words.choice(topic['kind'])} " if words.random() < 0.6 else ""
    text = f"the {words.choice(topic['who'])} {words.choice(topic['act'])} the {kind}"
    text += words.choice(topic["thing"])
    if words.random() < 0.5:
        text += f" {words.choice(_PLACED)} the {words.choice(topic['place'])}"
    return text
