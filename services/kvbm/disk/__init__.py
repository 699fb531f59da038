"""The disk tier's files: segments of records, their format, and the threads that read and write them. May import
tiers."""
