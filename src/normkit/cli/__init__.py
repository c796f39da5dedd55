"""The command `normkit`: one file per verb. Each file parses, calls the library and prints; it computes nothing."""
