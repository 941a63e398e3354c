"""Numbers are judged as they come: the right alarm at the right step, and none without reason."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from nanguard.check.log.quantities import Quantity
from nanguard.view.terminal.judging import Judge, Told
from nanguard.view.terminal.reading import LineReader, Unreadable
from nanguard.view.terminal.watch_state import RunState
from tests.labelled import labelled

LOGS = Path(__file__).parents[2] / "logs"


def told_about(values: list[float], role: Quantity = Quantity.LOSS, chunk: int = 7, **marks: bool):
    judge = Judge("loss", role)
    for name, value in marks.items():
        setattr(judge, name, value)
    out: list[Told] = []
    for at in range(0, len(values), chunk):
        part = values[at : at + chunk]
        out += judge.look(part, list(range(at, at + len(part))))
    return out


def steady(count: int, level: float = 2.0) -> list[float]:
    rng = random.Random(3)
    return [level + rng.gauss(0, 0.05) for _ in range(count)]


def fed(text: str, name: str = "train.log") -> RunState:
    state = RunState(name)
    state.take(LineReader(Path(name), text.encode()[:4096]).read(text.encode()), old=False)
    return state


def test_a_steady_loss_is_silent_in_chunks_of_any_size() -> None:
    for chunk in (1, 7, 500, 5000):
        assert told_about(steady(5000), chunk=chunk) == []


def test_bad_numbers_are_one_alarm_and_their_end_is_told() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        values = [*steady(100), *[bad] * 20, *steady(50)]
        told = told_about(values)
        first, *_, last = told
        assert (first.kind, first.step, first.alarm, first.again) == (
            "non-finite-loss",
            100,
            True,
            False,
        )
        assert [one.again for one in told[1:20]] == [True] * 19
        assert (last.kind, last.step, last.alarm) == ("finite-again", 122, False)
        assert "after 20 values" in last.text


def test_a_loss_that_flickers_is_one_fault_and_a_later_one_another() -> None:
    values = [*steady(100), *[math.nan, 2.0] * 10, *steady(50), math.nan]
    fresh = [one for one in told_about(values) if one.alarm and not one.again]
    assert [one.step for one in fresh] == [100, 170]


def test_a_spike_in_thousands_of_numbers_at_once_is_found() -> None:
    values = steady(4000)
    values[3210] = 30.0
    told = told_about(values, chunk=2000)
    assert [(one.kind, one.step, one.alarm) for one in told] == [("loss-spike", 3210, True)]


def test_a_norm_that_overflows_now_and_then_is_no_alarm_while_a_scale_looks_for_its_level() -> None:
    values = [*steady(100), math.inf, *steady(50)]
    assert [one.alarm for one in told_about(values, Quantity.GRAD_NORM, scaled=True)] == [False]
    assert told_about(values, Quantity.GRAD_NORM)[0].kind == "non-finite-grad-norm"
    many = [*steady(100), *[math.inf] * 8]
    assert any(one.alarm for one in told_about(many, Quantity.GRAD_NORM, scaled=True))


def test_a_loss_that_climbs_back_is_told() -> None:
    falling = [8.0 * math.exp(-n / 300) + 1.0 for n in range(1500)]
    rising = [1.0 + n / 200 for n in range(1500)]
    kinds = {one.kind for one in told_about([*falling, *rising])}
    assert "diverging-loss" in kinds


def test_a_falling_loss_scale_is_told_once() -> None:
    scales = [65536.0] * 100 + [65536.0 / 2**n for n in range(12)]
    told = told_about(scales, Quantity.SCALE)
    assert [one.kind for one in told] == ["falling-loss-scale"]


def test_words_of_a_log_are_an_alarm_and_a_flood_of_them_is_one() -> None:
    text = "step 5 loss 2.0\n" + "WARNING: NaN loss detected at step 6, skipping\n" * 50
    state = fed(text)
    says = [one for one in state.happenings if one.kind == "log-says"]
    assert [(one.alarm, one.count) for one in says] == [(True, 50)]


def test_events_of_the_guard_are_alarms_with_what_was_done() -> None:
    line = (
        '{"time":1.0,"action":"skip","code":"RUN001","name":"non-finite-loss",'
        '"severity":"error","message":"the loss is nan","step":80}\n'
    )
    state = fed(line, "events.jsonl")
    (one,) = state.happenings
    assert (one.kind, one.step, one.alarm) == ("guard:non-finite-loss", 80, True)
    assert one.text == "guard: the loss is nan (skip)"


def test_text_json_and_tables_give_the_same_numbers() -> None:
    rows = [(n, 2.0 - n / 100, 1.0 + n / 10) for n in range(20)]
    text = "".join(f"step {n}/40 loss={a:.3f} grad_norm={b:.3f}\n" for n, a, b in rows)
    lines = "".join(f'{{"step": {n}, "loss": {a:.3f}, "grad_norm": {b:.3f}}}\n' for n, a, b in rows)
    table = "step,loss,grad_norm\n" + "".join(f"{n},{a:.3f},{b:.3f}\n" for n, a, b in rows)
    for state in (fed(text), fed(lines, "m.jsonl"), fed(table, "m.csv")):
        assert state.step == 19
        loss, norm = state.main(Quantity.LOSS), state.main(Quantity.GRAD_NORM)
        assert loss is not None
        assert norm is not None
        assert (round(loss.last, 3), round(norm.last, 3), loss.count) == (1.81, 2.9, 20)
    assert fed(text).total == 40


def test_the_step_is_that_of_the_last_line_and_a_scale_in_the_same_lines_is_known() -> None:
    text = "".join(f"step {n} loss 2.0 grad_norm 1.0 scale 1024\n" for n in range(30))
    state = fed(text + "step 30 loss 2.0 grad_norm inf\n")
    assert state.step == 30
    assert [(one.kind, one.alarm) for one in state.happenings] == [("overflow", False)]


def test_holes_in_a_table_are_no_alarm_and_a_column_of_them_is() -> None:
    head = "step,loss,lr\n"
    holes = "".join(f"{n},{'nan' if n % 2 else 2.0},0.1\n" for n in range(40))
    assert not fed(head + holes, "m.csv").alarms
    assert fed(head + "1,2.0,0.1\n" + "2,nan,0.1\n" * 5, "m.csv").alarms == 1


def test_a_restart_is_told_and_not_joined() -> None:
    text = "".join(f"step {n} loss 2.0\n" for n in range(100))
    state = RunState("a")
    reader = LineReader(Path("a.log"), b"")
    state.take(reader.read(text.encode()), old=False)
    state.take(reader.read(text.encode()), old=False)
    assert [one.kind for one in state.happenings] == ["restart"]
    loss = state.main(Quantity.LOSS)
    assert loss is not None
    assert [place for place, one in enumerate(loss.trace.buckets) if one.begins] == [100]


def test_binary_runs_are_refused_by_name() -> None:
    with pytest.raises(Unreadable, match="W&B"):
        LineReader(Path("run.wandb"), b":W&B\0\0\0\0")


def test_two_runs_in_one_file_are_a_restart_and_epochs_are_none() -> None:
    run_twice = "".join(f"step {n} loss 2.0\n" for n in range(100)) * 2
    state = fed(run_twice)
    assert [(one.kind, one.step) for one in state.happenings] == [("restart", 0)]
    epochs = "".join(f"epoch {e} step {n}/50 loss 2.0\n" for e in range(4) for n in range(50))
    state = fed(epochs)
    assert list(state.happenings) == []
    assert not state.reached_total()


def alarms_of(path: Path) -> set[str]:
    data = path.read_bytes()
    state = RunState("a")
    state.take(LineReader(path, data[:65536]).read(data), old=False)
    return {one.kind for one in state.happenings if one.alarm}


# Too short to tell while it goes on; and a game, in which a loss may rise.
TOO_EARLY = {"open/exp9/training_history.csv", "own/sac_critic.jsonl"}
KINDS = {
    "non-finite-loss",
    "non-finite-grad-norm",
    "loss-spike",
    "grad-norm-spike",
    "diverging-loss",
    "falling-loss-scale",
}


def test_logs_of_all_kinds_raise_the_alarms_they_should_and_no_others() -> None:
    seen = 0
    for case in labelled(LOGS):
        path = LOGS / case["path"]
        if path.is_dir() or path.suffix == ".json":
            continue
        expected = {one["rule"] for one in case["expected"]}
        allowed = expected | {
            one["rule"] if isinstance(one, dict) else one for one in case["tolerated"]
        }
        found = alarms_of(path)
        assert found <= allowed, case["path"]
        if case["path"] not in TOO_EARLY:
            assert expected & KINDS <= found, case["path"]
        seen += 1
    assert seen > 40
