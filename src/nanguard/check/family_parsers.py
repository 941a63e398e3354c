"""What the programs that read a configuration make of it: their own parsers, where installed.

A repaired copy is handed to the parser of its family in a process of its own: a library may take
seconds to import, look for devices, or end the process. Its answer is compared with what it makes
of the original.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    Values = dict[str, str]

_PARSER_SECONDS = 30  # transformers alone takes ten of them to import on a cold disk
# The module that has to be importable for a family's parser.
LIBRARIES = {
    "huggingface": "transformers",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "lightning": "jsonargparse",
    "hydra": "omegaconf",
}


def installed(family: str) -> bool:
    """Returns whether the parser of a family of configurations can be asked."""
    library = LIBRARIES.get(family)
    return library is not None and importlib.util.find_spec(library) is not None


def parsed_by(family: str, *paths: str) -> list[Values | str]:
    """Returns what the parser of a family makes of files, by dotted key.

    Args:
        family: The family, one of `LIBRARIES`.
        paths: The files.

    Returns:
        For each file the values, or the reason why the parser refuses it.

    Raises:
        SourceError: The parser cannot be asked, or does not answer in time.
    """
    command = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    command += [
        "-m",
        "nanguard.check.family_parsers",
        family,
        *(str(Path(p).absolute()) for p in paths),
    ]
    try:
        done = subprocess.run(  # noqa: S603 - our own module, and paths as arguments
            command, capture_output=True, timeout=_PARSER_SECONDS, check=False, text=True
        )
        answers: list[Values | str] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired as error:
        raise _silent(family, f"did not answer within {_PARSER_SECONDS} s") from error
    except (OSError, ValueError) as error:
        raise _silent(family, f"could not be asked: {type(error).__name__}") from error
    return answers


def _silent(family: str, why: str) -> SourceError:
    return SourceError(
        f"{LIBRARIES[family]} {why}", where=family, do="Load the copy as your program does."
    )


def _transformers(path: str) -> Any:
    from transformers import HfArgumentParser, TrainingArguments

    kinds: Any = TrainingArguments
    parser = HfArgumentParser(kinds)
    read = parser.parse_json_file if path.endswith(".json") else parser.parse_yaml_file
    (arguments,) = read(path, allow_extra_keys=True)
    # What was made of the file, and nothing that depends on the machine or the clock.
    told = arguments.to_dict()
    return {k: v for k, v in told.items() if not k.startswith("_") and k not in _BY_MACHINE}


def _accelerate(path: str) -> Any:
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(path).to_dict()


def _deepspeed(path: str) -> Any:
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    with Path(path).open(encoding="utf-8") as file:
        return json.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys)


def _lightning(path: str) -> Any:
    from jsonargparse import set_parsing_settings  # noqa: F401 - there since it has this loader
    from jsonargparse._loaders_dumpers import yaml_load

    return yaml_load(Path(path).read_text(encoding="utf-8"))


def _omegaconf(path: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path), resolve=False)


_BY_MACHINE = frozenset({"logging_dir", "run_name", "local_rank", "ddp_backend", "hub_token"})
_PARSERS: dict[str, Callable[[str], Any]] = {
    "huggingface": _transformers,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "lightning": _lightning,
    "hydra": _omegaconf,
}


def _flat(value: Any, path: tuple[str, ...] = ()) -> Values:
    if isinstance(value, dict):
        found: Values = {}
        for key, inner in value.items():
            found.update(_flat(inner, (*path, str(key))))
        return found
    return {".".join(path): repr(value)}


def _answer(family: str, path: str) -> Values | str:
    try:
        return _flat(_PARSERS[family](path))
    except BaseException as error:  # noqa: BLE001 - a parser of somebody else's may even exit
        words = str(error).split("\n")[0]
        return f"{type(error).__name__}: {words}"


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps([_answer(sys.argv[1], path) for path in sys.argv[2:]]))
