"""Where a store's bytes and rows stand: packs, log and catalog. Nothing here knows what a float is."""
