"""Fixes: the fault is gone, and nothing else has changed."""

from __future__ import annotations

import pytest

from tests.check.config.rules.reading import findings, names, repaired
from tests.check.config.rules.test_classes import FAULTS


@pytest.mark.parametrize(("rule", "ending", "text"), FAULTS)
def test_a_repaired_file_is_clean(rule: str, ending: str, text: str) -> None:
    name = f"run__{ending}"
    (finding, *_) = findings(**{name: text})
    assert finding.fixes
    assert finding.fixes[0].title
    after = repaired(name, text)
    assert rule not in names(**{name: after})
    assert names(**{name: after}) == set()


def test_comments_order_quotes_and_anchors_survive() -> None:
    before = (
        "# 学习率\n"
        "base: &base   # shared\n"
        "  optimizer: 'adamw'\n"
        "  lr: 1e-4          # text!\n"
        "  betas: [0.9, 1.0] # second\n"
        "  max_grad_norm: 1.0e+6\n"
        "  epochs: 3\n"
        "a: {<<: *base, dropout: 1.5}\n"
        "b:\n"
        "  <<: *base\n"
        "  bf16: true  # half\n"
        "  fp16: true\n"
    )
    after = (
        "# 学习率\n"
        "base: &base   # shared\n"
        "  optimizer: 'adamw'\n"
        "  lr: 1.0e-4          # text!\n"
        "  betas: [0.9, 0.999] # second\n"
        "  max_grad_norm: 1.0\n"
        "  epochs: 3\n"
        "a: {<<: *base, dropout: 0.1}\n"
        "b:\n"
        "  <<: *base\n"
        "  bf16: true  # half\n"
        "  fp16: false\n"
    )
    assert repaired("run__yaml", before) == after


def test_a_reference_stays_and_what_it_refers_to_changes() -> None:
    before = "lrs: {peak: 1e-5, floor: 1e-4}\noptimizer: {lr: '${lrs.peak}'}\n"
    before += "scheduler: {eta_min: '${lrs.floor}'}\nmax_steps: 9000\n"
    after = repaired("run__yaml", before)
    assert after == before.replace("floor: 1e-4", "floor: 1.0e-6")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (
            "run__yaml",
            "model: {type: lstm}\ntrain:\n  optimizer: adam\n  lr: 1.0e-3  # ok\n  epochs: 9\n",
            "model: {type: lstm}\ntrain:\n  optimizer: adam\n  lr: 1.0e-3  # ok\n"
            "  max_grad_norm: 1.0\n  epochs: 9\n",
        ),
        (
            "run__json",
            '{\n  "model": {"type": "lstm"},\n  "optimizer": "adam",\n  "lr": 0.001,\n'
            '  "epochs": 9\n}\n',
            '{\n  "model": {"type": "lstm"},\n  "optimizer": "adam",\n  "lr": 0.001,\n'
            '  "max_grad_norm": 1.0,\n  "epochs": 9\n}\n',
        ),
        (
            "run__toml",
            'model = "lstm"\noptimizer = "adam"\nepochs = 9\nlr = 1e-3  # ok\n',
            'model = "lstm"\noptimizer = "adam"\nepochs = 9\nlr = 1e-3  # ok\n'
            "max_grad_norm = 1.0\n",
        ),
        (
            "run__yaml",
            "MODEL: {TYPE: LSTM}\nOPTIMIZER: ADAM\nEPOCHS: 9\nLR: 0.001\r\n",
            "MODEL: {TYPE: LSTM}\nOPTIMIZER: ADAM\nEPOCHS: 9\nLR: 0.001\r\nCLIP_GRAD: 1.0\r\n",
        ),
        (
            "run__yaml",
            "model: {type: lstm}\noptimizer: {name: adam, lr: 1.0e-3}\nepochs: 9\n",
            "model: {type: lstm}\noptimizer: {name: adam, lr: 1.0e-3, max_grad_norm: 1.0}\n"
            "epochs: 9\n",
        ),
    ],
)
def test_a_new_key_is_written_as_its_neighbours_are(name: str, before: str, after: str) -> None:
    assert repaired(name, before) == after


def test_a_plan_says_when_to_raise_what_was_lowered() -> None:
    (finding,) = findings(
        run__yaml="model_name_or_path: bert-base\noutput_dir: o\nlearning_rate: 0.01\n"
        "save_steps: 9\n"
    )
    assert finding.name == "learning-rate-too-high"
    assert "0.01" in finding.message
    plan = " ".join(finding.fixes[0].plan)
    assert "5e-05 -> 0.0001 -> 0.00025" in plan


def test_logits_masking_comes_back_in_stages() -> None:
    (finding,) = findings(run__yaml="lr: 1.0e-6\nepochs: 3\nenable_logits_masking: true\n")
    assert [*finding.fixes[0].plan][1].count("1e-6 -> 2e-6 -> 5e-6") == 1


ACCELERATE = "compute_environment: LOCAL_MACHINE\nmixed_precision: '{}'\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("trainer", "launcher", "fixed"),
    [
        ("amp: true\nfp16: false\n", "no", "amp: false\nfp16: false\n"),
        ("fp16: true\n", "bf16", "fp16: false\n"),
        ("bf16: true\n", "no", "bf16: false\n"),
        ("amp: false\n", "fp16", "amp: true\n"),
    ],
)
def test_a_trainer_follows_its_launcher(trainer: str, launcher: str, fixed: str) -> None:
    text = "lr: 1.0e-5\nmax_steps: 900\n" + trainer
    (finding,) = findings(p__train__yaml=text, p__acc__yaml=ACCELERATE.format(launcher))
    assert (finding.name, finding.path) == ("conflicting-precision", "p/train.yaml")
    for edit in sorted(finding.fixes[0].edits, key=lambda e: e.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    assert text.endswith(fixed)


def test_a_trainer_that_agrees_with_its_launcher_is_silent() -> None:
    text = "lr: 1.0e-5\nmax_steps: 900\namp: false\nfp16: false\n"
    assert names(p__train__yaml=text, p__acc__yaml=ACCELERATE.format("no")) == set()


def test_clipping_is_compared_with_the_deepspeed_file() -> None:
    train = (
        "output_dir: o\nlearning_rate: 1.0e-5\nsave_steps: 9\n"
        "max_grad_norm: {}\ndeepspeed: ds.json\n"
    )
    ds = '{{"zero_optimization": {{}}, "gradient_clipping": {}}}'
    found = names(p__t__yaml=train.format("1.0"), p__ds__json=ds.format("0.3"))
    assert found == {"conflicting-clipping"}
    assert names(p__t__yaml=train.format("1.0"), p__ds__json=ds.format('"auto"')) == set()
