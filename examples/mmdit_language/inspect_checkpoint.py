"""The team's own test of a checkpoint: python inspect_checkpoint.py CHECKPOINT

It loads the file as a pickle, which runs whatever code the file names. For a file that is not your
own use ``nanguard check FILE``, which loads nothing.
"""

from __future__ import annotations

import sys

import torch


def main(path):
    state = torch.load(path, map_location="cpu", weights_only=False)
    bad = [name for name, value in state["model"].items() if torch.isnan(value).any()]
    print(f"{path}: NaN in {len(bad)} of {len(state['model'])} tensors")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
