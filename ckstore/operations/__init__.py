"""The verbs that change or check a store, one module each."""
