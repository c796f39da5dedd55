"""The command `normkit`: one file a verb. Each parses, calls the library and prints; nothing is computed here."""
