"""Logs as many trainers write them, healthy and not, with what has to be found in each."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Case:
    """A log, the findings it has to give (rule, line, step), and those it may give."""

    name: str
    file: str
    text: str
    expected: tuple[tuple[str, int | None, int | None], ...] = ()
    tolerated: frozenset[str] = field(default_factory=frozenset)


CASES: list[Case] = []


def case(
    file: str,
    *expected: tuple[str, int | None, int | None],
    tolerated: str = "",
) -> Callable[[Callable[[random.Random], str]], Callable[[random.Random], str]]:
    def keep(make: Callable[[random.Random], str]) -> Callable[[random.Random], str]:
        text = make(random.Random(make.__name__))
        CASES.append(Case(make.__name__, file, text, expected, frozenset(tolerated.split())))
        return make

    return keep


def falling(rng: random.Random, n: int, start: float = 4.0, end: float = 1.5, noise: float = 0.02):
    return [
        (end + (start - end) * math.exp(-4 * i / n)) * (1 + noise * rng.gauss(0, 1))
        for i in range(n)
    ]


def norms(rng: random.Random, n: int, level: float = 1.0):
    return [level * math.exp(0.15 * rng.gauss(0, 1)) for _ in range(n)]


# ------------------------------------------------------------------ losses that are not finite
@case("radiodiff.log", ("non-finite-loss", 52, 2598))
def diffusion_goes_bad(rng):
    rows = ["Namespace(cfg='radio.yaml')", "amp: False | fp16: False"]
    for i, v in enumerate(falling(rng, 90, 0.4, 0.07)):
        loss = NAN if i >= 49 else v
        rows.append(
            f"[Train Step] {2500 + 2 * i}/50000: loss_simple: {loss:.5f}, loss_vlb: 0.00000, "
            f"total_loss: {loss:.5f}, lr: 0.00005"
        )
    return "\n".join(rows) + "\n"


@case("train.log", ("non-finite-loss", 12, None), ("suspicious-accuracy", 12, None))
def accelerate_epochs(rng):
    rows = []
    for i, v in enumerate(falling(rng, 20, 1.2, 0.5), 1):
        val, acc = (NAN, 1.0) if i >= 12 else (v + 0.05, 0.6 + i / 100)
        rows.append(
            f"Epoch {i}/50 | Train Loss: {v:.4f} | Val Loss: {val:.4f} | Val Acc: {acc:.4f}"
        )
    return "\n".join(rows) + "\n"


@case("eval.log", ("non-finite-loss", 3, 1000))
def every_data_set_is_infinite(rng):
    rows = []
    for step in (1000, 2000):
        rows += ["=" * 40, f"📊 Evaluation at step {step}"]
        rows += [
            f"📂 {name}: Loss: inf, Accuracy: 0.0{rng.randint(10, 99)} (0.97%)"
            for name in ("food101", "food172", "foodx251", "food2k", "fru92", "veg200")
        ]
    return "\n".join(rows) + "\n"


@case("hf.log", ("non-finite-grad-norm", 31, None), ("hidden-nan", 31, None))
def trainer_prints_zero(rng):
    rows = []
    for i, (v, g) in enumerate(zip(falling(rng, 60), norms(rng, 60), strict=True), 1):
        loss, norm = (0.0, NAN) if i > 30 else (round(v, 4), round(g, 4))
        rows.append(
            str({"loss": loss, "grad_norm": norm, "learning_rate": 1e-5, "epoch": round(i / 60, 2)})
        )
    return "\n".join(rows) + "\n"


@case("keras.log", ("non-finite-loss", 12, None), tolerated="suspicious-accuracy")
def keras_bar(rng):
    rows = []
    for epoch in range(1, 9):
        rows.append(f"Epoch {epoch}/8")
        loss = "nan" if epoch >= 6 else f"{2.3 / epoch + 0.01 * rng.random():.4f}"
        rows.append(
            f"100/100 [==============================] - 3s 29ms/step - loss: {loss} - "
            f"accuracy: {0.098 if epoch >= 6 else 0.3 + epoch / 20:.4f}"
        )
    return "\n".join(rows) + "\n"


@case("megatron.log", ("non-finite-loss", 40, 4000), ("non-finite-grad-norm", 40, 4000))
def megatron(rng):
    rows = []
    for i, (v, g) in enumerate(zip(falling(rng, 50, 10, 3), norms(rng, 50), strict=True), 1):
        loss, norm = ("NAN", "nan") if i >= 40 else (f"{v:.6E}", f"{g:.3f}")
        rows.append(
            f" iteration {i * 100:8d}/  500000 | consumed samples: {i * 25600:12d} | elapsed time "
            f"per iteration (ms): 1163.1 | learning rate: 1.500E-05 | global batch size:   256 | "
            f"lm loss: {loss} | loss scale: 1.0 | grad norm: {norm} | number of skipped "
            "iterations:   0 | number of nan iterations:   0 |"
        )
    return "\n".join(rows) + "\n"


@case("megatron_ok.log")
def megatron_is_healthy(rng):
    rows = []
    for i, (v, g) in enumerate(zip(falling(rng, 80, 10, 3), norms(rng, 80), strict=True), 1):
        rows.append(
            f" iteration {i * 100:8d}/  500000 | learning rate: 1.500E-05 | lm loss: {v:.6E} | "
            f"loss scale: 4294967296.0 | grad norm: {g:.3f} | number of skipped iterations:   0 | "
            "number of nan iterations:   0 |"
        )
    return "\n".join(rows) + "\n"


@case("tqdm.log", ("non-finite-loss", 1, 61))
def progress_bar_on_one_line(rng):
    rows = []
    for i, v in enumerate(falling(rng, 100), 1):
        bar = ("█" * (i // 10)).ljust(10)
        loss = "nan" if i > 60 else f"{v:.3f}"
        rows.append(
            f"Epoch 0: {i:3d}%|{bar}| {i}/100 [00:{i // 2:02d}<00:50, 1.98it/s, loss={loss}]"
        )
    return "\r".join(rows)


@case("colour.log", ("non-finite-loss", 25, 24))
def colours(rng):
    rows = ["\x1b[1m\x1b[34mINFO\x1b[0m starting"]
    for i, v in enumerate(falling(rng, 40), 1):
        loss = "inf" if i == 24 else f"{v:.4f}"
        rows.append(f"\x1b[32m[trainer]\x1b[0m step \x1b[1m{i}\x1b[0m loss=\x1b[31m{loss}\x1b[0m")
    return "\n".join(rows) + "\n"


@case("ranks.log", ("non-finite-loss", 40, 20))
def one_of_two_ranks(rng):
    rows = []
    for i, v in enumerate(falling(rng, 40), 1):
        rows.append(f"[rank0]: step {i} loss: {v:.4f}")
        rows.append(f"[rank1]: step {i} loss: {'nan' if i >= 20 else format(v + 0.1, '.4f')}")
    return "\n".join(rows) + "\n"


@case("detr.log", ("non-finite-loss", 21, None))
def loss_is_nan_stopping(rng):
    rows = [
        f"Epoch: [3]  [{i * 10:4d}/1251]  eta: 0:10:11  lr: 0.0001  loss: {v:.4f} ({v:.4f})  "
        "time: 0.5010  data: 0.0012  max mem: 9000"
        for i, v in enumerate(falling(rng, 20))
    ]
    return "\n".join([*rows, "Loss is nan, stopping training"]) + "\n"


@case("pl.log", ("non-finite-loss", 15, None))
def torch_example(rng):
    rows = [
        f"Train Epoch: 1 [{i * 640}/60000 ({i}%)]\tLoss: {'nan' if i >= 14 else format(v, '.6f')}"
        for i, v in enumerate(falling(rng, 30, 2.3, 0.3))
    ]
    return "\n".join(rows) + "\n"


@case("fastai.txt", ("non-finite-loss", 6, None))
def fastai_table(rng):
    rows = ["epoch     train_loss  valid_loss  accuracy  time"]
    for i, v in enumerate(falling(rng, 10, 1.2, 0.4)):
        val = "nan" if i >= 4 else f"{v + 0.05:.6f}"
        rows.append(f"{i}         {v:.6f}    {val}    0.71{i}000  00:1{i}")
    return "\n".join(rows) + "\n"


@case("yolo.log", ("non-finite-loss", 10, None))
def yolo_table(rng):
    rows = []
    for i, v in enumerate(falling(rng, 6, 3, 1), 1):
        rows.append("      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size")
        cls = "nan" if i >= 5 else f"{v / 2:.3f}"
        rows.append(
            f"      {i}/100      2.17G      {v:.3f}      {cls}      1.21{i}         12        640: "
            "100%|██████████| 8/8 [00:10<00:00,  1.2s/it]"
        )
    return "\n".join(rows) + "\n"


@case("table.log", ("non-finite-loss", 8, 600))
def markdown_table(rng):
    rows = ["| step | loss | lr |", "|------|------|----|"]
    for i, v in enumerate(falling(rng, 12, 3, 1), 1):
        rows.append(f"| {i * 100} | {'nan' if i >= 6 else format(v, '.4f')} | 1e-4 |")
    return "\n".join(rows) + "\n"


@case("sb3.log", ("non-finite-loss", 22, None))
def vertical_table(rng):
    rows = []
    for i in range(1, 5):
        loss = "nan" if i == 4 else f"{0.1 / i:.4f}"
        rows += [
            "-" * 40,
            "| time/                |             |",
            f"|    iterations        | {i}           |",
            "| train/               |             |",
            "|    learning_rate     | 0.0003      |",
            f"|    loss              | {loss}      |",
        ]
    rows.insert(0, "Using cpu device")
    text = rows[:22] + rows[22:]
    del text[1 + 3 * 6 : 1 + 3 * 6 + 3]
    return "\n".join(text) + "\n"


@case("metrics.jsonl", ("non-finite-loss", 30, 300), ("non-finite-grad-norm", 30, 300))
def strings_in_json(rng):
    rows = []
    for i, (v, g) in enumerate(zip(falling(rng, 50), norms(rng, 50), strict=True), 1):
        bad = i == 30
        rows.append(
            json.dumps(
                {
                    "step": i * 10,
                    "update": i,
                    "epoch": 0,
                    "loss": "nan" if bad else v,
                    "terms": {"text": v / 2, "latent": "nan" if bad else v / 2},
                    "grad_norm": "nan" if bad else g,
                    "lr": 1e-4,
                    "action": "skip" if bad else "step",
                }
            )
        )
    return "\n".join(rows) + "\n"


@case("history.json", ("non-finite-loss", None, None), tolerated="suspicious-accuracy")
def keras_history(rng):
    losses = falling(rng, 30, 2, 0.5)
    return json.dumps(
        {
            "loss": losses,
            "val_loss": [NAN if i > 20 else v for i, v in enumerate(losses)],
            "accuracy": [0.5 + i / 100 for i in range(30)],
        }
    )


@case("metrics.csv", ("non-finite-loss", 42, 400))
def lightning_metrics(rng):
    rows = ["epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss"]
    for i, v in enumerate(falling(rng, 60)):
        rows.append(f"0,,{i * 10 + 9},,{'nan' if i >= 60 else format(v, '.6f')},")
        if i == 39:
            rows[-1] = "0,,399,,nan,"
            rows.append("0,,400,nan,,")
    rows[40] = rows[40].replace("nan", "1.9")
    return "\n".join(rows) + "\n"


@case("metrics.csv")
def lightning_is_healthy(rng):
    rows = ["epoch,step,train_loss,val_loss,val_acc"]
    for i, v in enumerate(falling(rng, 120)):
        rows.append(f"{i // 20},{i * 50 + 49},{v:.6f},,")
        if i % 20 == 19:
            rows.append(f"{i // 20},{i * 50 + 49},,{v + 0.1:.6f},0.7{i % 10}")
    return "\n".join(rows) + "\n"


@case("pandas.csv")
def nan_for_not_measured(rng):
    rows = ["step,train_loss,val_loss"]
    for i, v in enumerate(falling(rng, 100)):
        rows.append(f"{i},{v:.5f},{format(v + 0.1, '.5f') if i % 10 == 9 else 'nan'}")
    return "\n".join(rows) + "\n"


@case("val.log")
def validation_not_yet_done(rng):
    rows = []
    for i, v in enumerate(falling(rng, 60), 1):
        rows.append(f"epoch {i} train_loss={v:.4f} val_loss={'nan' if i < 4 else format(v, '.4f')}")
    return "\n".join(rows) + "\n"


# ------------------------------------------------------------------ sentences
@case("s4.log", ("non-finite-grad-norm", 31, 92261))
def said_in_words(rng):
    rows = [
        f"2025-01-01 00:00:{i:02d} | INFO | step {92230 + i} | text_loss: {v:.4f}"
        for i, v in enumerate(falling(rng, 30))
    ]
    rows.append(
        "2025-01-01 00:00:31 | WARNING | NaN gradients detected at step 92261, zeroing them"
    )
    return "\n".join(rows) + "\n"


@case("d2.log", ("non-finite-loss", 21, 400))
def detectron(rng):
    rows = [
        f"[01/01 00:00:00 d2.utils.events]:  eta: 1:00  iter: {i * 20 - 1}  total_loss: {v:.3f}  "
        f"loss_cls: {v / 2:.3f}  lr: 0.00025  max_mem: 3000M"
        for i, v in enumerate(falling(rng, 20), 1)
    ]
    rows.append("FloatingPointError: Loss became infinite or NaN at iteration=400!")
    return "\n".join(rows) + "\n"


@case("words.log")
def words_that_are_no_alarm(rng):
    rows = [
        "INFO: nano-gpt inference on infra-3, dtype info below",
        "NaN check enabled: will raise if the loss is NaN or Inf",
        "nan_inf_filter=True max_grad_norm=inf min_loss=inf best_loss: inf",
        "loss: nan-safe cross entropy, gradients: inf-clipped",
        "no NaN gradients found in the first batch",
        "Number of NaN losses so far: 0",
        "Epoch 00001: val_loss improved from inf to 0.69314, saving model",
        "number of nan iterations: 0",
        "If the loss is nan, lower the learning rate",
        "Skipping NaN check for frozen parameters; loss NaN guard active",
        "Avengers: Infinity War, Finding Nan, loss of info",
    ]
    rows += [
        f"step {i} loss {v:.4f} nan_count=0 inf_count=0" for i, v in enumerate(falling(rng, 60))
    ]
    return "\n".join(rows) + "\n"


# ------------------------------------------------------------------ loss scale
@case("fp16.log")
def scaler_finds_its_level(rng):
    rows, scale = [], 2.0**16
    for i, (v, g) in enumerate(zip(falling(rng, 150), norms(rng, 150), strict=True), 1):
        overflow = i in (1, 2, 3, 5)
        scale = scale / 2 if overflow else scale * 2 if i == 120 else scale
        rows.append(
            f"step {i} loss {v:.4f} grad_norm {'inf' if overflow else format(g, '.3f')} "
            f"loss_scale {scale:g}"
        )
    return "\n".join(rows) + "\n"


@case("hf_fp16.log")
def first_norm_of_fp16(rng):
    rows = []
    for i, (v, g) in enumerate(zip(falling(rng, 60), norms(rng, 60), strict=True), 1):
        rows.append(
            str(
                {
                    "loss": round(v, 4),
                    "grad_norm": NAN if i == 1 else round(g, 4),
                    "learning_rate": 1e-5,
                    "epoch": i / 60,
                }
            )
        )
    return "\n".join(rows) + "\n"


@case("fall.log", ("falling-loss-scale", None, None))
def scale_falls_with_rests(rng):
    rows = []
    for i, v in enumerate(falling(rng, 200)):
        scale = 65536 if i < 60 else 65536 / 2 ** ((i - 60) // 8)
        rows.append(f"step {i * 5} loss {v:.4f} scale {max(scale, 2):g}")
    return "\n".join(rows) + "\n"


@case("apex.log", ("falling-loss-scale", None, None))
def apex_sentences(rng):
    rows, scale = [], 2.0**16
    for i, v in enumerate(falling(rng, 100), 1):
        rows.append(f"iter {i}: loss {v:.4f}")
        if i > 60:
            scale /= 2
            rows.append(
                f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}"
            )
    return "\n".join(rows) + "\n"


@case("fairseq.log", ("falling-loss-scale", 31, None))
def fairseq_gives_up(rng):
    rows = [
        f"2024 | INFO | train | epoch 001:  {i * 100} / 5000 loss={v:.3f}, ppl=8.1, gnorm=1.1, "
        "loss_scale=16"
        for i, v in enumerate(falling(rng, 30))
    ]
    rows.append(
        "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding."
    )
    return "\n".join(rows) + "\n"


# ------------------------------------------------------------------ spikes and drift
@case("spike.jsonl", ("loss-spike", 150, 1500))
def language_model_spike(rng):
    losses = falling(rng, 300)
    losses[149:153] = [9.1, 7.0, 4.4, 2.6]
    return "".join(
        json.dumps({"step": i * 10, "train/loss": round(v, 4)}) + "\n"
        for i, v in enumerate(losses, 1)
    )


@case("gn.log", ("grad-norm-spike", 120, 120))
def norm_spike(rng):
    values = norms(rng, 200)
    values[119] = 85.0
    return "".join(
        f"step: {i} | loss: {v:.4f} | grad norm: {g:.3f}\n"
        for i, (v, g) in enumerate(zip(falling(rng, 200), values, strict=True), 1)
    )


@case("diverge.log", ("diverging-loss", None, None), tolerated="loss-spike")
def slow_divergence(rng):
    losses = falling(rng, 200)
    losses += [1.5 + 0.02 * i + 0.02 * rng.gauss(0, 1) for i in range(200)]
    return "".join(f"step={i} loss={v:.4f} lr=3e-4\n" for i, v in enumerate(losses, 1))


@case("up.log", ("diverging-loss", None, None), tolerated="loss-spike")
def grows_from_the_start(rng):
    return "".join(
        f"iter {i}: loss {2.3 * 1.03**i * (1 + 0.02 * rng.gauss(0, 1)):.4f}\n" for i in range(120)
    )


@case("bounded.log", ("diverging-loss", 3, 2))
def bounds_keep_a_lost_loss_finite(rng):
    losses = [3.4, 3.2, *(3.5e12 * (1 + 0.1 * rng.gauss(0, 1)) for _ in range(22))]
    return "".join(f"step={i} loss={v:.4f} lr=0.2\n" for i, v in enumerate(losses))


@case("units.log")
def first_entry_is_one_batch_of_many(rng):
    losses = [0.02, *(1500 * v for v in falling(rng, 40))]
    return "".join(f"step={i} loss={v:.4f} lr=0.001\n" for i, v in enumerate(losses))


@case("grpo.jsonl")
def a_policy_begins_as_its_own_reference(rng):
    losses = [1.49e-08, *(0.05 * (1 - math.exp(-i / 30)) for i in range(1, 200))]
    return "".join(
        json.dumps({"step": i, "loss": v * (1 + 0.1 * rng.gauss(0, 1)), "learning_rate": 1e-6})
        + "\n"
        for i, v in enumerate(losses, 1)
    )


@case("distill.jsonl")
def a_student_begins_as_its_teacher(rng):
    losses = [2e-9, 4e-8, 1e-7, 3e-6, *(0.2 + 0.01 * rng.gauss(0, 1) for _ in range(20))]
    return "".join(json.dumps({"step": i, "loss": v}) + "\n" for i, v in enumerate(losses, 1))


@case("runaway.jsonl", ("diverging-loss", None, None), tolerated="loss-spike")
def a_policy_leaves_its_reference_for_good(rng):
    losses = [0.0, *(0.01 * 1.03**i * (1 + 0.02 * rng.gauss(0, 1)) for i in range(200))]
    return "".join(json.dumps({"step": i, "loss": v}) + "\n" for i, v in enumerate(losses, 1))


@case("lost.log", ("diverging-loss", 2, 1))
def the_second_step_is_lost(rng):
    losses = [3.4, *(3.5e12 * (1 + 0.1 * rng.gauss(0, 1)) for _ in range(22))]
    return "".join(f"step={i} loss={v:.4f} lr=0.2\n" for i, v in enumerate(losses))


@case("cyclic.log")
def warm_restarts(rng):
    rows = []
    for i in range(400):
        phase = i % 100
        v = 1 + 2 * math.exp(-i / 150) + 0.15 * (1 - phase / 100) + 0.02 * rng.gauss(0, 1)
        rows.append(
            f"step {i} loss {v:.4f} lr {1e-3 * (1 + math.cos(math.pi * phase / 100)) / 2:.2e}"
        )
    return "\n".join(rows) + "\n"


@case("two_runs.log")
def a_second_run_in_the_same_file(rng):
    rows = []
    for _ in range(2):
        rows += [f"step {i} loss {v:.4f}" for i, v in enumerate(falling(rng, 120, 5, 0.5))]
    return "\n".join(rows) + "\n"


@case("gan.log")
def adversarial_losses(rng):
    return "".join(
        f"iter {i} d_loss: {0.6 + 0.1 * rng.random():.4f} "
        f"g_loss: {0.8 + i / 100 + 0.3 * rng.random():.4f}\n"
        for i in range(300)
    )


@case("overfit.csv")
def validation_overfits(rng):
    rows = ["epoch,train_loss,val_loss,val_acc"]
    for i, v in enumerate(falling(rng, 60, 1.5, 0.05), 1):
        rows.append(f"{i},{v:.4f},{0.6 + 0.9 * abs(i - 15) / 30:.4f},0.8")
    return "\n".join(rows) + "\n"


# ------------------------------------------------------------------ standing still
@case(
    "frozen.jsonl",
    ("hidden-nan", None, None),
    ("non-finite-grad-norm", 80, 80),
    tolerated="stalled-loss",
)
def frozen(rng):
    rows = []
    for i, (v, g) in enumerate(zip(falling(rng, 120), norms(rng, 120), strict=True), 1):
        rows.append(
            json.dumps({"iter": i, "loss": 2.5 if i >= 80 else v, "gnorm": NAN if i >= 80 else g})
        )
    return "\n".join(rows) + "\n"


@case("chance.log", ("stalled-loss", None, None))
def never_learned(rng):
    return "".join(
        f"Epoch {i}/40 loss: {6.9078 + 0.001 * rng.gauss(0, 1):.4f} acc: 0.0010\n"
        for i in range(1, 41)
    )


@case("flat.log")
def resumed_language_model(rng):
    return "".join(
        f"step={90000 + i * 10} loss={2.05 * (1 + 0.012 * rng.gauss(0, 1)):.4f}\n"
        for i in range(250)
    )


@case("perfect.log")
def honest_perfect_accuracy(rng):
    return "".join(
        f"epoch {i}: loss={0.7 * 0.8**i:.5f} acc={min(1, 0.6 + i / 20):.4f}\n" for i in range(30)
    )


# ------------------------------------------------------------------ as more trainers write them
@case("20240501.log", ("non-finite-loss", 45, None), ("non-finite-grad-norm", 45, None))
def mmengine(rng):
    rows = []
    for i, (v, g) in enumerate(zip(falling(rng, 70), norms(rng, 70, 8.0), strict=True)):
        loss, cls, norm = (
            ("nan", "nan", "nan") if i >= 44 else (f"{v:.4f}", f"{v - 1:.4f}", f"{g:.4f}")
        )
        rows.append(
            f"2024/05/01 10:0{i // 60}:{i % 60:02d} - mmengine - INFO - Epoch(train)  "
            f"[{i // 20 + 1}][{i % 20 * 50 + 50:4d}/1000]  lr: 2.0000e-02  eta: 2:11:09  "
            f"time: 0.41  data_time: 0.01  memory: 3921  grad_norm: {norm}  loss: {loss}  "
            f"loss_cls: {cls}  loss_bbox: {0.3 + 0.01 * rng.random():.4f}"
        )
    return "\n".join(rows) + "\n"


@case("trainer_log.jsonl", ("loss-spike", 88, 880))
def llama_factory_spike(rng):
    losses = falling(rng, 150, 1.8, 0.9, 0.03)
    losses[87] = 6.4
    return "".join(
        json.dumps(
            {
                "current_steps": i * 10,
                "total_steps": 1500,
                "loss": round(v, 4),
                "lr": 1e-4,
                "epoch": round(i / 50, 2),
                "percentage": round(i / 15, 2),
                "elapsed_time": f"0:{i // 60:02d}:{i % 60:02d}",
                "remaining_time": "0:10:00",
            }
        )
        + "\n"
        for i, v in enumerate(losses, 1)
    )


@case("progress.csv", ("diverging-loss", None, None), tolerated="loss-spike")
def twin_critics_explode(rng):
    rows = ["global_step,losses/qf1_loss,losses/qf2_loss,losses/actor_loss,charts/SPS"]
    for i in range(200):
        base = 3.0 * math.exp(-i / 30) + 0.4 if i < 100 else 0.5 * 1.07 ** (i - 100)
        q1, q2 = (base * (1 + 0.1 * rng.gauss(0, 1)) for _ in range(2))
        rows.append(f"{i * 500},{q1:.5f},{q2:.5f},{-2 - i / 20 + 0.2 * rng.gauss(0, 1):.4f},310")
    return "\n".join(rows) + "\n"


@case("apex.log", ("falling-loss-scale", None, None))
def apex_with_rests(rng):
    rows, scale = [], 2.0**15
    for i, v in enumerate(falling(rng, 160), 1):
        rows.append(f"[{i * 10:5d}] loss: {v:.4f} lr: 0.0001")
        if i > 60 and i % 5 == 0 and scale > 1:
            scale /= 2
            rows.append(
                f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}"
            )
    return "\n".join(rows) + "\n"


@case("megatron_scale.log", ("falling-loss-scale", None, None))
def megatron_scale_falls(rng):
    rows = []
    for i, v in enumerate(falling(rng, 120, 8, 3), 1):
        scale = 2.0**17 if i < 70 else max(1.0, 2.0 ** (17 - (i - 70) // 2))
        rows.append(
            f" [2025-02-01 10:00:00] iteration {i * 10:8d}/  500000 | learning rate: 1.5E-05 | "
            f"lm loss: {v:.6E} | loss scale: {scale:.1f} | grad norm: 1.{i % 10}00 | number of "
            "skipped iterations:   3 | number of nan iterations:   0 |"
        )
    return "\n".join(rows) + "\n"


@case("timm.log", ("stalled-loss", None, None))
def thousand_classes_at_chance(rng):
    return "".join(
        f"Train: {i // 20} [{i % 20 * 50:4d}/1000 ({i % 20 * 5:3d}%)]  "
        f"Loss: {6.9078 + 0.012 * rng.gauss(0, 1):.3f} ({6.9078 + 0.002 * rng.gauss(0, 1):.2f})  "
        "Time: 0.312s, 410.26/s  LR: 5.000e-04  Data: 0.010 (0.012)\n"
        for i in range(120)
    )


@case("dead.jsonl", ("stalled-loss", None, None), tolerated="loss-spike")
def dies_on_the_way(rng):
    losses = falling(rng, 90, 1.1, 0.5)
    losses += [1.0986 + 0.0008 * rng.gauss(0, 1) for _ in range(110)]
    return "".join(
        json.dumps({"iteration": i, "train_loss": round(v, 5)}) + "\n" for i, v in enumerate(losses)
    )


@case(
    "sft.jsonl",
    ("hidden-nan", 61, 610),
    ("non-finite-grad-norm", 61, 610),
    ("non-finite-loss", 70, 690),
    tolerated="stalled-loss",
)
def zero_loss_and_strings(rng):
    rows = []
    for i, (v, g) in enumerate(zip(falling(rng, 100), norms(rng, 100), strict=True), 1):
        bad = i >= 61
        row = {"step": i * 10, "loss": 0.0 if bad else round(v, 4)}
        rows.append({**row, "grad_norm": "NaN" if bad else round(g, 4), "learning_rate": 2e-5})
        if i == 69:
            rows.append({"step": i * 10, "eval_loss": "NaN", "eval_runtime": 12.2})
    return "".join(json.dumps(row) + "\n" for row in rows)


@case("training.csv", ("non-finite-loss", 15, None), ("suspicious-accuracy", 15, None))
def keras_csv_logger(rng):
    rows = ["epoch,accuracy,loss,lr,val_accuracy,val_loss"]
    for i, v in enumerate(falling(rng, 30, 1.1, 0.3)):
        bad = i >= 13
        val = "1.0,nan" if bad else f"{0.5 + i / 60:.4f},{v + 0.1:.5f}"
        rows.append(f"{i},{0.5 + i / 50:.4f},{v:.5f},0.001,{val}")
    return "\n".join(rows) + "\n"


@case("metrics.csv", ("grad-norm-spike", 92, 909))
def lightning_norms(rng):
    rows = ["epoch,grad_2.0_norm_total,step,train_loss"]
    values = norms(rng, 150, 0.6)
    values[90] = 47.0
    for i, (v, g) in enumerate(zip(falling(rng, 150), values, strict=True)):
        rows.append(f"{i // 50},{g:.5f},{i * 10 + 9},{v:.5f}")
    return "\n".join(rows) + "\n"


@case("metrics.json", ("non-finite-loss", 33, 659))
def detectron_metrics(rng):
    return "".join(
        json.dumps(
            {
                "data_time": 0.01,
                "eta_seconds": 1000.2,
                "iteration": i * 20 - 1,
                "loss_box_reg": round(v / 3, 4),
                "loss_cls": NAN if i >= 33 else round(v / 3, 4),
                "lr": 0.00025,
                "total_loss": NAN if i >= 33 else round(v, 4),
            }
        )
        + "\n"
        for i, v in enumerate(falling(rng, 40), 1)
    )


@case("gpt.log", ("diverging-loss", None, None), tolerated="loss-spike")
def cross_entropy_diverges(rng):
    losses = falling(rng, 80, 6, 3.2) + [3.2 + 0.06 * i + 0.03 * rng.gauss(0, 1) for i in range(60)]
    return "".join(
        f"[step={i * 25}/10000]\n    train/CrossEntropyLoss={v:.3f}\n"
        f"    train/Perplexity={math.exp(v):.2f}\n    throughput/total_tokens={i * 1000}\n"
        for i, v in enumerate(losses)
    )


# ------------------------------------------------------------------ healthy, and looks like a fault
@case("progress.csv")
def values_grow_with_rewards(rng):
    rows = [
        "rollout/ep_rew_mean,time/iterations,train/loss,train/policy_gradient_loss,"
        "train/value_loss,train/entropy_loss"
    ]
    for i in range(160):
        value = 0.4 + 60 * (1 - math.exp(-i / 60)) + 3 * abs(rng.gauss(0, 1))
        policy = -0.01 + 0.004 * rng.gauss(0, 1)
        rows.append(
            f"{i * 2},{i + 1},{value / 2 + policy:.4f},{policy:.5f},{value:.4f},"
            f"{-0.69 + i / 400:.4f}"
        )
    return "\n".join(rows) + "\n"


@case("deepspeed.log")
def overflows_now_and_then(rng):
    rows, scale = [], 2.0**16
    for i, v in enumerate(falling(rng, 400), 1):
        if i <= 4 or i % 90 == 0:
            rows.append(
                "[2025-04-11 09:00:30,101] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] "
                f"OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale:.0f}, reducing to "
                f"{scale / 2:.0f}"
            )
            scale /= 2
        if i > 90 and i % 90 == 60:
            scale *= 2
        rows.append(f"steps: {i * 10} loss: {v:.4f} iter time (s): 0.412 samples/sec: 77.6")
    return "\n".join(rows) + "\n"


@case("curriculum.log")
def longer_sequences_cost_more(rng):
    rows = []
    for i, v in enumerate(falling(rng, 240, 5, 2.4, 0.015)):
        stage = i // 80
        rows.append(f"step {i * 20} | seq_len {512 * 2**stage} | loss {v + 0.12 * stage:.4f}")
    return "\n".join(rows) + "\n"


@case("moe.jsonl")
def a_balanced_router(rng):
    return "".join(
        json.dumps(
            {
                "step": i,
                "loss": round(v + 0.01, 4),
                "lm_loss": round(v, 4),
                "load_balancing_loss": round(1.0 + 0.0004 * rng.random(), 5),
                "router_z_loss": round(0.002 + 0.0001 * rng.random(), 5),
            }
        )
        + "\n"
        for i, v in enumerate(falling(rng, 200))
    )


@case("grokking.csv")
def stands_still_and_then_learns(rng):
    rows = ["step,train_loss,val_loss"]
    for i in range(200):
        v = 4.5747 + 0.002 * rng.gauss(0, 1)
        if i > 70:
            v *= math.exp(-(i - 70) / 60)
        rows.append(f"{i * 100},{v:.5f},{4.5747 + 0.01 * rng.gauss(0, 1):.5f}")
    return "\n".join(rows) + "\n"


@case("clip.log")
def contrastive_loss_falls_slowly(rng):
    return "".join(
        f"[{i * 50}/20000] loss: {5.5452 - 0.0008 * i + 0.002 * rng.gauss(0, 1):.4f} "
        f"logit_scale: {14.3 + i / 100:.3f} lr: 1e-5\n"
        for i in range(150)
    )


@case("history.jsonl")
def evaluated_every_tenth_epoch(rng):
    return "".join(
        json.dumps({"epoch": i, "train_loss": v, "val_loss": v + 0.1 if i % 10 == 0 else NAN})
        + "\n"
        for i, v in enumerate(falling(rng, 80), 1)
    )


@case("vit.log")
def norms_settle_from_high(rng):
    return "".join(
        f"Epoch: [{i // 40}][{i % 40}/40] loss: {v:.4f} "
        f"grad_norm: {(0.5 + 40 * math.exp(-i / 15)) * math.exp(0.35 * rng.gauss(0, 1)):.4f}\n"
        for i, v in enumerate(falling(rng, 200, 6.9, 3))
    )


@case("two_stages.log")
def the_second_stage_has_another_loss(rng):
    rows = ["=== stage 1: autoencoder ==="]
    rows += [f"step {i} loss {v:.4f}" for i, v in enumerate(falling(rng, 150, 0.8, 0.1))]
    rows.append("=== stage 2: prior ===")
    rows += [f"step {i} loss {v:.4f}" for i, v in enumerate(falling(rng, 150, 7.0, 4.0))]
    return "\n".join(rows) + "\n"


@case("ddpm.log")
def diffusion_is_noisy(rng):
    return "".join(
        f"step: {i * 100} "
        f"mse: {(0.02 + 0.3 * math.exp(-i / 12)) * math.exp(0.35 * rng.gauss(0, 1)):.5f} "
        f"grad_norm: {0.2 * math.exp(0.4 * rng.gauss(0, 1)):.4f}\n"
        for i in range(300)
    )


@case("toy.log")
def everything_is_learned(rng):
    return "".join(
        f"epoch {i:3d} | loss {2.0 * 0.85**i:.4f} | grad_norm {3.0 * 0.85**i:.4f} | "
        f"train acc {min(1.0, 0.3 + i / 40):.4f}\n"
        for i in range(120)
    )


@case("settings.log")
def settings_are_no_measurements(rng):
    rows = [
        "loss_scale: dynamic, initial loss scale: 65536, min loss scale: 1, overflow check: on",
        "gradient_clip_val=inf, max_grad_norm: inf, EarlyStopping(monitor=val_loss, best=inf)",
        "Metric val_loss improved. New best score: inf -> 0.812",
        "detect_anomaly: False, terminate_on_nan: True, nan_policy=raise",
        "loss function: CrossEntropyLoss(reduction=mean, label_smoothing=0.1)",
    ]
    rows += [f"iter {i:5d} | loss value: {v:.4f}" for i, v in enumerate(falling(rng, 120))]
    return "\n".join(rows) + "\n"


@case("zeroed.log", ("hidden-nan", 63, 61), ("non-finite-grad-norm", 62, 61))
def bad_gradients_are_told_and_the_loss_stands_still(rng):
    rows = []
    for i, v in enumerate(falling(rng, 90)):
        if i > 60:
            rows.append(f"WARNING NaN gradients detected at step {i}, zeroing them")
        rows.append(f"step {i} loss {2.0112 if i > 60 else v:.4f}")
    return "\n".join(rows) + "\n"


@case("mnist.log", ("stalled-loss", 1, None))
def guesses_among_ten_classes(rng):
    return "".join(
        f"Train Epoch: {i // 20 + 1} [{i % 20 * 640}/12800 ({i % 20 * 5}%)]\t"
        f"Loss: {2.3026 + 0.009 * rng.gauss(0, 1):.6f}\n"
        for i in range(120)
    )


@case("clip.log", ("non-finite-grad-norm", 31, 29))
def torch_refuses_to_clip(rng):
    rows = [f"step {i} loss {v:.4f}" for i, v in enumerate(falling(rng, 30))]
    rows.append(
        "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, "
        "so it cannot be clipped. To disable this error and scale the gradients by the non-finite "
        "norm anyway, set `error_if_nonfinite=False`"
    )
    return "\n".join(rows) + "\n"


@case("resumed.jsonl")
def a_tuned_model_is_near_its_best(rng):
    return "".join(
        json.dumps({"step": 5000 + i * 10, "loss": round(2.303 + 0.009 * rng.gauss(0, 1), 4)})
        + "\n"
        for i in range(120)
    )


@case("mixed.log")
def data_sets_stand_at_different_levels(rng):
    return "".join(
        f"2025-03-12 09:00:07 - INFO - step={i * 100} dataset={name} train_loss={v * level:.4f}\n"
        for i, v in enumerate(falling(rng, 120, 5, 2))
        for name, level in (rng.choice((("food101", 1.0), ("food2k", 2.2), ("veg200", 1.1))),)
    )


@case("mixed.jsonl", ("loss-spike", 151, 1500))
def one_of_two_tasks_jumps(rng):
    losses = falling(rng, 200, 3, 1)
    losses[150] = 9.0
    return "".join(
        json.dumps(
            {"step": i * 10, "task": ("vqa", "caption")[i % 2], "loss": v * (1 + 2 * (i % 2))}
        )
        + "\n"
        for i, v in enumerate(losses)
    )
