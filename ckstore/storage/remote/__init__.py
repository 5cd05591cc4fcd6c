"""A store in an object store: packs and log there; a mirror here, with a catalog that follows the log and cached bytes.

commit(change):
    repeat
        change()                                  # rows of the mirror's catalog, in a transaction
        put log/<head + 1> if absent              # the one place where writers meet
    until it was absent, or what is there is ours # else: undo, apply what others have put, and once more
    commit the transaction

A record of the log holds the calls of the catalog's methods that changed rows. Every mirror makes the same calls in the
same order, and so has the same rows. Packs lie there before the record that needs them is put; a name that a record of
`gc` has removed is never needed again, so that no clock decides what may be deleted.
"""
