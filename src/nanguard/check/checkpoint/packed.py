"""Files of an archive that are compressed, which torch itself never does."""

from __future__ import annotations

import zlib

from nanguard.check.checkpoint.blob import Blob, MemoryBlob, read
from nanguard.check.checkpoint.inert import DamagedError, TooLargeError
from nanguard.check.checkpoint.zipindex import Entry, data_offset

MAX_UNPACKED = 1 << 24
_DEFLATED = 8


def unpacked(blob: Blob, entry: Entry) -> Blob:
    """Returns the bytes of a compressed file.

    Raises:
        TooLargeError: It is long, or compressed in an unusual way.
        DamagedError: It cannot be unpacked.
    """
    if entry.method != _DEFLATED or max(entry.size, entry.packed) > MAX_UNPACKED:
        raise TooLargeError(
            f"a file of {entry.size:,} bytes in the archive is compressed, which torch never does"
        )
    data = read(blob, data_offset(blob, entry), entry.packed)
    try:
        found = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, entry.size + 1)
    except zlib.error as error:
        raise DamagedError("a compressed file of the archive is damaged") from error
    if len(found) != entry.size:
        raise DamagedError(f"a file of the archive has {len(found):,} bytes of {entry.size:,}")
    return MemoryBlob(blob.path, found)
