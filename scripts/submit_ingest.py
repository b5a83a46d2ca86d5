"""Spark ingest for a cluster: what spark-submit is given.

    spark-submit --master spark://HOST:7077 scripts/submit_ingest.py --data D \\
        --stream kinesis://STREAM --store cassandra://HOST/KEYSPACE

Takes the flags of `understudy ingest`; the master is spark-submit's. See docs/spark.md for what the
machines need.
"""

import os
import sys

from understudy.cli.root import run

if __name__ == "__main__":
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        sys.exit(
            "this is started by spark-submit; without it, call: understudy ingest --engine spark"
        )
    sys.exit(run(["ingest", "--engine", "spark", *sys.argv[1:]]))
