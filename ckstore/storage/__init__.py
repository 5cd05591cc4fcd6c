"""A store's bytes and rows: packs, log and catalog; nothing here knows what a float is."""
