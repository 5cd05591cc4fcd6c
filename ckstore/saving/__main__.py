"""`python -m ckstore.saving`: the saver's process."""

import sys

from ckstore.saving.process import main

main(sys.argv[1])
