"""Snapshots: everything resume needs, in one directory beside verl's own checkpoint.

A snapshot is ``prompts-*.parquet`` (the table, in parts that are written and read in parallel), ``state-*.json`` (policy
and engine state) and ``manifest.json``, which names the others with their hashes and is written last. File names carry a
hash of their content, so a snapshot that is written over an older one in the same directory never touches a file the older
manifest names: at any moment the manifest there describes whole files.

Others may add a folder of their own files before (:func:`new_folder`, ``attach=``): they get into the manifest with their
hashes, and onto the disk, like ours. We never look into them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats.atomic import TEMPORARY, read_file, sync_directory, write_file
from verl_adaptive.stats.state import decode_state, encode_state
from verl_adaptive.stats.table import StatsTable

SNAPSHOT_SCHEMA = 2
"""Version of the layout; a reader refuses any other."""

#: The statistics' folder: the snapshot inside verl's `global_step_N`, the journal beside the checkpoints.
FOLDER = "adaptive"
MANIFEST = "manifest.json"
#: Beside the checkpoints, verl's: the step that it would resume from.
MARKER = "latest_checkpointed_iteration.txt"
_OURS = re.compile(r"(prompts-\d{5}|state)-[0-9a-f]{16}\.(parquet|json)|manifest\.json")
# Attached folders, and what TransferQueue leaves beside one when it is interrupted.
_ATTACHED = re.compile(r"[a-z_]+-[0-9a-f]{16}(\.tmp|\.old)?")
_PART_ROWS = 1 << 20
_LARGEST_MANIFEST = 1 << 24  # bytes; one of a billion prompts has 200 KB


class SnapshotError(AdaptiveError):
    """A snapshot that must not be used: torn, damaged, or of another layout, policy or data set."""


class SnapshotMissing(SnapshotError):
    """There is no snapshot there at all, as in a checkpoint of a plain run."""


def package_version() -> str:
    """As ``verl_adaptive.__version__``, which is not imported here: its module names the roles, a floor above this one."""
    try:
        return metadata.version("verl-adaptive")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


# -- manifest -------------------------------------------------------------------------------------------------------


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _render(manifest: Mapping[str, Any]) -> bytes:
    """One manifest has one spelling: a flipped byte changes a value, breaks the JSON, or misses this spelling."""
    return (json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def _seal(manifest: dict[str, Any]) -> bytes:
    body = {key: value for key, value in manifest.items() if key != "digest"}
    return _render({**body, "digest": _digest(_render(body))})


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a snapshot, its own integrity checked (not that of the files it names).

    Raises:
        SnapshotMissing: no snapshot in ``directory``.
        SnapshotError: torn or damaged.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    try:
        raw = read_file(path, _LARGEST_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_dir() and any(os.scandir(directory)):
            raise SnapshotError(
                f"{path} is missing while other files are there: the process died while writing it, or it "
                "was copied in part. Resume from an earlier checkpoint (trainer.resume_from_path), or delete the "
                "directory to start with fresh statistics"
            ) from None
        raise SnapshotMissing(f"no snapshot of verl-adaptive in {directory}") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error
    try:
        manifest = json.loads(raw)
        if not isinstance(manifest, dict) or _seal(manifest) != raw:
            raise ValueError("its content does not match its own digest")
        # Whoever can write the file can write a digest that fits: readers may count on what they look into.
        for name, empty in (("meta", {}), ("files", None), ("attached", {})):
            if not isinstance(manifest.setdefault(name, empty), dict):
                raise ValueError(f"its {name} is {str(manifest[name])[:40]!r}, not a table")
    except (ValueError, RecursionError) as error:
        raise SnapshotError(_damaged(path, str(error))) from error
    if manifest.get("schema") != SNAPSHOT_SCHEMA:
        raise SnapshotError(
            f"{path}: its layout is {manifest.get('schema')!r}, this verl-adaptive reads {SNAPSHOT_SCHEMA}; go on with the version "
            f"that wrote it ({manifest.get('package')})"
        )
    return manifest


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged ({what}). Restore it from a copy, resume from an earlier checkpoint "
        "(trainer.resume_from_path), or delete the directory to start with fresh statistics"
    )


# -- writing --------------------------------------------------------------------------------------------------------


def _write_part(table: pa.Table, file: BinaryIO) -> None:
    # Statistics of prompts are small integers and sums of few values: a dictionary or zstd over split bytes both work,
    # and the second does not fall off a cliff when the values are all different.
    names = [f.name for f in table.schema if f.name != "key"]
    floats = [f.name for f in table.schema if pa.types.is_floating(f.type) and f.type.bit_width >= 32]
    pq.write_table(
        table,
        file,
        compression={**dict.fromkeys(names, "zstd"), "key": "none"},
        compression_level=dict.fromkeys(names, 1),
        use_dictionary=[name for name in names if name not in floats],
        use_byte_stream_split=floats,
        write_statistics=False,
        row_group_size=_PART_ROWS,
    )


def _place(directory: Path, stem: str, suffix: str, data: Any) -> tuple[str, dict[str, Any]]:
    digest = _digest(data)
    name = f"{stem}-{digest[:16]}.{suffix}"
    write_file(directory / name, lambda file: file.write(data))
    return name, {"bytes": memoryview(data).nbytes, "blake2b": digest}


def write_snapshot(
    directory: str | os.PathLike[str],
    table: StatsTable,
    state: dict[str, Any],
    *,
    meta: Mapping[str, Any],
    attach: Collection[Path] = (),
) -> None:
    """Write a snapshot; on return it is complete and on disk.

    Over an older snapshot in the same directory, the older one stays valid until the new one is complete.

    Args:
        directory: made if missing, for example ``global_step_100/adaptive``.
        table: the statistics.
        state: policy and engine state; see :func:`verl_adaptive.stats.state.encode_state` for what it may hold.
        meta: JSON values that describe the run.
        attach: folders from :func:`new_folder` in the same directory, complete: their files become part of the snapshot.

    Raises:
        OSError: the file system refused (full, read-only); an older snapshot there is untouched.
        TypeError: ``state`` or ``meta`` hold what cannot be stored.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    document = encode_state(state)
    whole = table.to_arrow()

    def part(number: int) -> tuple[str, dict[str, Any]]:
        sink = pa.BufferOutputStream()
        _write_part(whole.slice(number * _PART_ROWS, _PART_ROWS), sink)
        return _place(directory, f"prompts-{number:05d}", "parquet", sink.getvalue())

    parts = max(1, -(-len(table) // _PART_ROWS))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        files = list(pool.map(part, range(parts)))
    files.append(_place(directory, "state", "json", document))
    manifest: dict[str, Any] = {
        "schema": SNAPSHOT_SCHEMA,
        "package": package_version(),
        "prompts": len(table),
        "meta": dict(meta),
        "files": dict(files),
    }
    if attach:
        manifest["attached"] = {folder.name: _sealed(folder) for folder in attach}
    sync_directory(directory)
    write_file(directory / MANIFEST, lambda file: file.write(_seal(manifest)))
    sync_directory(directory)
    sync_directory(directory.parent)
    _sweep(directory, {MANIFEST, *manifest["files"], *manifest.get("attached", {})})


def _sweep(directory: Path, keep: Collection[str]) -> None:
    """Remove what an older snapshot or a crashed writer left in the directory, and nothing else."""
    for name in os.listdir(directory):
        if name in keep:
            continue
        if _ATTACHED.fullmatch(name) and (directory / name).is_dir():
            shutil.rmtree(directory / name)
        elif _OURS.fullmatch(re.sub(rf"\.\d+{re.escape(TEMPORARY)}$", "", name)):
            (directory / name).unlink(missing_ok=True)


# -- folders of others ----------------------------------------------------------------------------------------------


def new_folder(directory: str | os.PathLike[str], name: str) -> Path:
    """A folder's path in a snapshot's directory that no snapshot there uses; its parent is made, the folder is not.

    Args:
        directory: what will be given to :func:`write_snapshot`.
        name: small letters and underscores.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{uuid.uuid4().hex[:16]}"
    assert _ATTACHED.fullmatch(path.name), name
    return path


def _sealed(folder: Path) -> dict[str, Any]:
    """Every file under a folder with its hash; on disk when this returns."""
    out = {}
    for root, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(root) / name
            with path.open("rb") as file:
                out[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "blake2b": _digest_file(file)}
                os.fsync(file.fileno())
        sync_directory(Path(root))
    return out


def _digest_file(file: BinaryIO) -> str:
    digest = hashlib.blake2b(digest_size=32)
    while block := file.read(1 << 22):
        digest.update(block)
    return digest.hexdigest()


def attached(directory: str | os.PathLike[str], manifest: Mapping[str, Any], name: str) -> Path | None:
    """A folder that was attached under ``name``, after checking every byte in it; ``None`` if there was none.

    Raises:
        SnapshotError: a file is missing, damaged or added.
    """
    directory = Path(directory)
    for folder, files in manifest.get("attached", {}).items():
        if not re.fullmatch(rf"{name}-[0-9a-f]{{16}}", folder):
            continue
        path, expected = directory / folder, _entries(directory, files)
        there = {p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir()}
        if there != set(expected):
            odd = sorted(there ^ set(expected))[0]
            raise SnapshotError(_damaged(path / odd, "missing" if odd in expected else "not of this snapshot"))
        for at, (size, digest) in expected.items():
            about = (path / at).lstat()  # a pipe would be waited for
            if not stat.S_ISREG(about.st_mode) or about.st_size != size:
                raise SnapshotError(_damaged(path / at, f"{about.st_size} bytes instead of {size}: truncated or torn"))
            with (path / at).open("rb") as file:
                if _digest_file(file) != digest:
                    raise SnapshotError(_damaged(path / at, "its content does not match the manifest's hash"))
        return path
    return None


# -- reading --------------------------------------------------------------------------------------------------------


def _entries(directory: Path, files: Any) -> dict[str, tuple[int, str]]:
    """Size and hash of each file that a manifest names."""
    try:
        return {str(name): (int(e["bytes"]), str(e["blake2b"])) for name, e in files.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(_damaged(directory / MANIFEST, f"incomplete: {error!r}")) from error


def _load(path: Path, size: int, digest: str) -> bytes:
    try:
        data = read_file(path, size)
    except FileNotFoundError:
        raise SnapshotError(_damaged(path, "missing")) from None
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.EINVAL):
            raise SnapshotError(_damaged(path, str(error.strerror))) from None
        raise SnapshotError(f"{path} cannot be read: {error}") from error
    if len(data) != size:
        raise SnapshotError(_damaged(path, f"{len(data)} bytes instead of {size}: truncated or torn"))
    if _digest(data) != digest:
        raise SnapshotError(_damaged(path, "its content does not match the manifest's hash"))
    return data


def read_snapshot(directory: str | os.PathLike[str]) -> tuple[StatsTable, dict[str, Any], dict[str, Any]]:
    """Read a snapshot after checking every byte of it.

    Args:
        directory: what was given to :func:`write_snapshot`.

    Returns:
        ``(table, state, manifest)``.

    Raises:
        SnapshotMissing: there is none.
        SnapshotError: torn or damaged; the message names the file.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    files = _entries(directory, manifest["files"])
    try:
        strange = [name for name in files if not _OURS.fullmatch(name)]
        if strange:
            raise ValueError(f"it names a file {strange[0]!r}")
        parts = sorted(name for name in files if name.startswith("prompts-"))
        state_name = {name.rsplit("-", 1)[0]: name for name in files}["state"]
        prompts = int(manifest["prompts"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(_damaged(directory / MANIFEST, f"incomplete: {error!r}")) from error

    def table_part(name: str) -> pa.Table:
        data = _load(directory / name, *files[name])
        try:
            # Not pq.read_table: it reads in threads of Arrow's whatever it is told, and one that still lets go of `data`
            # while the interpreter ends aborts the process ("terminate called without an active exception").
            with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as file:
                return file.read(use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SnapshotError(_damaged(directory / name, str(error))) from error

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        tables = list(pool.map(table_part, parts))
    try:
        table = StatsTable.from_arrow(*tables)
        if len(table) != prompts:
            raise ValueError(f"{len(table)} prompts instead of {prompts}")
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SnapshotError(_damaged(directory / (parts[0] if parts else MANIFEST), str(error))) from error
    document = _load(directory / state_name, *files[state_name])
    try:
        state = decode_state(document)
    except ValueError as error:
        raise SnapshotError(_damaged(directory / state_name, str(error))) from error
    return table, state, manifest
