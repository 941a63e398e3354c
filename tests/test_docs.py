"""What the documentation shows works as printed, and nothing is missing from it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanguard import Guard, Settings
from nanguard.cli.commands import BY_NAME
from nanguard.diagnose.cause import all_causes
from nanguard.guard import events

ROOT = Path(__file__).parents[1]


def blocks(name: str) -> list[str]:
    """Returns the Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def world(folder: Path) -> dict[str, Any]:
    """Returns what the pages take for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    names: dict[str, Any] = {
        "model": lambda batch: model(batch).pow(2).mean(),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100),
        "loader": [torch.randn(4, 8) for _ in range(8)],
        "loss_of": lambda m, batch: m(batch).pow(2).mean(),
        "generator": generator,
        "critic": critic,
        "opt_g": torch.optim.Adam(generator.parameters()),
        "opt_c": torch.optim.Adam(critic.parameters()),
        "critic_loss": lambda b: critic(b).mean() - critic(generator(b).detach()).mean(),
        "generator_loss": lambda b: -critic(generator(b)).mean(),
        "Settings": Settings,
        "Guard": Guard,
    }
    names["guard"] = Guard(model, optimizer)
    names["real_model"] = model
    names["folder"] = folder
    return names


@pytest.mark.parametrize("name", ["docs/index.md", "docs/guard.md", "docs/alerts.md", "README.md"])
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for index, code in enumerate(blocks(name)):
        names = world(tmp_path)
        if name != "README.md" or index != 0:
            # The pages call loss_of(model, batch); the README's first block calls model(batch).
            names["model"] = names["real_model"]
        else:
            code = code.replace("Guard(model,", "Guard(real_model,")
        if "train(guard)" in code:
            names["train"] = lambda guard: None
            code = code.replace("head.weight", "0.weight")
        exec(compile(code, f"{name}[{index}]", "exec"), names)
        if "guard" in names:
            names["guard"].close()


def test_every_setting_is_in_the_guide_with_its_default():
    page = (ROOT / "docs/guard.md").read_text()
    for field in dataclasses.fields(Settings):
        row = re.search(rf"^\| `{field.name}` \| (.*?) \|", page, flags=re.MULTILINE)
        assert row, f"{field.name} is not in docs/guard.md"
        shown = row.group(1).strip("`").strip('"')
        default = field.default
        if isinstance(default, float) and default == int(default):
            default = int(default)
        assert shown == str(default), field.name


def test_event_codes_are_unique_and_named_like_the_others():
    kinds = [value for value in vars(events).values() if isinstance(value, events.Kind)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert len({kind.name for kind in kinds}) == len(kinds)
    assert all(re.fullmatch(r"RUN\d{3}", kind.code) for kind in kinds)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", kind.name) for kind in kinds)


def test_every_file_of_the_guard_is_in_the_tour():
    tour = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "src/nanguard/guard").glob("*.py"):
        if path.name not in ("__init__.py", "events.py"):
            assert path.name in tour, f"{path.name} is not in the tour of CONTRIBUTING.md"


def test_the_readme_shows_the_two_commands_and_what_ci_runs():
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme
    assert "make test" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("cause", all_causes(), ids=lambda cause: cause.code)
def test_every_cause_has_a_page(cause):
    page = (ROOT / "docs/causes" / f"{cause.code}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ .*$", page, flags=re.MULTILINE)
    assert headings == [f"# {cause.code}", "## Symptom", "## Evidence", "## Fix"]
    assert f"[{cause.code}]({cause.code}.md)" in (ROOT / "docs/causes/index.md").read_text()


def test_pages_name_commands_that_there_are():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")]:
        blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        named = re.findall(r"^nanguard ([a-z]+)", "\n".join(blocks), flags=re.MULTILINE)
        assert set(named) <= set(BY_NAME), page.name
