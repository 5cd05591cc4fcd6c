"""What a version is made of: ids, records, documents, and the reader that decodes objects."""
