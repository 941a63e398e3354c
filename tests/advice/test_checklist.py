"""The checklist of small projects: every answer with the line it comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from nanguard.advice.checklist import fill_in
from nanguard.advice.checklist_points import Answer, all_points
from nanguard.check.engine import Check, Plan
from nanguard.check.rule import all_rules
from nanguard.check.selection import Selection
from nanguard.cli.checklist_report import checklist_as_text

LOOP = """
    import torch
    import torch.nn.functional as F
    def train(model, loader, optimizer):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
"""
CAREFUL = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.amp import GradScaler, autocast
    from torch.utils.data import DataLoader
    from torch.utils.tensorboard import SummaryWriter

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.bias = nn.Parameter(torch.zeros(8))
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, self.norm(v))

    def train(model, data, args):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
        scaler = GradScaler()
        writer = SummaryWriter()
        loader = DataLoader(data, batch_size=8, drop_last=True)
        model.load_state_dict(torch.load("last.pt", weights_only=True))
        for step, (x, y) in enumerate(loader):
            assert torch.isfinite(x).all()
            if y.max() >= 10:
                raise ValueError(y.max())
            with autocast("cuda", dtype=torch.float16):
                out = model(x, x, x)
                text_loss = F.cross_entropy(out, y)
                latent_loss = F.mse_loss(out, x)
                loss = text_loss + latent_loss
            if not torch.isfinite(loss):
                continue
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            warm.step()
            writer.add_scalars("loss", {"text": text_loss, "latent": latent_loss, "norm": norm})
            if step % 1000 == 0:
                torch.save(model.state_dict(), "last.pt")
"""


def project(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    return folder


def answers(folder: Path, **plan: Any) -> dict[str, Answer]:
    check = Check(Plan(root=str(folder), jobs=1, **plan))
    check.run([str(folder)])
    filled = fill_in(check, [str(folder)])
    return {answer.point.name: answer for answer in filled.answers}


def told(answer: Answer) -> tuple[str, int | None]:
    return answer.verdict.value, answer.places[0].line if answer.places else None


def line_of(there: str, text: str = CAREFUL) -> int:
    """Returns the first line of a file that holds something."""
    lines = text.lstrip("\n").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if there in line)


def call(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanguard", "check", "--checklist", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100"},
    )


def test_points_and_rules_know_each_other():
    names = {rule.name for rule in all_rules() if rule.reads in ("code", "config")}
    asked = {rule for point in all_points() for rule in point.faults}
    assert asked == names
    assert len({point.name for point in all_points()}) == len(all_points())
    assert all(point.question.endswith("?") for point in all_points())
    assert all(point.advice.endswith(".") for point in all_points())


def test_the_page_lists_every_point():
    page = (Path(__file__).parents[2] / "docs/checklist.md").read_text()
    for point in all_points():
        assert f"| {point.section} | `{point.name}` | {point.question} |" in page


def test_code_of_others_is_no_evidence(tmp_path: Path):
    clips = "import torch\n\n\ndef step(m):\n    torch.nn.utils.clip_grad_norm_(m, 1.0)\n"
    folder = project(tmp_path, train__py=LOOP)
    (folder / "third_party").mkdir()
    (folder / "third_party" / "clips.py").write_text(clips)
    assert answers(folder)["gradients-clipped"].verdict.value == "no"
    (folder / "clips.py").write_text(clips)
    assert answers(folder)["gradients-clipped"].verdict.value == "yes"


