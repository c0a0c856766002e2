"""The `transfer-engine` command line."""
