"""Tensors that come out of files: which file it was, and whether they are state or data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.replay.tracer.op_kinds import KEEPING
from nanguard.replay.tracer.sites import is_ours, users_frame

if TYPE_CHECKING:
    from types import FrameType

    from nanguard.replay.tracer.op_records import Record
    from nanguard.replay.tracer.trace import Trace

# The functions that read files of tensors, with what they call the file.
_READERS = {"serialization.py": ("load", "f"), "torch.py": ("load_file", "filename")}
_PACKAGES = ("torch", "safetensors")
# What hands values on, from a file to where they are kept.
_HANDING_ON = (*KEEPING, "aten.copy_", "aten._foreach_copy_", "aten.detach", "aten.lift_fresh")


def file_being_loaded(frame: FrameType | None) -> str | None:
    """Returns the file that tensors are being read from, as the script named it; None if none is.

    Args:
        frame: Where an operation is called.
    """
    above, file = users_frame(frame), None
    while frame is not None and frame is not above:
        path = Path(frame.f_code.co_filename)
        known = _READERS.get(path.name)
        if known and frame.f_code.co_name == known[0] and path.parent.name in _PACKAGES:
            file = frame.f_locals.get(known[1])
        elif file is not None and is_ours(frame.f_code.co_filename):
            # A second run reads what it has written itself from somewhere else.
            file = next(iter(frame.f_locals.get("args", ())), file)
        frame = frame.f_back
    if file is None:
        return None
    return os.fspath(file) if isinstance(file, (str, os.PathLike)) else str(file)


def state_name(record: Record, trace: Trace) -> str | None:
    """Returns what a loaded tensor went into; "" for an optimizer, None for data.

    Args:
        record: The tensor.
        trace: The step.
    """
    reached = {id(record)}
    for other in sorted(trace.bad, key=lambda bad: bad.index):
        if not any(id(writer) in reached for writer in other.bad_writers):
            continue
        name = trace.written_parameter(other) or trace.written_buffer(other)
        if name is not None:
            return name
        if other.phase == "optimizer":
            return ""
        if other.op in _HANDING_ON:
            reached.add(id(other))
    return trace.parameter_name(record)  # load_state_dict(assign=True) takes it as it is