def test_an_empty_project_cannot_be_told_anything_about(tmp_path: Path):
    project(tmp_path, hello__py="print('hello')")
    assert {told(answer) for answer in answers(tmp_path).values()} == {("cannot tell", None)}


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("inputs-checked", "assert torch.isfinite(x).all()"),
        ("labels-in-range", "if y.max() >= 10:"),
        ("masks-are-safe", "scaled_dot_product_attention"),
        ("attention-scale", "scaled_dot_product_attention"),
        ("norms-have-eps", "nn.LayerNorm(8)"),
        ("functions-are-bounded", "F.cross_entropy"),
        ("batchnorm-has-batches", "class Net"),
        ("loss-checked", "if not torch.isfinite(loss):"),
        ("gradients-clipped", "clip_grad_norm_"),
        ("clip-after-unscale", "unscale_"),
        ("gradient-norm-watched", "norm = torch"),
        ("bad-step-left-out", "if not torch.isfinite(loss):"),
        ("ranks-agree", "scaler.step(optimizer)"),
        ("nothing-hidden", "scaler.step(optimizer)"),
        ("loss-terms-reported", "writer.add_scalars"),
        ("learning-rate-in-range", "lr=1e-4"),
        ("warm-up", "LinearLR"),
        ("precision-aligned", 'autocast("cuda"'),
        ("checkpoints-regular", "torch.save"),
        ("resume-is-safe", "weights_only=True"),
        ("metrics-kept", "SummaryWriter()"),
    ],
)
def test_what_a_careful_project_does(name: str, there: str, tmp_path: Path):
    project(tmp_path, train__py=CAREFUL)
    assert told(answers(tmp_path)[name]) == ("yes", line_of(there))


@pytest.mark.parametrize(
    "name",
    [
        "guarded",
        "loss-checked",
        "gradients-clipped",
        "gradient-norm-watched",
        "bad-step-left-out",
        "warm-up",
        "checkpoints-regular",
    ],
)
def test_what_a_bare_loop_lacks(name: str, tmp_path: Path):
    project(tmp_path, train__py=LOOP)
    assert told(answers(tmp_path)[name]) == ("no", 7)


@pytest.mark.parametrize("name", ["inputs-checked", "labels-in-range", "loss-terms-reported"])
def test_what_a_bare_loop_leaves_open(name: str, tmp_path: Path):
    project(tmp_path, train__py=LOOP)
    assert told(answers(tmp_path)[name]) == ("cannot tell", None)


@pytest.mark.parametrize(
    ("old", "new", "name", "there"),
    [
        ("not torch.isfinite(loss)", "torch.isnan(loss)", "loss-checked", "torch.isnan"),
        ("weights_only=True", "weights_only=False", "resume-is-safe", "torch.load"),
        ("scaler.unscale_(optimizer)", "pass", "clip-after-unscale", "clip_grad_norm_"),
        ("parameters(), 1.0", "parameters(), 1e6", "gradients-clipped", "clip_grad_norm_"),
        ("norm = torch.nn.", "torch.nn.", "gradient-norm-watched", "clip_grad_norm_"),
        ("torch.zeros(8)", "torch.empty(8)", "parameters-initialised", "torch.empty"),
        ("= text_loss + latent_loss", "= text_loss.clamp(max=100)", "nothing-hidden", "clamp"),
    ],
)
def test_a_fault_turns_the_answer(old: str, new: str, name: str, there: str, tmp_path: Path):
    assert old in CAREFUL
    spoiled = CAREFUL.replace(old, new)
    project(tmp_path, train__py=spoiled)
    assert told(answers(tmp_path)[name]) == ("no", line_of(there, spoiled))


def test_a_rule_that_did_not_look_makes_no_yes(tmp_path: Path):
    project(tmp_path, train__py=CAREFUL)
    less = Selection(ignore=("scale-from-wrong-dim",))
    found = answers(tmp_path, selection=less)
    assert found["attention-scale"].verdict.value == "cannot tell"
    assert found["masks-are-safe"].verdict.value == "yes"


def test_several_ranks_have_to_agree(tmp_path: Path):
    alone = LOOP.replace("import torch\n", "import torch\n    import torch.distributed as dist\n")
    project(tmp_path, train__py=alone)
    assert told(answers(tmp_path)["ranks-agree"]) == ("cannot tell", None)
    together = alone.replace(
        "            loss.backward()\n",
        "            bad = (~torch.isfinite(loss)).float()\n"
        "            dist.all_reduce(bad)\n"
        "            if bad > 0:\n"
        "                continue\n"
        "            loss.backward()\n",
    )
    project(tmp_path, train__py=together)
    found = answers(tmp_path)
    assert told(found["ranks-agree"]) == ("yes", 8)
    assert told(found["bad-step-left-out"]) == ("yes", 9)


