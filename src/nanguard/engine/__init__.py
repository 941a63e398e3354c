"""The engine of ``nanguard check``: from paths to sources, rules, suppressions and an outcome."""
