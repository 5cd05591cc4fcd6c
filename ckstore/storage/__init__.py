"""A store's bytes and rows: packs, log and catalog; no code here knows floats."""
