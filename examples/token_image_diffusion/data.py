"""The data set: texts as images, made once and kept in the run's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from codec import TokenError, Tokenizer, to_pixels
from corpus import write_texts
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from settings import Settings

# How much of the corpus a fault touches.
_SHARE = 0.02


@dataclass(frozen=True)
class Texts(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images with their masks.

    Attributes:
        images: Pixels from -1 to 1: text, token, channel.
        masks: Which pixels are tokens, and not padding.
        ids: The tokens that the images were made of.
        tokenizer: What turns ids into words.
    """

    images: torch.Tensor
    masks: torch.Tensor
    ids: torch.Tensor
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.masks[index]


def load_texts(settings: Settings, out: Path) -> Texts:
    """Returns the data set of a run; makes it first where the run's folder has none like it."""
    folder = out / "data"
    made_for = {**settings["data"], **settings["codec"], "seed": settings["seed"]}
    stamp = folder / "made_for.json"
    if not stamp.is_file() or json.loads(stamp.read_text(encoding="utf-8")) != made_for:
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        _make(settings, folder)
        stamp.write_text(json.dumps(made_for), encoding="utf-8")
    return _read(settings, folder)


def loader_of(texts: Texts, settings: Settings, order: torch.Generator) -> DataLoader[Any]:
    """Returns what makes batches of a data set, in an order drawn from a random stream."""
    return DataLoader(
        texts,
        batch_size=settings["training.batch_size"],
        shuffle=True,
        drop_last=True,
        generator=order,
        num_workers=settings["data.workers"],
    )


def batches(texts: Texts, settings: Settings, skip: int) -> Iterator[Any]:
    """Yields batches for ever, in an order that depends on seed and epoch only.

    Args:
        texts: The data set.
        settings: The run's settings.
        skip: Batches that an earlier run has had.
    """
    order = torch.Generator()
    loader = loader_of(texts, settings, order)
    epoch, passed = divmod(skip, len(loader))
    while True:
        order.manual_seed(1_000_003 * settings["seed"] + epoch)
        for index, batch in enumerate(loader):
            if index >= passed:
                yield batch
        epoch, passed = epoch + 1, 0


def _make(settings: Settings, folder: Path) -> None:
    """Writes corpus, tokens and images."""
    vocab, length = settings["codec.vocab_size"], settings.tokens
    lines = write_texts(settings["data.texts"], settings["seed"])
    tokenizer = Tokenizer.of(lines, vocab)
    if settings["data.faults"] == "blank-lines":
        for index in _touched(settings):
            lines[index] = ""
    rows = [tokenizer.encode(line)[:length] for line in lines]
    if settings["data.faults"] == "bad-ids":
        for nth, index in enumerate(_touched(settings)):
            rows[index][0] = (vocab + 57, -1, 256**3 + 5)[nth % 3]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    (folder / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.ids, indent=0), encoding="utf-8")
    records = (json.dumps({"id": n, "input_ids": row}) + "\n" for n, row in enumerate(rows))
    (folder / "tokens.jsonl").write_text("".join(records), encoding="utf-8")
    try:
        images = to_pixels(ids, vocab, checked=settings["codec.checked"])
    except TokenError as error:
        raise TokenError(f"{folder / 'tokens.jsonl'}: {error}") from error
    if settings["data.faults"] in ("nan-pixels", "inf-pixels"):
        value = float(settings["data.faults"][:3])
        for index in _touched(settings):
            images[index, 1] = value
    np.save(folder / "images.npy", images.numpy())


def _read(settings: Settings, folder: Path) -> Texts:
    images = torch.from_numpy(np.load(folder / "images.npy", allow_pickle=False))
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    with (folder / "tokens.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line)["input_ids"] for line in lines]
    length = images.shape[1]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    masks = torch.arange(length) < torch.tensor([[len(row)] for row in rows])
    if settings["data.drop_nonfinite"]:
        good = images.isfinite().flatten(1).all(1)
        images, masks, ids = images[good], masks[good], ids[good]
    if len(images) < settings["training.batch_size"]:
        raise TokenError(
            f"{folder}: {len(images)} texts are fewer than a batch of "
            f"{settings['training.batch_size']}; raise data.texts"
        )
    return Texts(images, masks, ids, Tokenizer(list(words), settings["codec.vocab_size"]))


def _touched(settings: Settings) -> list[int]:
    """Returns which texts a fault touches."""
    count = settings["data.texts"]
    draw = torch.Generator().manual_seed(settings["seed"] + 1)
    return torch.randperm(count, generator=draw)[: max(1, int(_SHARE * count))].tolist()
