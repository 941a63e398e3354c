"""One sentence: the line, the expression of the source, its value, the item."""

from __future__ import annotations

import json
import runpy

import pytest
import torch

from nanguard.diagnose.cause import Case, drift_behind
from nanguard.diagnose.causes.exploding_optimization import ExplodingOptimization
from nanguard.diagnose.lab import Budget, Lab, limits_for
from nanguard.diagnose.repairs import bounded_divisor, clipped_gradients, inside_a_library
from nanguard.diagnose.sentence import item_in_words, sentence, users_site
from nanguard.replay.task import Facts, ReplayOutcome, Task
from nanguard.replay.tracer import sites
from nanguard.replay.tracer.origin import origin_of, producers
from nanguard.replay.tracer.sites import Site
from nanguard.replay.tracer.trace import Trace
from nanguard.replay.watch import Curves
from nanguard.view.report import words


def case_of(tmp_path, code: str, **facts) -> Case:
    """Returns the bad step that some lines of a script make, whose last value is ``loss``."""
    path = tmp_path / "train.py"
    path.write_text(f"import torch\nimport torch.nn.functional as F\n{code}\n")
    trained = torch.tensor([-700.0], requires_grad=True)
    trace = Trace()
    trace.start()
    trace.begin_step(0)
    try:
        loss = runpy.run_path(str(path), {"trained": trained})["loss"]
        writer = trace.writer(loss)
        assert writer is not None
        origin = origin_of(producers([writer])[0], trace, sink="loss")
    finally:
        trace.stop()
    lab = Lab(None, Task(0), Budget(limits_for(1.0, None)))  # type: ignore[arg-type] - unused
    return Case(ReplayOutcome(facts=Facts(**facts)), origin, lab)


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("code", "cause", "said"),
    [
        (
            "x = torch.ones(3, 4)\nloss = ((x - 1) / x.std(1, keepdim=True)).sum()",
            "degenerate-statistics",
            "train.py:4 divides by x.std(1, keepdim=True), which is 0 for dataset item 17: "
            "0/0 = NaN",
        ),
        (
            "n = torch.zeros(())\nloss = torch.tensor(2.5) / n",
            "division-by-zero",
            "train.py:4 divides by n = torch.zeros(()), which is 0 for dataset item 17: "
            "2.5/0 = inf",
        ),
        (
            "p = torch.tensor([0.5, 0.0])\nloss = -p.log().mean()",
            "log-or-sqrt-domain",
            "train.py:4 takes the log of p = torch.tensor([0.5, 0.0]), which is 0 for dataset "
            "item 17: log(0) = -inf",
        ),
        (
            "v = torch.tensor([2.0, -0.25])\nloss = torch.sqrt(v *\n  1.0).sum()",
            "log-or-sqrt-domain",
            "train.py:4 takes the square root of v * 1.0, which is -0.25 for dataset item 17: "
            "sqrt(-0.25) = NaN",
        ),
        (
            "z = torch.tensor([700.0])\nloss = torch.exp(z).sum()",
            "exp-overflow",
            "train.py:4 takes the exp of z = torch.tensor([700.0]), which is 700 for dataset "
            "item 17: exp(700) = inf",
        ),
        (
            "one = torch.ones(1)\nloss = one.std()",
            "degenerate-statistics",
            "train.py:4 takes the standard deviation of one = torch.ones(1), which holds a single "
            "value for dataset item 17: 0/0 = NaN",
        ),
        (
            "s = torch.full((2, 3), float('-inf'))\nloss = F.softmax(s, dim=-1).sum()",
            "fully-masked-softmax",
            "train.py:4 takes the softmax of s = torch.full((2, 3), float('-inf')), where a whole "
            "row is -inf for dataset item 17: the result is NaN",
        ),
        (
            "w = torch.tensor([1e30])\nloss = (w * w).sum()",
            "exploding-optimization",
            "train.py:4 computes w * w, whose inputs have grown to 1e+30: the result is more than "
            "float32 holds; the learning rate is 3",
        ),
        (
            "x = torch.ones(4)\nkept = x[x > 1]\nloss = kept.mean()",
            "empty-reduction",
            "train.py:5 takes the mean of kept = x[x > 1], which is empty: 0/0 = NaN",
        ),
        (
            "x = torch.zeros(2)\nloss = F.cosine_similarity(x / 0, x, dim=0)",
            "division-by-zero",
            "train.py:4 divides by 0 for dataset item 17: 0/0 = NaN",
        ),
        (
            "x = torch.tensor([1.0, float('nan')])\nloss = x.sum()",
            "label-out-of-range",
            "train.py:3 computes torch.tensor([1.0, float('nan')]) (dataset item 17): why",
        ),
    ],
)
def test_what_a_tired_person_reads(tmp_path, code, cause, said):
    case = case_of(tmp_path, code, samples=[1], indices=[17], lr=3.0)
    assert sentence(case, cause, "why", str(tmp_path)) == said


