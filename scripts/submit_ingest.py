"""Spark ingest for a cluster: the script for spark-submit.

    spark-submit --master spark://HOST:7077 scripts/submit_ingest.py --data D \\
        --stream kinesis://STREAM --store cassandra://HOST/KEYSPACE

Accepts the flags of `understudy ingest`; spark-submit sets the master. See docs/spark.md for the
requirements of the machines.
"""

import os
import sys

from understudy.cli.root import run

if __name__ == "__main__":
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        sys.exit(
            "start this script with spark-submit; to run without spark-submit: understudy ingest "
            "--engine spark"
        )
    sys.exit(run(["ingest", "--engine", "spark", *sys.argv[1:]]))
