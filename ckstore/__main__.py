"""`python -m ckstore`: the command line."""

from ckstore.cli import main

main()
