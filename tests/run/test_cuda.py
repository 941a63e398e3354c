"""``nanguard run`` on a GPU: late verdicts, and replays in the run itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nanguard.replay.tracer.origin import origin_of, producers
from nanguard.replay.tracer.trace import Trace
from tests.run.test_run import incidents, plain, run
from tests.run.test_samples import check_rates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPTS = Path(__file__).parent / "scripts"
BY_HAND = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
for step in range(10):
    x = torch.randn(16, 4, device="cuda")
    loss = model(x).square().mean()
    if step == BAD:
        loss = torch.log(loss * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("weights", model.weight.sum().item())
"""


def test_the_loader_gives_the_bad_batch_out_again(tmp_path):
    done = run(tmp_path, sys.executable, SCRIPTS / "divides.py", "cuda")
    assert done.returncode == 0, done.stderr
    assert "finite True" in done.stdout
    (found,) = incidents(tmp_path)
    assert found["replay"]["method"] == "in-place"
    assert found["replay"]["verdict"] == "reproduced"
    assert (found["origin"]["op"], found["origin"]["line"]) == ("aten.div", 25)
    assert found["cause"]["code"] == "division-by-zero"
    assert found["fixes"][0]["verified"]
    assert (found["step"], [again["step"] for again in found["again"]]) == (5, [15])
    assert (found["samples"], found["bad_items"]) == ([2], [42])


def test_a_loop_without_loader_is_explained(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BY_HAND.replace("BAD", "6"))
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    found = incidents(tmp_path)[0]
    assert (found["step"], found["replay"]["method"]) == (6, "in-place")
    assert (found["origin"]["op"], found["origin"]["line"]) == ("aten.log", 11)
    assert found["cause"]["code"] == "log-or-sqrt-domain"


def test_healthy_run_is_the_same(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BY_HAND.replace("BAD", "-1"))
    bare, done = plain(tmp_path, sys.executable, path), run(tmp_path, sys.executable, path)
    assert done.stdout == bare.stdout
    assert " steps guarded, none bad\nnanguard: see it: nanguard report\n" in done.stderr
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_trace_finds_the_origin_on_the_device(half):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).cuda()
    trace = Trace()
    trace.start()
    try:
        trace.begin_step(0)
        with torch.autocast("cuda", dtype=half):
            out = model(torch.randn(3, 4, device="cuda"))
            masked = out.masked_fill(torch.tensor([[True, False]], device="cuda"), float("-inf"))
            loss = torch.log(masked.float().softmax(-1).sum() * 0)
        loss.backward()
        trace.end_backward()
    finally:
        trace.stop()
    trace.resolve()
    found = origin_of(producers([trace.writer(loss)])[0], trace, sink="loss")
    assert (found.op, found.phase) == ("aten.log", "forward")


def test_a_traced_step_keeps_no_tensor_alive():
    model = nn.Linear(1024, 1024).cuda()
    x = torch.randn(4096, 1024, device="cuda")

    def peak(trace):
        torch.cuda.reset_peak_memory_stats()
        if trace is not None:
            trace.start()
            trace.begin_step(0)
        model(x).square().mean().backward()
        if trace is not None:
            trace.stop()
        model.zero_grad()
        return torch.cuda.max_memory_allocated()

    peak(None)
    assert peak(Trace()) <= 1.3 * peak(None)


def test_a_bad_loss_counts_where_the_script_cleans_its_gradients(tmp_path):
    path = tmp_path / "train.py"
    clean = "    for p in model.parameters():\n        p.grad.nan_to_num_(0.0, 0.0, 0.0)\n"
    script = BY_HAND.replace("BAD", "6").replace(
        "    optimizer.step()", clean + "    optimizer.step()"
    )
    path.write_text(script)
    run(tmp_path, sys.executable, path)
    assert [found["step"] for found in incidents(tmp_path)] == [6]


def test_data_made_on_the_device_is_made_again(tmp_path):
    done = run(tmp_path, sys.executable, SCRIPTS / "rates.py", "cuda")
    check_rates(done, tmp_path)


