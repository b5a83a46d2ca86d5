"""Real servers for tests and development: Cassandra, Kafka, Kinesis and S3 on this machine, on
loopback alone."""
