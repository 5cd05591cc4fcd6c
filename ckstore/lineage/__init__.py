"""Plans against which base and in which layers objects are stored; touches no file."""