def test_nanguard_run_in_a_script_answers_for_the_loop(tmp_path: Path):
    project(
        tmp_path,
        train__py=LOOP,
        go__sh="""
            # nanguard run -- python other.py
            nanguard run -- python train.py
        """,
    )
    found = answers(tmp_path)
    for name in ("guarded", "loss-checked", "bad-step-left-out"):
        assert told(found[name]) == ("yes", 2)
        assert found[name].places[0].path.endswith("go.sh")


def test_a_guard_in_the_loop_answers_too(tmp_path: Path):
    guarded = """
        import torch
        from nanguard import Guard
        def train(model, loader, optimizer):
            guard = Guard(model, optimizer)
            for batch in guard.watch(loader):
                loss = guard.loss(text=model(batch), latent=model(batch).pow(2))
                guard.backward(loss)
                guard.step(max_norm=1.0)
    """
    project(tmp_path, train__py=guarded)
    found = answers(tmp_path)
    assert told(found["guarded"]) == ("yes", 4)
    assert told(found["loss-terms-reported"]) == ("yes", 6)
    assert told(found["gradients-clipped"]) == ("yes", 8)


def test_a_configuration_answers_with_its_lines(tmp_path: Path):
    project(
        tmp_path,
        train__yaml="""
            optimizer: adamw
            lr: 5.0e-5
            max_grad_norm: 0.5
            warmup_steps: 500
            max_steps: 20000
            bf16: true
            save_steps: 1000
            limit_train_batches: 0.01
        """,
    )
    found = answers(tmp_path)
    lines = {
        "learning-rate-in-range": 2,
        "gradients-clipped": 3,
        "warm-up": 4,
        "precision-aligned": 6,
        "checkpoints-regular": 7,
        "small-trial": 8,
    }
    assert {name: told(found[name]) for name in lines} == {n: ("yes", k) for n, k in lines.items()}


def test_the_trainer_of_transformers_does_some_things_and_hides_others(tmp_path: Path):
    script = """
        from transformers import Trainer, TrainingArguments
        arguments = TrainingArguments("out", warmup_ratio=0.1)
        Trainer(model, arguments).train()
    """
    project(tmp_path, train__py=script)
    found = answers(tmp_path)
    assert told(found["gradients-clipped"]) == ("yes", 3)
    assert told(found["checkpoints-regular"]) == ("yes", 3)
    assert told(found["loss-checked"]) == ("no", 3)
    assert told(found["nothing-hidden"]) == ("no", 3)
    mended = script.replace("ratio=0.1", "ratio=0.1, logging_nan_inf_filter=False")
    project(tmp_path, train__py=mended)
    assert told(answers(tmp_path)["nothing-hidden"]) == ("yes", 2)
    off = script.replace("ratio=0.1", "ratio=0.1, max_grad_norm=0, save_strategy='no'")
    project(tmp_path, train__py=off)
    assert told(answers(tmp_path)["gradients-clipped"]) == ("no", 2)
    assert told(answers(tmp_path)["checkpoints-regular"]) == ("no", 2)


def test_a_scaler_that_may_be_off_decides_nothing(tmp_path: Path):
    scaled = LOOP.replace(
        "        for x", "        scaler = torch.amp.GradScaler(enabled=AMP)\n        for x"
    )
    project(tmp_path, train__py=scaled)
    assert told(answers(tmp_path)["bad-step-left-out"]) == ("cannot tell", None)
    project(tmp_path, train__py=scaled.replace("enabled=AMP", ""))
    assert told(answers(tmp_path)["bad-step-left-out"]) == ("yes", 4)


def test_tests_are_asked_about_numerics_and_are_no_training(tmp_path: Path):
    project(tmp_path, test_model__py=CAREFUL.replace("isfinite", "isreal"))
    found = answers(tmp_path)
    assert found["gradients-clipped"].verdict.value == "cannot tell"
    assert found["numerics-tested"].verdict.value == "no"
    project(tmp_path, test_model__py=CAREFUL)
    assert told(answers(tmp_path)["numerics-tested"]) == ("yes", line_of("isfinite(x)"))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("print(f'{loss.item()} {loss_scale} {loss_meter}')", "loss-terms-reported"),
        ("assert labels is not None", "labels-in-range"),
        ("torch.profiler.schedule(wait=1, warmup=5, active=1)", "warm-up"),
        ("logger.log('x')", "functions-are-bounded"),
    ],
)
def test_what_only_looks_like_an_answer(line: str, name: str, tmp_path: Path):
    project(tmp_path, train__py=f"import torch\ntorch.manual_seed(0)\n{line}\n")
    assert told(answers(tmp_path)[name]) == ("cannot tell", None)


