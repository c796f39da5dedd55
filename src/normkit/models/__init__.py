"""What is known of model families, as data: one TOML file a family, and the graph that it makes of a checkpoint."""
