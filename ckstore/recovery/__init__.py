"""Recovers a store: rebuilds the catalog from packs and log."""
