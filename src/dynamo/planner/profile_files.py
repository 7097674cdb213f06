"""The files of a profile, in the original's format; the only module of the planner that imports numpy and yaml.

A directory holds `selected_prefill_interpolation/raw_data.npz` with the arrays `prefill_isl`, `prefill_ttft` (ms) and
`prefill_thpt_per_gpu`, and `selected_decode_interpolation/raw_data.npz` with `x_kv_usage`, `y_context_length`, `z_itl`
(ms), `z_thpt_per_gpu` and `max_kv_tokens`, and one that only this profiler writes: `repeated_cost`, what a token of the
KV cache that sequences share costs a decode step for each further one, as a share of a token of its own (0 if missing).
"""

import lzma
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from dynamo.base import distribution, errors
from dynamo.planner.profile import DecodePoint, DecodeSurface, PrefillCurve, WorkerProfile

PREFILL_FILE = Path("selected_prefill_interpolation", "raw_data.npz")
DECODE_FILE = Path("selected_decode_interpolation", "raw_data.npz")
_DAMAGES = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError),
    *(ValueError, TypeError, RuntimeError, MemoryError, SyntaxError, struct.error),
)
_MOST_BYTES = 2**20  # of an array
_LEAST, _MOST = 1e-6, 1e12  # of any milliseconds, tokens, or tokens per second
_PREFILL = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
_DECODE = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")
_SIZE = "max_kv_tokens"
_REPEATED = "repeated_cost"
_SHARES = (_DECODE[0], _REPEATED)
_EXPECTED = "expected an npz file with the arrays {}"


def read_profile(directory: Path) -> WorkerProfile:
    """Read both files of a directory. Raises ConfigError, which names the file and the array."""
    prefill = _read_arrays(directory / PREFILL_FILE, _PREFILL)
    decode = _read_arrays(directory / DECODE_FILE, (*_DECODE, _SIZE), (_REPEATED,))
    rows = sorted(zip(*(prefill[name] for name in _PREFILL), strict=True))
    for (isl, *_), (after, *_) in pairwise(rows):
        if isl == after:
            raise errors.ConfigError(
                f"{directory / PREFILL_FILE}: {_PREFILL[0]}: expected each length once, got {isl:g} twice"
            )
    try:
        curve = PrefillCurve(
            isl=tuple(isl for isl, _, _ in rows),
            ttft_s=tuple(ttft / 1e3 for _, ttft, _ in rows),
            throughput=tuple(throughput for _, _, throughput in rows),
        )
        points = [
            DecodePoint(usage, context, itl / 1e3, throughput)
            for usage, context, itl, throughput in zip(*(decode[n] for n in _DECODE), strict=True)
        ]
        surface = DecodeSurface(
            points,
            max_kv_tokens=int(decode[_SIZE][0]),
            repeated_cost=decode.get(_REPEATED, [0.0])[0],
        )
    except errors.ConfigError as error:  # such as a time that is too small for a number
        raise errors.ConfigError(f"{directory}: {error}") from error
    return WorkerProfile(prefill=curve, decode=surface)


def write_profile(profile: WorkerProfile, directory: Path) -> None:
    """Write both files of a directory, which is made if it is missing; one that was there stays if that fails."""
    numpy = _load_numpy()
    curve, surface = profile.prefill, profile.decode
    arrays_by_file = {
        PREFILL_FILE: {
            "prefill_isl": numpy.array(curve.isl),
            "prefill_ttft": numpy.array(curve.ttft_s) * 1e3,
            "prefill_thpt_per_gpu": numpy.array(curve.throughput),
        },
        DECODE_FILE: {
            "x_kv_usage": numpy.array([point.kv_usage for point in surface.points]),
            "y_context_length": numpy.array([point.context for point in surface.points]),
            "z_itl": numpy.array([point.itl_s * 1e3 for point in surface.points]),
            "z_thpt_per_gpu": numpy.array([point.throughput for point in surface.points]),
            _SIZE: numpy.array([surface.max_kv_tokens]),
            _REPEATED: numpy.array([surface.repeated_cost]),
        },
    }
    for file, arrays in arrays_by_file.items():
        path, partial = directory / file, directory / f"{file}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as written:
            numpy.savez(written, **arrays)
        partial.replace(path)


def write_deployment(graph: Mapping[str, Any], notes: str, path: Path) -> None:
    """Write a deployment in YAML below its notes, each line of which becomes a comment."""
    yaml = distribution.load_extra("yaml", feature="a deployment's file", extra="planner")
    comments = "".join(f"# {line}\n" for line in notes.splitlines())
    path.write_text(comments + yaml.safe_dump(graph, sort_keys=False), "utf-8")


def _read_arrays(
    path: Path, names: Sequence[str], optional: Sequence[str] = ()
) -> Mapping[str, list[float]]:
    """Return the arrays of an npz file, checked, with those of `optional` that it has. Raises ConfigError."""
    numpy = _load_numpy()  # its own reader would take a file of any size into memory
    arrays: dict[str, list[float]] = {}
    name = ""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            if missing := [each for each in names if f"{each}.npy" not in members]:
                raise ValueError(f"it lacks {', '.join(missing)}")
            for name in (*names, *(each for each in optional if f"{each}.npy" in members)):
                info = members[f"{name}.npy"]
                if info.file_size > _MOST_BYTES:
                    raise ValueError(f"{info.file_size:,} bytes, expected at most {_MOST_BYTES:,}")
                with archive.open(info) as member:
                    array = numpy.lib.format.read_array(member, allow_pickle=False)
                arrays[name] = [float(value) for value in array.ravel().tolist()]
    except _DAMAGES as error:
        text = str(getattr(error, "strerror", None) or error)
        reason = text.splitlines()[0] if text else type(error).__name__
        expected = "expected numbers" if name else _EXPECTED.format(", ".join(names))
        place = f"{path}: {name}" if name else path
        raise errors.ConfigError(f"{place}: {expected}: {reason}") from error
    for name, values in arrays.items():
        if reason := _find_fault(name, values, names[0], len(arrays[names[0]])):
            raise errors.ConfigError(f"{path}: {name}: expected {reason}")
    return arrays


def _find_fault(name: str, values: Sequence[float], first: str, number: int) -> str:
    """Return what is expected of an array and not so, and what it has; `number` is the size of the first array."""
    if not values:
        return "a value or more, got none"
    for value in values:
        if name == _SIZE and not 1 <= value <= _MOST:
            return f"from 1 to {_MOST:g} tokens, got {value:g}"
        if name in _SHARES and not 0 <= value <= 1:
            return f"shares from 0 to 1, got {value:g}"
        if name not in _SHARES and not _LEAST <= value <= _MOST:
            return f"numbers from {_LEAST:g} to {_MOST:g}, got {value:g}"
    if name not in (_SIZE, _REPEATED) and len(values) != number:
        return f"{number} values, as many as {first}, got {len(values)}"
    return ""


def _load_numpy() -> ModuleType:
    return distribution.load_extra("numpy", feature="a profile", extra="planner")
