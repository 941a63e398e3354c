"""The five systems: each breaks as reported, is explained, repaired, and trains."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from examples.story import ENOUGH, HOME, NAMES, Story, fall

from tests.ranks import came_to_its_end

pytestmark = pytest.mark.slow

# One is explained and repaired with the other tests; all there is takes ten minutes on 2 cores.
_ALL = os.environ.get("NANGUARD_TESTS") == "exhaustive"
_SOME = NAMES if _ALL else NAMES[:1]
# Beside other tests, one run at a time.
_AT_ONCE = 2 if _ALL else 1


def causes_of(name):
    """Returns the names of a system's causes."""
    told = yaml.safe_load((HOME / name / "story.yaml").read_text(encoding="utf-8"))
    return [cause["name"] for cause in told["causes"]]


_CAUSES = [(name, cause) for name in NAMES for cause in causes_of(name)]


class Told:
    """What came of every run of a system at its tiny size."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.tiny = story.told.get("tiny") or {}
        self.fixed = story.repaired()
        jobs = {"main": self._main, "end": self._repaired}
        if _ALL:
            jobs |= {"plain": self._plain, "guarded": self._guarded}
        wanted = story.causes if _ALL else []
        causes = [(lambda cause=cause: self._cause(cause)) for cause in wanted]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            done = list(pool.map(lambda job: job(), [*jobs.values(), *causes]))
        vars(self).update(zip(jobs, done, strict=False))
        self.causes = dict(zip((cause.name for cause in wanted), done[len(jobs) :], strict=True))

    def _plain(self):
        return self.story.run(self.story.command("plain", self.tiny))

    def _main(self):
        self.story.guarded(self.story.command("main", self.tiny), "incidents")
        return self.story.incident("incidents")

    def _repaired(self):
        sets = {**self.tiny, **(self.story.told.get("repair_set") or {})}
        return self.story.run(self.story.command("repaired", sets, config=self.fixed))

    def _guarded(self):
        words = self.story.command("with-guard", self.tiny)
        return self.story.run(["guarded.py" if w.endswith("train.py") else w for w in words])

    def _cause(self, cause):
        sets, steps = {**self.tiny, **cause.set}, cause.steps or 0
        out, config = f"cause-{cause.name}", cause.config
        # Where the main run has several ranks, one is enough for most causes, and quicker.
        train = self.story.told.get("alone", ())
        ended = None
        wrong = []
        if cause.expect is not None:
            words = self.story.command(out, sets, config=config, steps=steps, train=train)
            self.story.guarded(words, f"incidents-{cause.name}")
            found = self.story.incident(f"incidents-{cause.name}")
            wrong += self.story.missing(cause.expect, found)
        elif any(one["path"].startswith("OUT/") for one in cause.check):
            self.story.run(self.story.command(out, sets, config=config, steps=steps, train=train))
        for one in cause.check:
            path = one["path"].replace("OUT/", f"{out}/")
            named = {finding["name"] for finding in self.story.findings(path)}
            wrong += [] if one["rule"] in named else [f"{path}: {one['rule']} not in {named}"]
        if cause.repair is not None:
            words = self.story.command(
                f"{out}-repaired",
                {**sets, **cause.repair},
                config=config,
                steps=steps,
                train=train,
            )
            ended = self.story.run(words)
        return wrong, ended, self.story.curve(f"{out}-repaired")[1]


@pytest.fixture(scope="session")
def told(tmp_path_factory):
    """Returns the story of a system, told once."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = Told(Story.of(name, tmp_path_factory.mktemp(name)))
        return known[name]

    return of


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_breaks_as_reported_after_a_healthy_start(name, told):
    losses = told(name).story.curve("plain")[1]
    bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    assert bad, told(name).plain.output[-2000:]
    healthy = losses[: bad[0]]
    assert len(healthy) >= told(name).story.told["main"].get("healthy", 10)


@pytest.mark.parametrize("name", _SOME)
def test_first_incident_names_cause_line_and_step(name, told):
    story = told(name).story
    assert story.missing(story.told["main"]["expect"], told(name).main) == []


@pytest.mark.parametrize("name", _SOME)
def test_repaired_run_trains_to_its_end(name, told):
    end = told(name).end
    assert came_to_its_end(end.code, end.output), end.output[-2000:]
    assert fall(told(name).story.curve("repaired")[1]) <= ENOUGH


@pytest.mark.parametrize("name", _SOME)
def test_stable_configuration_is_what_nanguard_writes(name, told):
    story = told(name).story
    written = (story.folder / story.told["fixed"]).read_text(encoding="utf-8")
    assert written == (HOME / name / story.told["fixed"]).read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_variant_with_the_guard_trains_through(name, told):
    guarded = told(name).guarded
    assert came_to_its_end(guarded.code, guarded.output), guarded.output[-2000:]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "cause"), _CAUSES)
def test_every_cause_of_the_report(name, cause, told):
    wrong, repaired, losses = told(name).causes[cause]
    assert wrong == []
    if repaired is not None:
        assert repaired.code == 0, repaired.output[-2000:]
        assert all(map(math.isfinite, losses))
