"""`python -m ckstore.saving`: the saver's process."""

from ckstore.saving.process import main

main()
