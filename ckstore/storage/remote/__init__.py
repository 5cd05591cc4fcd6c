"""A store in an object store: packs and log there; a mirror here, with a catalog that follows the log and cached bytes.

commit(change):
    repeat
        change()                                  # rows of the mirror's catalog, in a transaction
        put log/<head + 1> if absent              # the only point at which writers compete
    until it was absent, or the object is our own # else: undo, apply the records of others, and repeat
    commit the transaction

A record of the log holds the calls of the catalog's methods that changed rows. Every mirror makes the same calls in the
same order, and so has the same rows. A record is put after the packs that it needs. No record refers to a name that a
record of `gc` has removed, so that no clock decides which packs may be deleted.
"""
