"""Keep the rows of a verl-format Parquet file whose statistics satisfy a condition.

examples:
  verl-adaptive filter-dataset train.parquet kept.parquet --stats checkpoints/project/experiment \\
      --where "0.1 <= pass_rate <= 0.9"
  verl-adaptive filter-dataset train.parquet kept.parquet --stats eval.jsonl --where "pass_rate < 1" --keep-unseen

Rows keep their order, the file its columns and schema. A row is found in the store as training finds it: by its data
source, messages and ground truth, or by --id-key. A row that the store has no rollouts of satisfies no comparison of
rates and is left out; --keep-unseen keeps it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from verl_adaptive.commands.arguments import add_store_options, condition, how_identified, how_read, refuse_overwrite
from verl_adaptive.commands.output import note, note_gaps, number, share
from verl_adaptive.errors import AdaptiveError, UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="IN", help="the data set in verl's format, a Parquet file")
    parser.add_argument("out", metavar="OUT", help="the Parquet file to write")
    parser.add_argument("--stats", metavar="STORE", required=True, help="what to judge by, a store as for `stats`")
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        type=condition,
        required=True,
        help='rows that stay: --where "0.1 <= pass_rate <= 0.9"; `stats --columns` lists what it may name',
    )
    parser.add_argument("--keep-unseen", action="store_true", help="keep rows that were never rolled out")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_store_options(parser)


def run(args: argparse.Namespace) -> int:
    from verl_adaptive.stats import open_run
    from verl_adaptive.stats.dataset import keys_of
    from verl_adaptive.stats.expressions import Expression
    from verl_adaptive.stats.rows import open_parquet

    wanted = Expression(args.where)
    if not args.out.endswith(".parquet"):
        raise UsageError(f"{args.out}: what is written is Parquet; give it a name that ends in .parquet")
    if os.path.exists(args.out) and os.path.samefile(args.data, args.out):
        raise AdaptiveError(f"{args.out} is the input; name another file")
    refuse_overwrite(args.out, args.overwrite)
    open_parquet(args.data).close()
    opened = open_run(args.stats, **how_read(args))
    note_gaps(opened)
    prompts = opened.prompts
    keys, sources = keys_of(args.data, **how_identified(args))
    known = prompts.table.rows_for(keys, create=False) >= 0
    # Rows that the store lacks become prompts without a visit, so that a condition treats both alike.
    rows = prompts.table.rows_for(keys, sources=np.array(sources, dtype=object))
    keep = wanted.select(prompts)[rows]
    unseen = prompts.table.col("visits")[rows] == 0
    if args.keep_unseen:
        keep |= unseen
    if len(keys) and not known.any():
        raise AdaptiveError(
            f"none of the {len(keys)} rows of {args.data} is in {opened.where}. A row is found by its data source, "
            "messages and ground truth together, or by --id-key: is this the run's data set?"
        )
    if len(keys) and not keep.any():
        raise AdaptiveError(
            f"none of the {number(len(keys))} rows of {args.data} satisfies {args.where!r}: nothing was written, since "
            "training refuses an empty data set"
        )
    _copy(args.data, args.out, keep)
    note(
        f"{number(int(keep.sum()))} of {number(len(keep))} rows kept ({share(float(keep.sum()), len(keep))}) in {args.out}; "
        f"{number(int(known.sum()))} rows are in the store, {number(int(unseen.sum()))} were never rolled out"
        f"{' and are kept' if args.keep_unseen and unseen.any() else ''}"
    )
    return 0


def _copy(source: str, target: str, keep: np.ndarray) -> None:
    """Copy the rows marked in ``keep``, a row group at a time, with the file's own schema and compression."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl_adaptive.stats.atomic import write_file
    from verl_adaptive.stats.rows import StoreError, open_parquet

    def write(out: BinaryIO) -> None:
        file, codec, start = open_parquet(source), "snappy", 0
        if file.metadata.num_row_groups and file.metadata.num_columns:
            codec = file.metadata.row_group(0).column(0).compression.lower().replace("uncompressed", "none")
        with pq.ParquetWriter(out, file.schema_arrow, compression=codec) as writer:
            for number in range(file.metadata.num_row_groups):
                group = file.read_row_group(number)
                mask = keep[start : start + group.num_rows]
                start += group.num_rows
                if mask.any():
                    writer.write_table(group.filter(pa.array(mask)).cast(file.schema_arrow))

    try:
        write_file(Path(target), write)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{source} cannot be copied to {target}: {error}") from error
