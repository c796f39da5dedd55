"""Model families as data: one TOML file per family, and the graph of a checkpoint that follows from it."""