def test_notebooks_answer_with_lines_of_the_file(tmp_path: Path):
    source = [line + "\n" for line in textwrap.dedent(LOOP).strip().splitlines()]
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": source}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    text = json.dumps(book, indent=1)
    (tmp_path / "train.ipynb").write_text(text)
    answer = answers(tmp_path)["guarded"]
    assert answer.verdict.value == "no"
    line = answer.places[0].line
    assert line is not None
    assert "optimizer.step()" in text.splitlines()[line - 1]


def test_version_control_keeps_the_changes(tmp_path: Path):
    (tmp_path / "inner").mkdir()
    project(tmp_path / "inner", train__py=LOOP)
    assert answers(tmp_path / "inner")["changes-kept"].verdict.value == "cannot tell"
    (tmp_path / ".git").mkdir()
    assert answers(tmp_path / "inner")["changes-kept"].verdict.value == "yes"


def test_what_cannot_be_read_is_said_and_the_rest_is_answered(tmp_path: Path):
    project(
        tmp_path, train__py=LOOP, broken__py="import torch\ndef (:", deep__py="x = " + "(" * 500
    )
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00nanguard run\x81")
    check = Check(Plan(root=str(tmp_path), jobs=1))
    check.run([str(tmp_path)])
    filled = fill_in(check, [str(tmp_path)])
    assert [entry.path.rpartition("/")[2] for entry in filled.not_checked][:2] == [
        "broken.py",
        "deep.py",
    ]
    page = checklist_as_text(filled)
    assert "is not valid Python" in page
    assert "train.py:7" in page


def test_names_of_files_cannot_write_to_the_terminal(tmp_path: Path):
    (tmp_path / "a\x1b[31m.py").write_text(textwrap.dedent(LOOP))
    check = Check(Plan(root=str(tmp_path), jobs=1))
    check.run([str(tmp_path)])
    assert "\x1b" not in checklist_as_text(fill_in(check, [str(tmp_path)]))


def test_the_command_answers_in_text_and_ends_with_1_where_something_is_missing(tmp_path: Path):
    project(tmp_path, train__py=LOOP)
    done = call(".", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "  no           Are gradients clipped? [gradients-clipped]\n" in done.stdout
    assert "train.py:7: steps are made here, and nothing in the project clips" in done.stdout
    assert "do: Clip to a norm of 1.0" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("1 file checked")
    assert call(".", "--fail-on", "none", cwd=tmp_path).returncode == 0


def test_the_command_answers_in_json(tmp_path: Path):
    project(tmp_path, train__py=CAREFUL)
    said = json.loads(call(".", "--format", "json", cwd=tmp_path).stdout)
    assert said["schema"] == "nanguard.checklist/1"
    assert len(said["points"]) == len(all_points())
    assert sum(said["counts"].values()) == len(all_points())
    clip = next(point for point in said["points"] if point["name"] == "gradients-clipped")
    assert clip["answer"] == "yes"
    line = line_of("clip_grad_norm_")
    assert clip["places"][0] == {"path": "train.py", "line": line, "what": "clips gradients"}
    assert clip["advice"].startswith("Clip to a norm")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--format", "sarif"), "a checklist has no format 'sarif'"),
        (("--fix",), "a checklist repairs nothing"),
    ],
)
def test_what_a_checklist_has_not(words: tuple[str, ...], text: str, tmp_path: Path):
    project(tmp_path, train__py=LOOP)
    done = call(".", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr


def test_torch_is_not_needed(tmp_path: Path):
    project(tmp_path, train__py=CAREFUL)
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'numpy'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from nanguard.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--checklist", "."],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert "1 file checked" in done.stdout, done.stderr
