"""The page of a rule, from its docstring and its examples: for the terminal and for the docs."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.rule import KINDS, Fails, Passes, all_rules, rules_for
from nanguard.check.selection import UnusedIgnore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from nanguard.cli.commands.before import RulesOptions

_LANGUAGES = {
    "yaml": "yaml", "yml": "yaml", "json": "json", "jsonl": "json", "toml": "toml", "py": "python",
}  # fmt: skip
_DEFAULTS = {"code": "python", "config": "yaml"}
_READS = {
    "code": "Python code and notebooks",
    "config": "configurations",
    "data": "data",
    "checkpoint": "checkpoints",
    "log": "logs",
}
_COMMENTS = ("code", "config")
_IN_PLACE = (
    "To allow it in one place, with a reason:\n\n```text\n# nanguard: ignore[{name}] reason\n```"
)
_IN_SETTINGS = (
    "To allow it for files you name, in the settings:\n\n"
    '```toml\n[tool.nanguard.per-file-ignores]\n"path/**" = ["{name}"]\n```'
)


def pages() -> dict[str, Any]:
    """Returns everything that has a page, by name: the rules, and what the engine says itself."""
    found = {rule.name: rule for rule in all_rules()}
    return {**found, UnusedIgnore.name: UnusedIgnore}


def sentences(codes: Collection[str]) -> dict[str, str]:
    """Returns what rules stand for, in a sentence, by their codes.

    Args:
        codes: Codes that must be among them; rules of other kinds are not even loaded.
    """
    found = {UnusedIgnore.code: sentence(UnusedIgnore)}
    for reads in KINDS:
        if found.keys() >= set(codes):
            break
        found |= {rule.code: sentence(rule) for rule in rules_for(reads)}
    return found


def sentence(rule: Any) -> str:
    """Returns the first sentence of a rule's page."""
    return inspect.cleandoc(rule.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def listed(words: tuple[str, ...] = ()) -> str:
    """Returns one line for each rule that words name: code, name, severity, what it is.

    Raises:
        SettingsError: A word names no rule.
    """
    from nanguard.check.selection import Selection, stands_for

    Selection(words).checked_words()
    lines = []
    for rule in pages().values():
        group = getattr(rule, "group", "")
        if words and not any(stands_for(w, rule.code, rule.name) or w == group for w in words):
            continue
        about = sentence(rule) + (f" (only with --extend-select {group})" if group else "")
        lines.append(f"{rule.code}  {rule.severity.value:<7}  {rule.name:<31}  {about}\n")
    return "".join(sorted(lines))


def print_rules(options: RulesOptions) -> None:
    """Prints one line for each rule that was named, or for all."""
    sys.stdout.write(listed(options.words))


def find(word: str) -> Any | None:
    """Returns the rule with a name or a code; None if there is none."""
    known = pages()
    by_code = {rule.code: rule for rule in known.values()}
    return known.get(word) or by_code.get(word.upper())


def markdown(rule: Any) -> str:
    """Returns the page of a rule."""
    parts = [
        f"# {rule.name}",
        f"`{rule.code}` · {rule.severity.value} · reads {_READS[rule.reads]}",
        _marked(inspect.cleandoc(rule.__doc__ or "")),
        *_examples(rule),
        f"Seen in: <{rule.seen_in}>" if rule.seen_in else "",
        (_IN_PLACE if rule.reads in _COMMENTS else _IN_SETTINGS).format(name=rule.name),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def index() -> str:
    """Returns the table of all rules."""
    lines = [
        "# Rules",
        "",
        "Made from the rules themselves with `make docs-rules`. "
        "`nanguard explain NAME` shows the same pages in the terminal.",
        "",
        "| code | rule | severity | what it finds |",
        "| --- | --- | --- | --- |",
    ]
    rules = sorted(pages().values(), key=lambda rule: rule.code)
    for rule in rules:
        about = sentence(rule).replace("|", "\\|")
        lines.append(
            f"| {rule.code} | [{rule.name}]({rule.name}.md) | {rule.severity.value} | {about} |"
        )
    return "\n".join(lines) + "\n"


def _marked(doc: str) -> str:
    """Returns a docstring with its paragraph on why as a heading, and code in Markdown's way."""
    doc = re.sub(r"``([^`]+)``", r"`\1`", doc)
    return re.sub(
        r"^\*?\*?Why it breaks a run\*?\*?[.:]?\s+", "## Why it breaks a run\n\n", doc, flags=re.M
    )


def _examples(rule: Any) -> Iterator[str]:
    fails = [example for example in rule.examples if isinstance(example, Fails)]
    passes = [example for example in rule.examples if isinstance(example, Passes)]
    for title, examples in (("Found", fails[:2]), ("Correct", passes[:2])):
        if examples:
            yield f"## {title}"
        for example in examples:
            for name, text in example.beside.items():
                yield f"`{name}`:"
                yield _block(text, name, rule.reads)
            if example.made is not None:
                yield example.text.strip()
                continue
            if example.beside:
                yield f"`{example.file}`:" if example.file else "The file:"
            yield _block(example.text, example.file, rule.reads)
            if isinstance(example, Fails) and example.fixed:
                yield "Repaired:"
                yield _block(example.fixed, example.file, rule.reads)


def _block(text: str, file: str, reads: str) -> str:
    ending = file.rpartition(".")[2] if file else ""
    language = _LANGUAGES.get(ending) or _DEFAULTS.get(reads, "text")
    fence = "`" * max(3, max((len(run) + 1 for run in re.findall("`+", text)), default=3))
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def write_pages(folder: Path) -> None:
    """Writes the page of every rule and the index, and removes pages of rules that are gone."""
    wanted = {f"{name}.md": markdown(rule) for name, rule in pages().items()}
    wanted["index.md"] = index()
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.md"):
        if file.name not in wanted:
            file.unlink()
    for name, page in wanted.items():
        (folder / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