def test_the_line_of_the_user_comes_before_that_of_a_library(tmp_path, monkeypatch):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "thing.py").write_text("def scaled(x, by):\n    return x / by\n")
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.setattr(sites, "_SITE", (f"{library}/",))
    code = "import thing\n\nloss = thing.scaled(torch.ones(2), torch.zeros(2)).sum()"
    case = case_of(tmp_path, code)
    assert sentence(case, "division-by-zero", "why", str(tmp_path)) == (
        "train.py:5 calls thing.scaled(torch.ones(2), torch.zeros(2)); in it, "
        "site-packages/thing.py:2 divides by by, which is 0 in 2 of 2 places: 1/0 = inf"
    )
    outer = users_site(case.origin.site, case.origin.callers)
    assert outer is not None
    assert outer.line == 5
    # Nobody edits a library: what it is given is what can be changed.
    assert bounded_divisor(case) == []
    (advice,) = inside_a_library(case)
    assert advice.summary == "train.py:5: change what the library is given; div runs in thing.py:2"


def test_items_are_named_by_their_place_in_the_data_set():
    assert item_in_words([2], [40]) == "dataset item 40"
    assert item_in_words([2, 3], []) == "samples 2, 3 of the batch"
    assert item_in_words(range(5), range(10, 15)) == "dataset items 10, 11, 12 and 2 more"
    assert item_in_words([], []) == ""
    assert users_site(Site("train.py", 3, "f"), []) is None


# Divergence.


def test_losses_that_run_away_make_divergence_likely_before_anything_was_tried(tmp_path):
    code = "w = trained * 1e30\nloss = (w * w).sum()"
    strengths = [
        ExplodingOptimization().suspect(case_of(tmp_path, code, losses=losses, lr=3.0)).strength
        for losses in ([1.0, 1.1, 0.9, 1.0], [1.0, 40.0, 3e3, 8e9])
    ]
    assert strengths == [0.7, 0.85]


@pytest.mark.parametrize(("limit", "advised"), [(None, 1), (1e9, 1), (1.0, 0)])
def test_who_clips_already_is_not_told_to_clip(tmp_path, limit, advised):
    code = "w = trained * 1e30\nloss = (w * w).sum()"
    case = case_of(tmp_path, code, clip_limit=limit)
    case.facts.backward_site = Site(str(tmp_path / "train.py"), 4, "<module>")
    repairs = clipped_gradients(case)
    assert len(repairs) == advised
    # This one step is bad whether its gradients are clipped or not.
    assert all(repair.acts_later for repair in repairs)


# Drift.


def test_a_quantity_that_drifts_is_named_with_the_step_since_which_it_does(tmp_path):
    curves = Curves()
    for step in range(400):
        moved = max(0.0, (step - 100) * 0.1)
        curves.look(step, {"log_var": torch.tensor([0.5, -moved]), "bias": torch.ones(3)})
    code = "loss = torch.exp(-trained).sum()"
    case = case_of(tmp_path, code, curves=curves.all())
    for ancestors in case.origin.ancestors.values():
        for ancestor in ancestors:
            ancestor.name = "log_var" if ancestor.op == "parameter" else None
    drift = drift_behind(case)
    assert drift is not None
    assert drift.name == "log_var"
    assert 105 <= drift.began <= 140  # a tenth of the way, to within the distance of two points
    assert len(drift.curve) <= 129
    incident = json.loads(json.dumps({"drift": drift.to_json()}))
    assert words.drift(incident).startswith(f"log_var since step {drift.began}: 0.5 ")


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 50,
        [1.0, 1.1] * 25,  # it only jitters
        [1.0] * 48 + [1.0, 1e9],  # an explosion is no drift
        [0.0, 50.0],  # too short to tell
    ],
    ids=["still", "jitter", "explosion", "short"],
)
def test_what_does_not_drift_is_not_named(tmp_path, values):
    curve = list(enumerate(values))
    code = "loss = torch.exp(-trained).sum()"
    case = case_of(tmp_path, code, curves={"trained": curve})
    for ancestors in case.origin.ancestors.values():
        for ancestor in ancestors:
            ancestor.name = "trained" if ancestor.op == "parameter" else None
    assert drift_behind(case) is None
    # The same parameter, if it had drifted, would be.
    case.facts.curves["trained"] = [(step, float(step)) for step in range(50)]
    assert drift_behind(case) is not None


@pytest.mark.parametrize("curve", [None, 3, [[0, "x"], [1, {}]], [[0, 10**400], [1, True]]])
def test_the_curve_of_a_stranger_is_left_out(curve):
    assert words.drift({"drift": {"tensor": "w", "first_step": 3, "curve": curve}}) == ""
