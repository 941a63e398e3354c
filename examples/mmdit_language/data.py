"""A corpus with grammar and topics, and the latents of its documents.

A document is a few sentences about one topic. Words agree in number and keep to their topic, so a
masked word can be told from its neighbours. The latents come from a sentence encoder that is never
trained: word vectors from co-occurrence counts, averaged over the parts of a document.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

PAD, MASK, END = 0, 1, 2
_SPECIAL = ["<pad>", "<mask>", "."]
# Nouns, verbs, adjectives and places of each topic; the first ones are the most frequent.
_TOPICS = {
    "harbour": "boat sailor net gull | mend tow watch | rusty salty tall | pier quay",
    "kitchen": "cook pan onion guest | stir taste serve | warm sharp clean | stove pantry",
    "school": "pupil teacher book bell | read copy answer | quiet clever young | hall yard",
    "farm": "cow farmer gate tractor | feed lead mow | muddy broad old | barn meadow",
    "theatre": "actor mask curtain lamp | lift paint admire | golden heavy grand | stage balcony",
    "clinic": "nurse doctor chart bed | move sign test | white narrow calm | ward lobby",
}
_SINGULAR, _PLURAL = ["the", "a", "every"], ["the", "some", "two"]
_ADVERBS, _PREPOSITIONS = ["slowly", "often", "never"], ["near", "behind", "inside"]
_JOINS = ["and", "while", "before"]


class Corpus(Dataset):
    """Documents as token ids, with their latents."""

    def __init__(self, tokens, lengths, latents):
        self.tokens = torch.from_numpy(tokens)
        self.lengths = torch.from_numpy(lengths)
        self.latents = torch.from_numpy(latents)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {
            "tokens": self.tokens[index],
            "length": self.lengths[index],
            "latents": self.latents[index],
        }


def words():
    """Returns the vocabulary; a word's place is its token id."""
    found = dict.fromkeys([*_SPECIAL, *_SINGULAR, *_PLURAL, *_ADVERBS, *_PREPOSITIONS, *_JOINS])
    for topic in _TOPICS.values():
        nouns, verbs, adjectives, places = (part.split() for part in topic.split("|"))
        for word in (*nouns, *verbs):
            found.update(dict.fromkeys((word, word + "s")))
        found.update(dict.fromkeys((*adjectives, *places)))
    return list(found)


def load(out, *, seed, documents, blank_lines, text_length, latent_count, latent_dim):
    """Returns the corpus for training and for evaluation; made once and kept in ``out``."""
    made = {
        "seed": seed,
        "documents": documents,
        "blank_lines": blank_lines,
        "text_length": text_length,
        "latent_count": latent_count,
        "latent_dim": latent_dim,
    }
    arrays = _cached(Path(out) / "data" / "corpus.npz", json.dumps(made), lambda: _make(**made))
    held_out = max(1, documents // 10)
    parts = [arrays[name] for name in ("tokens", "lengths", "latents")]
    train = Corpus(*(part[held_out:] for part in parts))
    return train, Corpus(*(part[:held_out] for part in parts))


def _cached(path, made, make):
    if path.exists():
        with np.load(path, allow_pickle=False) as file:
            if str(file["made"]) == made:
                return {name: file[name] for name in ("tokens", "lengths", "latents")}
    arrays = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    half_written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with half_written.open("wb") as file:
        np.savez(file, made=np.array(made), **arrays)
    half_written.replace(path)
    return arrays


def _make(*, seed, documents, blank_lines, text_length, latent_count, latent_dim):
    rng = np.random.default_rng(seed)
    ids = {word: index for index, word in enumerate(words())}
    tokens = np.full((documents, text_length), PAD, dtype=np.int64)
    lengths = np.zeros(documents, dtype=np.int64)
    # Every crawl has some blank lines: documents without a word.
    blank = set(rng.choice(documents, size=blank_lines, replace=False).tolist())
    for row in range(documents):
        text = _document(rng, text_length) if row not in blank else []
        tokens[row, : len(text)] = [ids[word] for word in text]
        lengths[row] = len(text)
    vectors = _word_vectors(tokens, len(ids), latent_dim)
    return {
        "tokens": tokens,
        "lengths": lengths,
        "latents": _latents(tokens, lengths, vectors, latent_count),
    }


def _document(rng, room):
    """Returns sentences about one topic, as many as there is room for."""
    topic = [part.split() for part in list(_TOPICS.values())[rng.integers(len(_TOPICS))].split("|")]
    text = []
    while True:
        sentence = [*_clause(rng, topic)]
        if rng.random() < 0.3:
            sentence += [_pick(rng, _JOINS), *_clause(rng, topic)]
        if len(text) + len(sentence) + 1 > room:
            return text or [*_clause(rng, topic)[: room - 1], "."]
        text += [*sentence, "."]


def _clause(rng, topic):
    nouns, verbs, adjectives, places = topic
    plural = rng.random() < 0.4
    said = [_pick(rng, _PLURAL if plural else _SINGULAR)]
    if rng.random() < 0.4:
        said.append(_pick(rng, adjectives))
    said.append(_pick(rng, nouns) + ("s" if plural else ""))
    if rng.random() < 0.3:
        said.append(_pick(rng, _ADVERBS))
    said.append(_pick(rng, verbs) + ("" if plural else "s"))
    said += ["the", _pick(rng, nouns)]
    if rng.random() < 0.5:
        said += [_pick(rng, _PREPOSITIONS), "the", _pick(rng, places)]
    return said


def _pick(rng, choices):
    """Returns one of the choices, the first ones most often."""
    return choices[min(rng.geometric(0.5), len(choices)) - 1]


def _word_vectors(tokens, vocabulary, dim):
    """Returns vectors whose inner products tell which words stand in the same documents."""
    present = np.zeros((len(tokens), vocabulary))
    np.put_along_axis(present, tokens, 1.0, axis=1)
    present[:, PAD] = 0.0
    together = present.T @ present
    total = together.sum() or 1.0
    expected = np.outer(together.sum(1), together.sum(0)) / total
    information = np.log(np.maximum(together, 1e-9) / np.maximum(expected, 1e-9)).clip(0.0, 6.0)
    left, strengths, _ = np.linalg.svd(information, hermitian=True)
    found = left * np.sqrt(strengths)
    wide = np.zeros((vocabulary, dim))
    kept = min(dim, vocabulary)
    wide[:, :kept] = found[:, :kept]
    wide[PAD] = 0.0
    return wide


def _latents(tokens, lengths, vectors, count):
    """Returns the mean word vector of each part of a document; 0 where there is no word."""
    found = np.zeros((len(tokens), count, vectors.shape[1]))
    for row, length in enumerate(lengths):
        for part, places in enumerate(np.array_split(np.arange(length), count)):
            if len(places):
                found[row, part] = vectors[tokens[row, places]].mean(0)
    return (found / np.sqrt((found**2).mean())).astype(np.float32)
