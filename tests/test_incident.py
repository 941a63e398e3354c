"""An incident: the file other tools read, from and to JSON, also where the file is broken."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanguard import incident as incidents
from nanguard.errors import IncidentError
from nanguard.incident import Incident
from nanguard.view.report.incident_page import incident_page

STORED = Path(__file__).parent / "incidents"
DOCS = Path(__file__).parents[1] / "docs" / "incidents.md"
# What differs between two runs of the same script, and between machines.
_VOLATILE = re.compile(
    r'"(?:command|seconds|step_seconds|python|torch|nanguard|platform|signature|folder|file)": '
    r"(?:\[[^\]]*\]|[^\n]*)"
)
# Another processor adds up in another order, so that last digits differ.
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
STRANGE: list[Any] = [None, True, -1, 2**70, 1.5, "x", [], [1, "a", None], {}, {"a": [1]}]


def names_of_fields() -> set[str]:
    """Returns the fields that are part of the file."""
    return {one.name for one in dataclasses.fields(Incident)} - {"unknown", "folder"}


def steady(text: str) -> tuple[str, list[float]]:
    """Returns the text of an incident without what differs from run to run, and its numbers."""
    text = _VOLATILE.sub("", text)
    return _NUMBER.sub("#", text), [float(number) for number in _NUMBER.findall(text)]


@pytest.mark.parametrize("path", sorted(STORED.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_that_is_read_and_written_is_the_same_file(path: Path, tmp_path: Path) -> None:
    found = incidents.read(path)
    assert found.unknown == {}
    incidents.write(tmp_path / "again", found)
    assert (tmp_path / "again" / incidents.NAME).read_bytes() == path.read_bytes()
    incidents.write(tmp_path / "copy", found.copy())
    assert (tmp_path / "copy" / incidents.NAME).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("guarded", []),
        ("skipping", ["-m", "nanguard", "run", "--incidents", "incidents", "--", sys.executable]),
    ],
)
def test_a_script_leaves_the_file_that_it_always_left(
    script: str, command: list[str], tmp_path: Path
) -> None:
    """Every byte, but for seconds, versions, paths and the last digits of numbers."""
    path = tmp_path / f"{script}.py"
    path.write_bytes((STORED / path.name).read_bytes())
    words = [sys.executable, *command, path.name]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    (new,) = (tmp_path / "incidents").glob(f"*/{incidents.NAME}")
    text, numbers = steady(new.read_text())
    stored_text, stored_numbers = steady((STORED / f"{script}.json").read_text())
    assert text == stored_text
    assert numbers == pytest.approx(stored_numbers, rel=1e-3)


def test_every_field_is_documented_and_has_a_type() -> None:
    text = DOCS.read_text(encoding="utf-8")
    table = text.split("## incident.json")[1].split("**symptom**")[0]
    documented = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) - {"schema"}
    assert documented == names_of_fields()
    assert set(incidents._TYPES) == names_of_fields()
    stored = [json.loads(path.read_text()) for path in STORED.glob("*.json")]
    assert {key for one in stored for key in one} - {"schema"} <= names_of_fields()


def test_only_what_was_set_is_written_in_the_order_in_which_it_was_set() -> None:
    found = Incident()
    assert found.to_json() == {"schema": incidents.SCHEMA}
    found.rank, found.step = 1, 0
    found.origin = None
    assert list(found.to_json()) == ["schema", "rank", "step", "origin"]
    found.rank = 2
    assert list(found.to_json().items())[1] == ("rank", 2)
    assert found.get("cause") is None
    assert found.cause is None
    assert "cause" not in found


def test_fields_of_a_later_version_are_kept(tmp_path: Path) -> None:
    later = {**json.loads((STORED / "contract.json").read_text()), "mood": {"a": [1, None]}}
    path = tmp_path / incidents.NAME
    path.write_text(json.dumps(later))
    found = incidents.read(path)
    found.times = 2
    incidents.write(tmp_path, found)
    assert json.loads(path.read_text()) == {**later, "times": 2}
    assert found.folder == tmp_path


@pytest.mark.parametrize("key", sorted(names_of_fields()))
def test_a_field_of_another_type_is_an_error_or_kept_and_never_a_traceback(key: str) -> None:
    told = json.loads((STORED / "guarded.json").read_text())
    for strange in STRANGE:
        right = strange is None or isinstance(strange, incidents._TYPES[key])
        if key in incidents._NEEDED and not right:
            with pytest.raises(IncidentError) as caught:
                Incident.from_json({**told, key: strange}, "here")
            kind = type(strange).__name__
            assert caught.value.what.startswith(f"the field '{key}' holds {kind}, not ")
            continue
        found = Incident.from_json({**told, key: strange}, "here")
        assert found[key] == strange
        value = getattr(found, key)
        assert value is None or isinstance(value, incidents._TYPES[key])
        incident_page(found)
        found.without_secrets()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not complete JSON"),
        (b'{"schema": "nanguard.incident/1", "st', "not complete JSON"),
        (b"\0" * 512, "not complete JSON"),
        (b'{"schema": "nanguard.incident/1", "sentence": "\xed\xa0\x80"}', "not complete JSON"),
        (b"[" * 100_000, "not complete JSON"),
        (b"[]", "not an incident: its schema is 'None'"),
        (b'{"schema": 7}', "not an incident: its schema is '7'"),
        (b'{"schema": "nanguard.incident/2"}', "this version reads 'nanguard.incident/1'"),
    ],
)
def test_a_broken_file_is_a_clear_error(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / incidents.NAME
    path.write_bytes(content)
    with pytest.raises(IncidentError) as caught:
        incidents.read(tmp_path)
    assert said in caught.value.what
    assert caught.value.do
    assert caught.value.where == str(path)


def test_a_lone_surrogate_can_be_read_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / incidents.NAME
    path.write_text('{"schema": "nanguard.incident/1", "sentence": "a\\ud800b", "step": 1}')
    found = incidents.read(path)
    incident_page(found)
    incidents.write(tmp_path / "again", found)
    assert incidents.read(tmp_path / "again").step == 1
