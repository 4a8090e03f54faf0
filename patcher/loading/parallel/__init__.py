"""Models whose layers processes share: tensor and expert parallelism."""
