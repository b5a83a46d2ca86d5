"""Streams: partitioned, re-readable logs of frames in files, Kafka or Kinesis."""
