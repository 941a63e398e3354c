"""Checkpoints of every format, each with what has to be found in it."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    import pathlib

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    """A checkpoint: how it is written, and which rules have to speak, in which file or step."""

    name: str
    write: Any
    expected: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    step: int | None = None


CASES: list[Case] = []


def case(*expected: str, tolerated: tuple[str, ...] = (), step: int | None = None):
    def add(write):
        CASES.append(Case(write.__name__, write, expected, tolerated, step))
        return write

    return add


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        collections.OrderedDict(
            emb=nn.Embedding(20, 8),
            fc=nn.Linear(8, 16),
            norm=nn.BatchNorm1d(16),
            out=nn.Linear(16, 4),
        )
    )


def weights(**change: float) -> dict[str, torch.Tensor]:
    state = {key: value.clone() for key, value in net().state_dict().items()}
    for name, value in change.items():
        state[name.replace("__", ".")].view(-1)[1] = value
    return state


def adam(kind: type = torch.optim.AdamW, **change: float) -> dict[str, Any]:
    model = net()
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(0, 20, (6,))).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()
    for name, value in change.items():
        state["state"][1][name].view(-1)[0] = value
    return state


def safetensors(path: pathlib.Path, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    names = {
        torch.float32: "F32",
        torch.float64: "F64",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def save(obj: Any, path: pathlib.Path, **how: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(obj, path, **how)


# ------------------------------------------------------------------ healthy


@case()
def plain_state_dict(f):
    save(weights(), f / "model.pt")


@case()
def lightning_with_records(f):
    save(
        {
            "epoch": 4,
            "global_step": 500,
            "pytorch-lightning_version": "2.1.0",
            "state_dict": weights(),
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {
                "EarlyStopping{'monitor': 'val_loss'}": {
                    "best_score": torch.tensor(INF),
                    "wait_count": 0,
                },
                "ModelCheckpoint": {"best_model_score": torch.tensor(NAN), "kth_value": INF},
            },
            "optimizer_states": [adam()],
            "lr_schedulers": [{"best": INF, "mode": "min", "last_epoch": 3}],
            "hparams_name": "kwargs",
            "hyper_parameters": {"gradient_clip_val": INF},
        },
        f / "epoch=4-step=500.ckpt",
    )


@case()
def infinite_buffers(f):
    model = net()
    model.register_buffer("attn_mask", torch.full((6, 6), -INF).triu(1))
    model.register_buffer("running_min", torch.full((4,), INF))
    model.register_buffer("running_max", torch.full((4,), -INF))
    model.register_buffer("min_val", torch.tensor(INF))
    model.register_buffer("max_val", torch.tensor(-INF))
    model.register_buffer("bias_table", torch.zeros(1, 4, 4).masked_fill(torch.eye(4) > 0, -INF))
    model.register_buffer("action_low", torch.full((3,), -INF))
    save(model.state_dict(), f / "with_buffers.pth")


@case()
def noise_schedule(f):
    t = torch.linspace(0, 1, 50)
    alphas = torch.cos(t * 1.5707963).square()
    alphas[-1] = 0.0
    save(
        {
            **weights(),
            "alphas_cumprod": alphas,
            "sqrt_recip_alphas_cumprod": alphas.rsqrt(),
            "log_snr": torch.log(alphas / (1 - alphas)),
            "sigmas": torch.tensor([1e5, 10.0, 0.0]),
        },
        f / "ddpm.pt",
    )


@case()
def large_but_meant(f):
    safetensors(
        f / "model.safetensors",
        {
            **weights(),
            "attn.masked_bias": torch.tensor(-1e9),
            "attn.causal_mask": torch.full((4, 4), torch.finfo(torch.float32).min).triu(1),
            "attn.bias": torch.full((1, 1, 4, 4), -1e9).triu(1),
            "tokens_seen": torch.tensor([3e11]),
            "vq.cluster_size": torch.tensor([2e6, 3.0]),
            "norm2.running_var": torch.tensor([4e5, 2.0]),
            "rope.inv_freq": torch.tensor([1.0, 1e5]),
            "step": torch.tensor(250000.0),
        },
    )


@case()
def statistics_of_observations(f):
    save(
        {"policy": weights(), "obs_rms": {"mean": torch.ones(3) * 2e5, "var": torch.ones(3) * 4e8}},
        f / "agent.pt",
    )


@case()
def half_precision_fill(f):
    fill = torch.finfo(torch.float16).min
    safetensors(f / "m.safetensors", {"attn.bias": torch.full((1, 1, 4, 4), fill).triu(1).half()})


@case()
def edge_of_half(f):
    safetensors(f / "m.safetensors", weights(out__weight=65504.0, fc__weight=-65504.0))


@case()
def half_types(f):
    state = {k: v for k, v in weights().items() if v.is_floating_point()}
    safetensors(f / "bf16.safetensors", {k: v.bfloat16() for k, v in state.items()}, format="pt")


@case()
def odd_tensors(f):
    save(
        {
            "empty.weight": torch.empty(0, 3),
            "scalar.weight": torch.tensor(3.0),
            "complex.weight": torch.randn(3, dtype=torch.complex64),
            "double.weight": torch.randn(3, dtype=torch.float64),
            "fp8.weight": torch.randn(9).to(torch.float8_e4m3fn),
            "fp8b.weight": torch.randn(9).to(torch.float8_e5m2),
            "sparse.weight": torch.eye(4).to_sparse(),
            "quant.weight": torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8),
            "param": nn.Parameter(torch.randn(2, 2)),
        },
        f / "odd.pt",
    )


@case()
def view_of_a_poisoned_storage(f):
    whole = torch.randn(100)
    whole[60:] = NAN
    save({"w": whole[:50], "v": whole[:50].view(10, 5).t(), "s": whole[0:50:7]}, f / "view.pt")


@case()
def legacy_healthy(f):
    save(
        {"model": weights(), "optimizer": adam(torch.optim.Adam), "best": INF},
        f / "old.pth.tar",
        _use_new_zipfile_serialization=False,
    )


@case()
def sharded_healthy(f):
    state = weights()
    names = list(state)
    parts = {
        "model-00001-of-00002.safetensors": names[:4],
        "model-00002-of-00002.safetensors": names[4:],
    }
    for file, some in parts.items():
        safetensors(f / file, {name: state[name] for name in some})
    where = {name: file for file, some in parts.items() for name in some}
    (f / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )


@case()
def records_of_a_bad_loss(f):
    save(
        {
            "model": weights(),
            "loss": torch.tensor(NAN),
            "history": [1.0, NAN],
            "metrics": {"val_loss": torch.tensor([INF, 1.0])},
            "grad_norm": torch.tensor(INF),
        },
        f / "ckpt.pt",
    )


@case()
def optimizer_settings_without_limit(f):
    state = adam()
    state["param_groups"][0]["growth_rate"] = INF
    save({"model": weights(), "optimizer": state}, f / "prodigy.pt")


@case()
def torchscript(f):
    torch.jit.save(torch.jit.script(nn.Linear(3, 2)), f / "scripted.pt")


@case()
def accelerate_state(f):
    inside = f / "checkpoint_3"
    safetensors(inside / "model.safetensors", weights())
    save(adam(), inside / "optimizer.bin")
    save({"scale": 65536.0, "_growth_tracker": 3}, inside / "scaler.pt")
    states = {"numpy": np.random.RandomState(0).get_state(), "torch": torch.get_rng_state()}
    save(states, inside / "random_states_0.pkl")


@case(tolerated=("unsafe-pickle",))
def numpy_scalar_inside(f):
    save({"model": weights(), "best_acc": np.float64(0.9)}, f / "best.pt")


@case()
def run_that_is_good(f):
    for step in (100, 200, 300):
        save({"model": weights(), "step": step}, f / "run" / f"model_{step}.pt")


@case()
def ranks_are_no_run(f):
    for rank in (0, 1):
        save({"shard": weights()}, f / "r" / f"state_rank_{rank}.pt")


@case()
def distributed_healthy(f):
    distributed(f / "step-10", {"model": weights(), "optimizer": {"exp_avg": torch.zeros(4)}})


def distributed(folder: pathlib.Path, state: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=str(folder), no_dist=True)


# ------------------------------------------------------------------ not finite


@case("non-finite-weight")
def nan_in_archive(f):
    save({"state_dict": weights(fc__weight=NAN)}, f / "model.ckpt")


@case("non-finite-weight")
def inf_in_legacy(f):
    save(weights(out__bias=-INF), f / "m.pth", _use_new_zipfile_serialization=False)


@case("non-finite-weight")
def nan_in_bf16(f):
    safetensors(f / "m.safetensors", {"fc.weight": torch.tensor([1.0, NAN]).bfloat16()})


@case("non-finite-weight")
def inf_in_fp16(f):
    save({"fc.weight": torch.tensor([1.0, 1e6]).half()}, f / "m.bin")


@case("non-finite-weight")
def nan_in_fp8(f):
    save({"fc.weight": torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)}, f / "m.pt")


@case("non-finite-weight")
def inf_in_fp64(f):
    save({"fc.weight": torch.tensor([1.0, INF], dtype=torch.float64)}, f / "m.pt")


@case("non-finite-weight")
def nan_in_complex(f):
    save({"fc.weight": torch.tensor([1 + 1j, complex(0, NAN)])}, f / "m.pt")


@case("non-finite-weight")
def nan_scale_of_quantised(f):
    good = torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8)
    bad = torch._make_per_tensor_quantized_tensor(good.int_repr(), NAN, 0)
    save({"fc.weight": bad}, f / "m.pt")


@case("non-finite-weight")
def nan_behind_a_stride(f):
    whole = torch.zeros(10, 10)
    whole[7, 3] = NAN
    save({"column.weight": whole[:, 3]}, f / "m.pt")


@case("non-finite-weight")
def nan_in_a_mask(f):
    save({**weights(), "attn_mask": torch.tensor([[0.0, NAN], [0.0, -INF]])}, f / "m.pt")


@case("non-finite-weight")
def inf_in_a_mask_token(f):
    save({**weights(), "mask_token": torch.full((1, 1, 8), -INF)}, f / "mae.pt")


@case("non-finite-weight")
def a_whole_layer_of_minus_inf(f):
    save({"proj.weight": torch.full((4, 4), -INF)}, f / "m.pt")


@case("non-finite-ema")
def average_kept_by_a_callback(f):
    ema = {"ema_state_dict": weights(fc__weight=NAN)}
    save({"state_dict": weights(), "callbacks": {"WeightAveraging": ema}}, f / "c.ckpt")


@case("non-finite-ema")
def average_kept_within_a_model(f):
    state = {**weights(), **{f"ema.{k}": v for k, v in weights(fc__weight=NAN).items()}}
    save({"model": state}, f / "c.pt")


@case("non-finite-weight")
def inf_among_zeros_of_a_bias(f):
    bias = torch.zeros(8)
    bias[3] = INF
    save({"norm.bias": bias}, f / "m.pt")


@case("non-finite-weight", "unsafe-pickle")
def nan_in_a_numpy_pickle(f):
    with (f / "R50.pkl").open("wb") as file:
        big = np.ones((30, 40), "f4")
        big[3, 4] = np.nan
        pickle.dump({"model": {"conv1_w": big}}, file)


@case("non-finite-weight", tolerated=("unsafe-pickle",))
def nan_in_a_plain_pickle(f):
    with (f / "state.pkl").open("wb") as file:
        pickle.dump(weights(fc__weight=NAN), file)


@case("non-finite-weight")
def nan_in_a_shard(f):
    state = weights(out__weight=NAN)
    names = list(state)
    parts = {
        "pytorch_model-00001-of-00002.bin": names[:4],
        "pytorch_model-00002-of-00002.bin": names[4:],
    }
    for file, some in parts.items():
        save({name: state[name] for name in some}, f / "hub" / file)
    where = {name: file for file, some in parts.items() for name in some}
    (f / "hub/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


@case("non-finite-weight")
def nan_in_distributed(f):
    distributed(f / "step-10", {"model": weights(fc__weight=NAN)})


@case("non-finite-optimizer-state")
def nan_moment_in_distributed(f):
    state = {
        "model": weights(),
        "optimizer": {"state": {"fc": {"exp_avg": torch.tensor([NAN, 1.0])}}},
    }
    distributed(f / "dist", state)


@case("non-finite-optimizer-state")
def nan_moment(f):
    save({"model_state_dict": weights(), "optimizer_state_dict": adam(exp_avg_sq=NAN)}, f / "c.pt")


@case("non-finite-optimizer-state")
def inf_moment_in_a_list(f):
    save({"nets": weights(), "opts": [adam(), adam(exp_avg=INF)]}, f / "c.pt")


@case("non-finite-optimizer-state")
def nan_in_optimizer_file(f):
    safetensors(f / "checkpoint-7" / "model.safetensors", weights())
    save(adam(exp_avg=NAN), f / "checkpoint-7" / "optimizer.pt")


@case("non-finite-optimizer-state")
def nan_learning_rate(f):
    state = adam()
    state["param_groups"][0]["lr"] = NAN
    save({"model": weights(), "optimizer": state}, f / "c.pt")


@case("non-finite-optimizer-state")
def infinite_loss_scale(f):
    save({"model": weights(), "scaler": {"scale": INF, "_growth_tracker": 0}}, f / "c.pt")


@case("non-finite-optimizer-state")
def deepspeed_partition(f):
    inside = f / "ds" / "global_step20"
    save({"module": weights(), "global_steps": 20}, inside / "mp_rank_00_model_states.pt")
    flat = torch.randn(64)
    flat[5] = NAN
    base = {"state": {0: {"exp_avg": flat, "exp_avg_sq": torch.rand(64)}}, "param_groups": []}
    save(
        {"optimizer_state_dict": {"base_optimizer_state": base, "zero_stage": 2}},
        inside / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    (f / "ds" / "latest").write_text("global_step20")


@case("non-finite-weight")
def deepspeed_weights(f):
    inside = f / "ds" / "global_step20"
    save({"module": weights(fc__bias=NAN)}, inside / "mp_rank_00_model_states.pt")


@case("non-finite-ema")
def nan_in_timm_ema(f):
    save({"state_dict": weights(), "state_dict_ema": weights(fc__weight=NAN)}, f / "c.pth.tar")


@case("non-finite-ema")
def nan_in_flat_ema(f):
    state = {f"model.{k}": v for k, v in weights().items()}
    state |= {f"model_ema.{k}": v for k, v in weights(fc__weight=INF).items()}
    save({"state_dict": state}, f / "ldm.ckpt")


@case("non-finite-ema")
def nan_in_ema_folder(f):
    safetensors(f / "unet_ema" / "diffusion_pytorch_model.safetensors", weights(fc__weight=NAN))


@case("non-finite-ema", "non-finite-weight", "non-finite-optimizer-state")
def everything_bad(f):
    save(
        {
            "model": weights(fc__weight=NAN),
            "optimizer": adam(exp_avg=NAN),
            "ema": {"shadow": weights(fc__weight=NAN)},
        },
        f / "c.pt",
    )


# ------------------------------------------------------------------ large


@case("overflows-half-precision")
def just_beyond_half(f):
    save(weights(out__weight=65600.0), f / "m.pt")


@case("overflows-half-precision")
def bf16_beyond_half(f):
    safetensors(f / "m.safetensors", {"fc.weight": torch.tensor([1.0, -2e5]).bfloat16()})


@case("exploded-weight")
def exploded(f):
    state = weights()
    state["fc.weight"] *= 1e12
    save({"net": state}, f / "m.pth")


@case("exploded-weight")
def exploded_fp64(f):
    save({"fc.weight": torch.tensor([1.0, 1e200], dtype=torch.float64)}, f / "m.pt")


@case("exploded-weight")
def exploded_statistics(f):
    save(weights(norm__running_var=1e20), f / "m.pth")


class RunningSums:
    """Statistics of observations, as an object that is pickled with the weights."""

    def __init__(self, kind: Any, **more: Any) -> None:
        self._M, self._S = kind([0.1, 0.2]), kind([3e7, 2e9])
        self.__dict__.update(more)


def sums_of_arrays(numbers: list[float]) -> Any:
    return np.array(numbers, "f8")


@case("unsafe-pickle")
def running_sums_of_a_normaliser(f):
    arrays = {"squares": sums_of_arrays([1e9, 2e9])}
    inner = RunningSums(sums_of_arrays, arrays=arrays)
    outer = RunningSums(torch.tensor, rs=inner)
    save({"model": weights(), "normalizer": outer}, f / "m.pt")


@case("unsafe-pickle", "exploded-weight")
def exploded_state_in_an_object(f):
    holder = RunningSums(torch.tensor, state=weights(fc__weight=1e12))
    save({"agent": holder}, f / "m.pt")


@case("unsafe-pickle", "exploded-weight")
def exploded_module_in_an_object(f):
    model = net()
    model.load_state_dict(weights(fc__weight=1e12))
    save({"agent": RunningSums(torch.tensor, model=model)}, f / "m.pt")


@case("unsafe-pickle", "exploded-weight")
def exploded_parameter_of_an_object(f):
    bias = nn.Parameter(torch.tensor([1.0, 1e12]))
    save({"agent": RunningSums(torch.tensor, bias=bias)}, f / "m.pt")


@case("unsafe-pickle", "non-finite-weight")
def nan_in_the_sums_of_a_normaliser(f):
    sums = RunningSums(sums_of_arrays, count=sums_of_arrays([NAN, 1.0]))
    save({"model": weights(), "normalizer": sums}, f / "m.pt")


# ------------------------------------------------------------------ not whole


def _cut(path: pathlib.Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@case("truncated-checkpoint")
def cut_archive(f):
    save(weights(), f / "m.pt")
    _cut(f / "m.pt", 0.7)


@case("truncated-checkpoint")
def cut_safetensors(f):
    safetensors(f / "m.safetensors", weights())
    _cut(f / "m.safetensors", 0.9)


@case("truncated-checkpoint")
def cut_in_the_header(f):
    safetensors(f / "m.safetensors", weights())
    (f / "m.safetensors").write_bytes((f / "m.safetensors").read_bytes()[:100])


@case("truncated-checkpoint")
def cut_legacy(f):
    save(weights(), f / "m.pth", _use_new_zipfile_serialization=False)
    _cut(f / "m.pth", 0.8)


@case("truncated-checkpoint")
def empty_file(f):
    (f / "last.ckpt").write_bytes(b"")


@case("truncated-checkpoint")
def only_zeros(f):
    (f / "last.pt").write_bytes(bytes(5000))


@case("truncated-checkpoint")
def pointer_of_lfs(f):
    (f / "pytorch_model.bin").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )


@case("truncated-checkpoint")
def missing_shard(f):
    sharded_healthy(f)
    (f / "model-00002-of-00002.safetensors").unlink()


@case("truncated-checkpoint")
def missing_shard_without_index(f):
    sharded_healthy(f)
    (f / "model-00002-of-00002.safetensors").unlink()
    (f / "model.safetensors.index.json").unlink()


@case("truncated-checkpoint")
def distributed_without_metadata(f):
    distributed_healthy(f)
    (f / "step-10" / ".metadata").unlink()


@case("truncated-checkpoint")
def distributed_without_a_file(f):
    distributed_healthy(f)
    for file in (f / "step-10").glob("*.distcp"):
        file.unlink()


@case("truncated-checkpoint")
def distributed_cut(f):
    distributed_healthy(f)
    for file in (f / "step-10").glob("*.distcp"):
        _cut(file, 0.5)


@case("truncated-checkpoint")
def archive_without_a_storage(f):
    save(weights(), f / "full.pt")
    with zipfile.ZipFile(f / "full.pt") as old, zipfile.ZipFile(f / "m.pt", "w") as new:
        for name in old.namelist():
            if not name.endswith("data/2"):
                new.writestr(name, old.read(name))
    (f / "full.pt").unlink()


# ------------------------------------------------------------------ code


class Payload:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def _marker() -> str:
    return f"touch {os.environ.get('NANGUARD_MARKER', '/nonexistent/marker')}"


@case("unsafe-pickle")
def code_in_archive(f):
    save({"w": torch.ones(2), "x": Payload(os.system, (_marker(),))}, f / "m.bin")


@case("unsafe-pickle")
def code_in_legacy(f):
    save([Payload(exec, ("open('x','w')",))], f / "m.pth", _use_new_zipfile_serialization=False)


@case("unsafe-pickle")
def code_in_plain_pickle(f):
    (f / "m.pkl").write_bytes(pickle.dumps(Payload(os.system, (_marker(),))))


@case("unsafe-pickle", "non-finite-weight")
def code_and_nan(f):
    save({"w": torch.tensor([NAN]), "x": Payload(eval, ("1",))}, f / "m.pt")


@case("unsafe-pickle")
def a_whole_module(f):
    save(net(), f / "model_full.pt")


@case("unsafe-pickle", "non-finite-weight")
def a_whole_module_with_nan(f):
    model = net()
    model.fc.weight.data[1, 2] = NAN
    save(model, f / "model_full.pt")


@case("unsafe-pickle")
def a_namespace(f):
    save({"model": weights(), "args": argparse.Namespace(lr=1e-3)}, f / "checkpoint.pth")


# ------------------------------------------------------------------ runs


@case("last-good-checkpoint", "non-finite-weight", step=300)
def poisoned_run_of_files(f):
    for step in (100, 200, 300, 400, 1500):
        bad = {"fc__weight": NAN} if step > 300 else {}
        save({"model": weights(**bad)}, f / "run" / f"step_{step}.pt")


@case("last-good-checkpoint", "non-finite-optimizer-state", step=1000)
def poisoned_moments_of_a_run(f):
    for step in (500, 1000, 1500):
        inside = f / "out" / f"checkpoint-{step}"
        safetensors(inside / "model.safetensors", weights())
        save(adam(**({"exp_avg": NAN} if step == 1500 else {})), inside / "optimizer.pt")


@case("last-good-checkpoint", "truncated-checkpoint", step=2)
def cut_newest_of_a_run(f):
    for epoch in (0, 1, 2, 3):
        save(weights(), f / "ckpts" / f"epoch_{epoch}.pth")
    _cut(f / "ckpts" / "epoch_3.pth", 0.5)


@case("last-good-checkpoint", "non-finite-weight", step=1099)
def poisoned_lightning_run(f):
    for epoch, step in ((0, 549), (1, 1099), (2, 1649)):
        bad = {"fc__weight": NAN} if epoch == 2 else {}
        name = f"epoch={epoch}-step={step}.ckpt"
        save({"state_dict": weights(**bad), "global_step": step}, f / "logs" / name)
    save({"state_dict": weights(fc__weight=NAN), "global_step": 1650}, f / "logs" / "last.ckpt")


@case("last-good-checkpoint", "non-finite-weight", step=20)
def poisoned_deepspeed_run(f):
    for step in (10, 20, 30):
        bad = {"fc__weight": NAN} if step == 30 else {}
        save(
            {"module": weights(**bad)},
            f / "ds" / f"global_step{step}" / "mp_rank_00_model_states.pt",
        )
    (f / "ds" / "latest").write_text("global_step30")


@case("last-good-checkpoint", "non-finite-weight", step=20)
def poisoned_distributed_run(f):
    for step in (10, 20, 30):
        bad = {"fc__weight": NAN} if step == 30 else {}
        distributed(f / "checkpoint" / f"step-{step}", {"model": weights(**bad)})


@case("non-finite-weight")
def run_without_a_good_one(f):
    for step in (10, 20):
        save(weights(fc__weight=NAN), f / "run" / f"ckpt_{step}.pt")


@case("last-good-checkpoint", "truncated-checkpoint", step=200)
def unfinished_folder(f):
    for step in (100, 200, 300):
        inside = f / "out" / f"checkpoint-{step}"
        if step < 300:
            safetensors(inside / "model.safetensors", weights())
        save(adam(), inside / "optimizer.pt")


@case(tolerated=("unsafe-pickle",))
def nan_in_a_pickle_of_data(f):
    with (f / "faces.pkl").open("wb") as file:
        pickle.dump({"images": np.full((30, 40), np.nan, "f4"), "labels": [1, 2]}, file)
