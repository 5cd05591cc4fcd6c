"""What changes or checks a store, one module a verb."""
