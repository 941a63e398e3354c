"""What the ranks of a run have agreed on before a branch."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from nanguard.check.code.training import Training, named

if TYPE_CHECKING:
    from nanguard.check.code.checks import Test
    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_AGREES = re.compile(
    r"(^|_)(all_?reduce|allgather|all_?gather\w*|gather|broadcast\w*|reduce|agree\w*|sync\w*|vote"
    r"|consensus|any_rank|all_ranks|across_\w+|reduced?_\w+|world_\w+|global_\w+|gather_for_metrics)($|_)"
)


def is_agreed(code: Code, training: Training, test: Test) -> bool:
    """Returns whether the ranks have talked about what a condition looks at."""
    condition = test.node.test  # type: ignore[union-attr]
    names = {node.id for node in ast.walk(condition) if isinstance(node, ast.Name)}
    values = [value for node in ast.walk(condition) if (value := code.values.get(node))]
    values += [check.subject for check in test.checks]
    for value in values:
        for made in value.upstream(24):
            if training.does(made, _agrees):
                return True
            if made.op in ("named", "") and made.name:
                names.add(made.name)
    for event in test.function.events:
        if event.line <= test.node.lineno and training.does(event, _agrees):
            node = event.node if isinstance(event.node, ast.Call) else None
            given = {
                n.id
                for a in (node.args if node else ())
                for n in ast.walk(a)
                if isinstance(n, ast.Name)
            }
            if given & names:
                return True
    return False


def _agrees(event: Value) -> bool:
    name = named(event)
    if event.path.startswith(("einops.", "functools.")) or not _AGREES.search(name):
        return False
    # The gather and scatter of a tensor take a dimension, those of ranks do not.
    return not (name == "gather" and len(event.inputs) > 2 and not event.path)
