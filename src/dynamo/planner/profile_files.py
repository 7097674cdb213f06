"""The files of a profile, in the original's format; the only module of the planner that imports numpy and yaml.

A directory holds `selected_prefill_interpolation/raw_data.npz` with the arrays `prefill_isl`, `prefill_ttft` (ms) and
`prefill_thpt_per_gpu`, and `selected_decode_interpolation/raw_data.npz` with `x_kv_usage`, `y_context_length`, `z_itl`
(ms), `z_thpt_per_gpu` and `max_kv_tokens`.
"""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dynamo.base import distribution, errors
from dynamo.planner.profile import DecodePoint, DecodeSurface, PrefillCurve, WorkerProfile

PREFILL_FILE = Path("selected_prefill_interpolation", "raw_data.npz")
DECODE_FILE = Path("selected_decode_interpolation", "raw_data.npz")
_DAMAGES = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error),
    *(KeyError, ValueError, TypeError, AttributeError),  # the last two: of a file of one array
)
_PREFILL = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
_DECODE = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")


def read_profile(directory: Path) -> WorkerProfile:
    """Read both files of a directory. Raises ConfigError, which names the file."""
    prefill = _read_arrays(directory / PREFILL_FILE, _PREFILL)
    decode = _read_arrays(directory / DECODE_FILE, (*_DECODE, "max_kv_tokens"))
    try:
        rows = sorted(zip(*(prefill[name] for name in _PREFILL), strict=True))
        curve = PrefillCurve(
            isl=tuple(isl for isl, _, _ in rows),
            ttft_s=tuple(ttft / 1e3 for _, ttft, _ in rows),
            throughput=tuple(throughput for _, _, throughput in rows),
        )
        points = [
            DecodePoint(usage, context, itl / 1e3, throughput)
            for usage, context, itl, throughput in zip(*(decode[n] for n in _DECODE), strict=True)
        ]
        surface = DecodeSurface(points, max_kv_tokens=int(decode["max_kv_tokens"][0]))
    except (ValueError, IndexError, OverflowError) as error:
        raise errors.ConfigError(
            f"{directory}: expected arrays of one length in each file: {error}"
        ) from error
    except errors.ConfigError as error:
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
            "max_kv_tokens": numpy.array([surface.max_kv_tokens]),
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


def _read_arrays(path: Path, names: tuple[str, ...]) -> Mapping[str, list[float]]:
    try:
        with path.open("rb") as file, _load_numpy().load(file) as arrays:
            return {name: [float(x) for x in arrays[name].ravel()] for name in names}
    except _DAMAGES as error:
        raise errors.ConfigError(
            f"{path}: expected an npz file with the arrays {', '.join(names)}: {error}"
        ) from error


def _load_numpy() -> ModuleType:
    return distribution.load_extra("numpy", feature="a profile", extra="planner")
