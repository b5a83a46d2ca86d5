"""Local Cassandra, Kafka, Kinesis and S3 servers for tests and development, on loopback only."""
