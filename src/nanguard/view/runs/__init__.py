"""One model of a run, whoever wrote it: read here, judged and shown elsewhere.

Finding and reading (nothing is executed, torch is not needed)::

    find_runs(paths) -> list[FoundRun]       # which files make which run; reads beginnings
    find_below(folder) -> Iterator[FoundRun] # every run below a folder, for overviews
    open_run(found, scan=None) -> Run        # reads one; what cannot be read is in run.problems
    open_runs(paths, scan=None) -> list[Run]

``find_runs`` raises ``SourceError`` for a path that does not exist or holds no run. ``FoundRun``
names the files (``logs``, ``events``, ``history``, ``lineage``, ``incidents``, ``reports``,
``configs``);
``FoundRun.files()`` lists all of them, to see whether any has changed.

A ``Run`` has ``name``, ``path``, ``axis`` (step, epoch or entry), ``curves``, ``events``,
``incidents`` (the JSON, with ``folder``), ``findings`` (the JSON of ``nanguard check``), ``logs``
(``check.log.series.Log``, what rules read), ``clock``, ``configuration``, ``environment`` and
``problems``. ``run.of(Panel.LOSS)`` returns the curves of a panel, ``run.main()`` the one that
tells most. Strings come from files of strangers: escape them when they are shown.

A ``Curve`` has ``name``, ``panel``, ``xs`` and ``values``: sequences of the same length, in the
order in which they were written, non-finite numbers included. They are shared with the log.

An ``RunEvent`` has ``kind``, ``step``, ``last``, ``count``, ``text``, ``severity``, ``reason``,
``time`` and ``incident`` (an index into ``run.incidents``).

Fewer points that tell the same::

    thin(values, most=2000, restarts=restarts_of(xs) or (), focus=()) -> Thinned

keeps every extreme and every non-finite point: buckets with ``starts``, ``counts``, ``lows`` and
``highs``, ``gaps`` where the curve is not finite, ``breaks`` where it must not be joined.

Above this: ``nanguard.view.report.verdict`` adds the findings of the rules for logs
(``judge(run)``) and says in words what happened (``verdict_of(run)``), and
``nanguard.view.report.html`` makes the page.
"""

from nanguard.view.runs.curves import Gap, Thinned, gaps_of, restarts_of, thin
from nanguard.view.runs.run_finder import FoundRun, find_below, find_runs
from nanguard.view.runs.run_model import Axis, Clock, Curve, EventKind, Panel, Run, RunEvent
from nanguard.view.runs.run_reader import curves_of, open_run, open_runs

__all__ = [
    "Axis",
    "Clock",
    "Curve",
    "EventKind",
    "FoundRun",
    "Gap",
    "Panel",
    "Run",
    "RunEvent",
    "Thinned",
    "curves_of",
    "find_below",
    "find_runs",
    "gaps_of",
    "open_run",
    "open_runs",
    "restarts_of",
    "thin",
]
