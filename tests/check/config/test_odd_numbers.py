"""Numbers that nobody means, as the value of every usual key: no rule fails on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanguard.check.engine import Check, Plan

if TYPE_CHECKING:
    from pathlib import Path

ODD = ("-.inf", ".inf", ".nan", "1.0e+308", "-1.0e+308", "9" * 30, "9" * 400, "-1", "0", "5.0e-324")
KEYS = [
    "batch_size",
    "betas",
    "clip_norm",
    "devices",
    "dropout",
    "ema_decay",
    "epochs",
    "eps",
    "eval_steps",
    "fp16_loss_scale",
    "gamma",
    "global_batch_size",
    "gradient_accumulation_steps",
    "initial_scale_power",
    "label_smoothing",
    "logging_steps",
    "loss_scale",
    "loss_scale_window",
    "lr",
    "max_epochs",
    "max_grad_norm",
    "max_steps",
    "min_lr",
    "momentum",
    "nnodes",
    "nproc_per_node",
    "num_classes",
    "num_labels",
    "num_workers",
    "patience",
    "save_epochs",
    "save_steps",
    "seed",
    "steps_per_epoch",
    "temperature",
    "warmup_epochs",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
    "world_size",
]
RUN = (
    "optimizer: {name: adamw, lr: 1.0e-3}\n"
    "lr_scheduler: {name: cosine, warmup_steps: 0, warmup_epochs: 0}\n"
    "model: {norm: batchnorm, num_labels: 3}\ndata: {num_classes: 5}\n"
    "max_steps: 100\nepochs: 10\nglobal_batch_size: 4\nfp16: true\n"
)
WHERE = ("{key}: {number}\n", "data: {{{key}: {number}}}\n", "trainer: {{{key}: [{number}, 1]}}\n")


@pytest.mark.parametrize("number", ODD)
def test_no_rule_fails_on_an_odd_number(tmp_path: Path, number: str):
    failed = set()
    path = tmp_path / "config.yaml"
    for key in KEYS:
        for where in WHERE:
            path.write_text(RUN + where.format(key=key, number=number))
            check = Check(Plan(jobs=1))
            missed = check.run([str(path)]).not_checked
            failed |= {entry.reason for entry in missed if "failed on" in entry.reason}
    assert failed == set()