GENERATED = """
import torch
from torch import nn

def samples():
    for number in range(12):
        x = torch.rand(8, 4, device="cuda") + 0.1
        if number == 6:
            x[3] = 0
        yield x

class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x / x.sum(1, keepdim=True))

torch.manual_seed(0)
model = Shares().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
data = samples()
for step in range(12):
    x = next(data)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("weights", model.layer.weight.sum().item())
"""


def test_data_that_can_be_had_only_once(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(GENERATED)
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    (found,) = incidents(tmp_path)
    assert (found["step"], found["replay"]["method"]) == (6, "in-place")
    assert (found["origin"]["line"], found["samples"]) == (18, [3])
    # The steps that the device has ignored behind it are made once more.
    assert "not made either" not in done.stderr


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("text_on", ["cpu", "cuda"])
def test_ctc_with_lengths_on_the_cpu_is_traced(reduction, text_on):
    def step():
        torch.manual_seed(0)
        x = torch.randn(12, 3, 5, device="cuda", requires_grad=True)
        text = torch.tensor([[1, 2, 3], [2, 1, 4], [3, 3, 1]], device=text_on)
        lengths = torch.tensor([12, 11, 3]), torch.tensor([3, 2, 1])
        loss = nn.functional.ctc_loss(x.log_softmax(-1), text, *lengths, reduction=reduction)
        loss.sum().backward()
        return loss.detach(), x.grad

    bare = step()
    trace = Trace()
    trace.start()
    trace.begin_step(0)
    try:
        watched = step()
    finally:
        trace.stop()
    assert all(map(torch.allclose, bare, watched))


# --- steps that torch hands to the device as a whole -------------------------------------------

IN_A_GRAPH = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
x = torch.randn(16, 8, device="cuda")

def step():
    optimizer.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

aside = torch.cuda.Stream()
aside.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(aside):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(aside)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for number in range(200):
    x.copy_(torch.randn(16, 8, device="cuda") * (float("nan") if number == BAD else 1.0))
    graph.replay()
print("weights", model.weight.sum().item())
"""


@pytest.mark.parametrize("bad", [-1, 100])
def test_steps_in_a_cuda_graph_are_looked_at(tmp_path, bad):
    path = tmp_path / "train.py"
    path.write_text(IN_A_GRAPH.replace("BAD", str(bad)))
    bare, done = plain(tmp_path, sys.executable, path), run(tmp_path, sys.executable, path)
    assert "the script makes steps in a CUDA graph" in done.stderr
    if bad < 0:
        assert (done.returncode, done.stdout) == (0, bare.stdout)
        assert incidents(tmp_path) == []
    else:  # the weights are lost by the time that anybody can know
        assert done.returncode == 3
        assert [found["symptom"]["where"] for found in incidents(tmp_path)] == ["parameter"]


COMPILED_TO_GRAPHS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()
quick = torch.compile(model, mode="reduce-overhead")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in range(30):
    x = torch.randn(16, 8, device="cuda")
    torch.compiler.cudagraph_mark_step_begin()
    loss = quick(x).square().mean()
    if step == BAD:
        loss = torch.log(loss * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("weights", model[0].weight.sum().item())
"""


def test_a_model_compiled_to_cuda_graphs_is_guarded(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(COMPILED_TO_GRAPHS.replace("BAD", "20"))
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    found = incidents(tmp_path)
    assert [one["step"] for one in found] == [20]
    assert found[0]["cause"]["code"] == "log-or-sqrt-domain"


IN_FLOAT8 = """
import torch
from torch import nn

class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        one = torch.ones((), device="cuda")
        a = x.to(torch.float8_e4m3fn)
        b = weight.to(torch.float8_e4m3fn).t()
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad.to(weight.dtype) @ weight, grad.to(x.dtype).t() @ x

torch.manual_seed(0)
weight = nn.Parameter(torch.randn(32, 32, device="cuda") / 8)
optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
for step in range(20):
    x = torch.randn(32, 32, device="cuda")
    if step == BAD:
        x = x / (x - x)
    loss = Linear8.apply(x, weight).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("weights", weight.sum().item())
"""


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="this device does not multiply float8",
)
def test_a_step_in_float8_is_guarded_and_explained(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(IN_FLOAT8.replace("BAD", "12"))
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    (found,) = incidents(tmp_path)
    assert (found["step"], found["origin"]["op"]) == (12, "aten.div")
    assert found["cause"]["code"] == "division-by-zero"
