"""What a system cannot train with is said in one line, before training starts."""

from __future__ import annotations

import pytest
import yaml
from examples.story import NAMES, Story

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module", params=NAMES)
def story(request, tmp_path_factory):
    """One of the systems, in a folder of its own."""
    return Story.of(request.param, tmp_path_factory.mktemp(request.param))


def said(story, words):
    """Returns the one line a command ends with."""
    alone = story.told.get("alone") or story.told["train"]
    ended = story.run(
        [*Story(story.folder, {**story.told, "train": alone}).command("bad")[:2], *words]
    )
    assert ended.code == 2, ended.output[-2000:]
    assert "Traceback" not in ended.output
    line = ended.output.strip().splitlines()[-1]
    assert line.startswith("train.py: ")
    return line


def written(story, change):
    """Writes a changed configuration; returns its name."""
    config = yaml.safe_load((story.folder / story.told["config"]).read_text(encoding="utf-8"))
    change(config)
    (story.folder / "bad.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return "bad.yaml"


def section(config):
    """Returns the settings of the training, whatever a system calls them."""
    return config.get("training") or config["trainer"]


def rate(config):
    """Returns the key of the learning rate."""
    names = ("lr", "learning_rate", "train_lr")
    return next(name for name in names if name in section(config))


def test_a_missing_key(story):
    name = written(story, lambda config: section(config).pop(rate(config)))
    line = said(story, ["--config", name])
    assert "missing" in line


def test_a_value_of_a_wrong_type(story):
    def change(config):
        section(config)[rate(config)] = "fast"

    line = said(story, ["--config", written(story, change)])
    assert "fast" in line or "number" in line


def test_a_configuration_that_is_not_there(story):
    assert "nowhere.yaml" in said(story, ["--config", "nowhere.yaml"])


def test_a_checkpoint_that_is_not_one(story):
    (story.folder / "other.pt").write_bytes(b"not a checkpoint")
    line = said(story, ["--config", story.told["config"], "--resume", "other.pt"])
    assert "other.pt" in line
