"""Numbers are judged as they come: the right alarm at the right step, and none without reason."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.log.log_reader import open_sources
from nanguard.check.log.quantities import Quantity
from nanguard.check.scan import Scan
from nanguard.view.report.verdict import judge_log
from nanguard.view.terminal.tail import LineReader
from nanguard.view.terminal.watch_state import RunState
from tests.labelled import labelled

if TYPE_CHECKING:
    from nanguard.view.terminal.watch_state import Happening

LOGS = Path(__file__).parents[2] / "logs"


def told_about(values: list[float], name: str = "loss", chunk: int = 7, **beside: float):
    """Feeds a log in pieces, judges after each, and returns what was told anew."""
    lines = [
        json.dumps({"step": at, name: value, **beside}) + "\n" for at, value in enumerate(values)
    ]
    state, out = RunState("m.jsonl"), []
    reader = LineReader(Path("m.jsonl"), lines[0].encode())
    for at in range(0, len(lines), chunk):
        data = "".join(lines[at : at + chunk]).encode()
        out += state.take(reader.read(data), old=False) + state.judge(old=False)
    return out


def steady(count: int, level: float = 2.0) -> list[float]:
    rng = random.Random(3)
    return [level + rng.gauss(0, 0.05) for _ in range(count)]


def fed(text: str, name: str = "train.log") -> RunState:
    state = RunState(name)
    state.take(LineReader(Path(name), text.encode()[:4096]).read(text.encode()), old=False)
    state.judge(old=False)
    return state


def alarms(told: list[Happening]) -> list[tuple[str, int | None]]:
    return [(one.kind, one.step) for one in told if one.alarm]


def test_a_steady_loss_is_silent_in_pieces_of_any_size() -> None:
    for chunk in (250, 5000):
        assert told_about(steady(5000), chunk=chunk) == []


def test_bad_numbers_are_one_alarm_and_their_end_is_told() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        values = [*steady(100), *[bad] * 20, *steady(50)]
        first, last = told_about(values)
        assert (first.kind, first.step, first.alarm) == ("non-finite-loss", 100, True)
        assert (first.count, first.last) == (20, 119)
        assert (last.kind, last.step, last.alarm) == ("finite-again", 119, False)
        assert "after 20 values" in last.text


def test_a_loss_that_flickers_is_one_fault_and_a_later_one_another() -> None:
    values = [*steady(100), *[math.nan, 2.0] * 10, *steady(50), math.nan]
    assert alarms(told_about(values)) == [("non-finite-loss", 100), ("non-finite-loss", 170)]


def test_a_spike_in_thousands_of_numbers_at_once_is_found_and_a_later_one_is_another() -> None:
    values = steady(4000)
    values[1210] = values[3210] = values[3212] = 30.0
    told = told_about(values, chunk=2000)
    assert alarms(told) == [("loss-spike", 1210), ("loss-spike", 3210)]
    assert [one.count for one in told] == [1, 2]


def test_a_norm_that_overflows_while_a_scale_looks_for_its_level_is_no_alarm() -> None:
    head = "".join(f"step {n} loss 2.0 grad_norm 1.0 scale 2048\n" for n in range(30))
    then = "".join(f"step {n} loss 2.0 grad_norm 1.0 scale 1024\n" for n in range(31, 60))
    left_to_scaler = fed(f"{head}step 30 loss 2.0 grad_norm inf scale 1024\n{then}")
    assert not left_to_scaler.alarms
    assert alarms(told_about([*steady(100), math.inf, *steady(50)], "grad_norm", loss=2.0)) == [
        ("non-finite-grad-norm", 100)
    ]


def test_a_loss_that_climbs_back_is_told_once() -> None:
    falling = [8.0 * math.exp(-n / 300) + 1.0 for n in range(1500)]
    rising = [1.0 + n / 200 for n in range(1500)]
    told = told_about([*falling, *rising], chunk=100)
    assert [one.kind for one in told if one.alarm] == ["diverging-loss"]


def test_a_falling_loss_scale_is_told_once() -> None:
    scales = [65536.0] * 100 + [65536.0 / 2**n for n in range(12)]
    told = told_about(scales, "scale", loss=2.0)
    assert [one.kind for one in told if one.alarm] == ["falling-loss-scale"]


def test_words_of_a_log_are_an_alarm_and_a_flood_of_them_is_one() -> None:
    text = "step 5 loss 2.0\n" + "WARNING: NaN loss detected at step 6, skipping\n" * 50
    (one,) = fed(text).happenings
    assert (one.kind, one.alarm, one.count) == ("log-says", True, 50)
    assert one.text == "the log says: WARNING: NaN loss detected at step 6, skipping"


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


def test_the_step_is_that_of_the_last_line() -> None:
    text = "".join(f"step {n} loss 2.0 grad_norm 1.0 scale 1024\n" for n in range(30))
    assert fed(text + "step 30 loss 2.0 grad_norm 1.0\n").step == 30


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


def test_two_runs_in_one_file_are_a_restart_and_epochs_are_none() -> None:
    run_twice = "".join(f"step {n} loss {3 - n / 100}\n" for n in range(100)) * 2
    state = fed(run_twice)
    assert [(one.kind, one.step) for one in state.happenings] == [("restart", 0)]
    epochs = "".join(
        f"epoch {e} step {n}/50 loss {9 - e - n / 50}\n" for e in range(4) for n in range(50)
    )
    state = fed(epochs)
    assert list(state.happenings) == []
    assert not state.reached_total()


def test_lines_of_a_file_that_was_written_anew_are_not_taken_for_those_before() -> None:
    text = "".join(f"step {n} loss 2.0 grad_norm 1.0\n" for n in range(50))
    state = RunState("a.log")
    for first in (0, 50):
        lines = "".join(f"step {n} loss 2.0 grad_norm 1.0\n" for n in range(first, first + 50))
        state.take(LineReader(Path("a.log"), b"").read(lines.encode()), old=False)
    loss = state.logs["a.log"].series[0]
    assert (len(loss), len(loss.steps), len(loss.lines)) == (100, 100, 50)
    assert fed(text).logs["train.log"].series[0][3].line == 4


def kinds_in(state: RunState) -> set[str]:
    """Returns the rules that find something in what was read of a run."""
    return {one.name for log in state.logs.values() for one in judge_log(log).findings}


def test_a_log_read_in_pieces_is_judged_as_one_that_is_read_whole() -> None:
    """What a watch tells when all of a log has gone by is what a check of the file finds."""
    seen = 0
    for case in labelled(LOGS):
        path = LOGS / case["path"]
        whole = RunState("whole")
        for log in open_sources([path], Scan()):
            whole.take_whole(log, old=False)
        expected = {one["rule"] for one in case["expected"]}
        allowed = expected | {
            one["rule"] if isinstance(one, dict) else one for one in case["tolerated"]
        }
        found = kinds_in(whole)
        assert expected <= found <= allowed, case["path"]
        if path.is_dir() or path.suffix == ".json":
            continue
        lines = path.read_bytes().splitlines(keepends=True)
        state, reader = RunState("pieces"), LineReader(path, path.read_bytes()[:65536])
        for at in range(0, len(lines), 64):
            state.take(reader.read(b"".join(lines[at : at + 64])), old=False)
        assert kinds_in(state) == found, case["path"]
        seen += 1
    assert seen > 40
