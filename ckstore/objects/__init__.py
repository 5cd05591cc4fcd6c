"""Ids, records and documents of versions, and the reader that decodes objects."""
