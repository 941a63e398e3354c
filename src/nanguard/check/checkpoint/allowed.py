"""What a pickle may ask for: the classes and functions that torch loads with ``weights_only``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.dtypes import DTYPES, STORAGES

if TYPE_CHECKING:
    from collections.abc import Iterable

_TENSORS = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
_REBUILD = [
    "parameter",
    "parameter_with_state",
    "qtensor",
    "tensor",
    "tensor_v2",
    "tensor_v3",
    "sparse_tensor",
    "meta_tensor_no_storage",
    "nested_tensor",
    "wrapper_subclass",
    "device_tensor_from_numpy",
    "device_tensor_from_cpu_tensor",
]
_SINGLE = [
    "collections.OrderedDict",
    "collections.Counter",
    "torch.nn.parameter.Parameter",
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.Tensor",
    "torch.device",
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.set",
    "builtins.complex",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
    "torch._tensor._rebuild_from_type_v2",
]
_SCHEMES = [
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
]
_PLACES = ("torch", "torch.cuda")
_DISTRIBUTED = (
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._api.DTensor",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor.placement_types.Partial",
    "torch.distributed.tensor.placement_types.Replicate",
    "torch.distributed.tensor.placement_types.Shard",
)
ALLOWED = frozenset(
    [
        *_SINGLE,
        *_DISTRIBUTED,
        *(f"torch.{scheme}" for scheme in _SCHEMES),
        *(f"torch._utils._rebuild_{name}" for name in _REBUILD),
        *(f"{place}.{name}Storage" for place in _PLACES for name in STORAGES),
        *(f"{p}{s}.{name}Tensor" for p in _PLACES for s in ("", ".sparse") for name in _TENSORS),
        *(f"torch.{name}" for name in DTYPES),
        *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    ]
)

# Plain data of numpy and of Python: the states of random generators are made of it.
_PLAIN = re.compile(
    r"numpy\.(?:_?core\.multiarray\.(?:_reconstruct|scalar)|_?core\.numeric\._frombuffer|ndarray"
    r"|dtype|dtypes\.\w+|random\.\w+\.\w+)|_codecs\.encode|builtins\.(?:bytes|tuple|list|dict)"
)

# Files of the settings of a run, which hold objects of the library that wrote them and which no
# resume reads, and of random generators.
_SETTINGS = re.compile(r"training_args\.bin|(?:rng_state|random_states?)\S*\.(?:pth?|pkl|bin)")
_LIBRARY = re.compile(
    r"(?:transformers\.(?:training_args\w*|trainer_\w+|integrations\.deepspeed|debug_utils)"
    r"|accelerate\.(?:state|utils\.(?:dataclasses|deepspeed))|trl\.trainer\.\w+_config"
    r"|torch\.distributed\.\w+|datetime|collections|enum)\.[A-Za-z]*[A-Z]\w*|datetime\.timedelta"
    r"|pathlib\.(?:Pure)?(?:Posix|Windows)?Path"
)
# How torch itself describes the parts of a distributed checkpoint.
_METADATA = re.compile(
    r"torch\.distributed\.(?:checkpoint|_shard)\.[\w.]+\._?[A-Z]\w*|pathlib\.(?:Pure)?\w*Path"
)

_RUNS_CODE = re.compile(
    r"(?:os|posix|nt|sys|subprocess|socket|shutil|pty|runpy|importlib|pip|commands|ctypes|code"
    r"|webbrowser|multiprocessing|asyncio|_posixsubprocess|requests|urllib|bdb|pdb|timeit|cProfile"
    r"|operator|functools|pickle|_pickle|dill|cloudpickle)(?:\..+)|builtins\.(?:eval|exec|compile"
    r"|open|__import__|getattr|setattr|delattr|globals|breakpoint|input|vars|map|apply)"
    r"|torch\.(?:load|hub\..+|_inductor\..+|jit\..+)|numpy\.testing\..+"
)


def beyond_weights_only(names: Iterable[str], file: str, *, script: bool = False) -> list[str]:
    """Returns what a pickle needs that torch would refuse with ``weights_only=True``.

    Args:
        names: What it asks for.
        file: The name of its file.
        script: Whether it is part of a compiled program.
    """
    found = []
    for name in names:
        if name in ALLOWED or (script and name.startswith(("__torch__", "torch.jit._pickle."))):
            continue
        if _SETTINGS.fullmatch(file) and (_PLAIN.fullmatch(name) or _LIBRARY.fullmatch(name)):
            continue
        if file == ".metadata" and _METADATA.fullmatch(name):
            continue
        found.append(name)
    return found


def runs_code(name: str) -> bool:
    """Returns whether a function does as it is told, so that a pickle can make it do anything."""
    return _RUNS_CODE.fullmatch(name) is not None


def plain_data(name: str) -> bool:
    """Returns whether a class only holds numbers."""
    return _PLAIN.fullmatch(name) is not None
